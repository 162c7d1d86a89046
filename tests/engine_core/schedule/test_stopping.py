from __future__ import annotations

from typing import Any

import pytest

from pagewire.engine_core.schedule.sequence import Sequence, sequences
from pagewire.engine_core.schedule.stopping import finish_reason, stop_ids
from pagewire.engine_core.tenants.accounts import Account
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.requests import Request

EOS = 99


def after(*output: int, eos: int | None = EOS, **params: Any) -> Sequence:
    """A request that has generated `output`."""
    submitted = Request(1, "r", Prompt([1, 2]), SamplingParams(**params), seed=0, eos_token_id=eos)
    (request,) = sequences(
        submitted, b"c", 0, 0.0, max_model_len=100, share_prefixes=True, tenant=Account(b"c")
    )
    request.token_ids += output
    return request


@pytest.mark.parametrize(
    ("output", "params", "outcome"),
    [
        ((5,), {}, (None, None)),
        ((5, EOS), {}, ("stop", None)),
        ((5, EOS), {"ignore_eos": True}, (None, None)),
        ((5, EOS), {"eos": None}, (None, None)),
        ((5, 7), {"stop_token_ids": [7, 8]}, ("stop", 7)),
        ((7, 5), {"stop_token_ids": [7]}, (None, None)),
        ((5, 7), {"stop_token_ids": [7], "ignore_eos": True}, ("stop", 7)),
        ((5, EOS), {"stop_token_ids": [EOS]}, ("stop", None)),
        ((5, EOS), {"stop_token_ids": [EOS], "ignore_eos": True}, ("stop", EOS)),
        ((5, 6), {"max_tokens": 2}, ("length", None)),
        ((5, EOS), {"max_tokens": 2}, ("stop", None)),
        ((5, 7), {"max_tokens": 2, "stop_token_ids": [7]}, ("stop", 7)),
        ((5, EOS), {"max_tokens": 2, "ignore_eos": True}, ("length", None)),
        ((EOS,), {"min_tokens": 2}, (None, None)),
        ((7,), {"min_tokens": 2, "stop_token_ids": [7]}, (None, None)),
        ((5, EOS), {"min_tokens": 2}, ("stop", None)),
        ((EOS,), {"min_tokens": 1, "max_tokens": 1}, ("stop", None)),
    ],
)
def test_when_a_sequence_ends(
    output: tuple[int, ...], params: dict[str, Any], outcome: tuple[str | None, int | None]
) -> None:
    assert finish_reason(after(*output, **params)) == outcome


@pytest.mark.parametrize(
    ("params", "ids"),
    [
        ({}, [EOS]),
        ({"eos": None}, []),
        ({"ignore_eos": True}, []),
        ({"stop_token_ids": [7, 8]}, [7, 8, EOS]),
        ({"stop_token_ids": [7], "ignore_eos": True}, [7]),
    ],
)
def test_tokens_that_end_a_sequence(params: dict[str, Any], ids: list[int]) -> None:
    assert stop_ids(after(**params)) == stop_ids(after(5, **params, min_tokens=2)) == ids
