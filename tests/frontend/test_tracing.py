"""The attributes of a request's span. (`tests/end_to_end/test_tracing.py` sends spans to a collector.)"""

from __future__ import annotations

from typing import Any

import pytest

from pagewire.frontend.outputs import RequestState
from pagewire.frontend.tracing import request_attributes
from pagewire.ipc.items import Prompt
from pagewire.ipc.messages import Request
from pagewire.ipc.params import SamplingParams


@pytest.mark.parametrize(("params", "n"), [({"n": 3}, 3), ({"n": 3, "num_returned": 2}, 2)])
def test_n_is_the_number_of_outputs_that_the_client_gets(params: dict[str, Any], n: int) -> None:
    request = Request(1, "r", Prompt([1, 2]), SamplingParams(**params), seed=0)
    attributes = dict(request_attributes(RequestState(request, None, None)))
    assert (attributes["gen_ai.request.n"], attributes["gen_ai.usage.num_sequences"]) == (n, 3)
