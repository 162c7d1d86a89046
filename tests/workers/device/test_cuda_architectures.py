"""Every architecture on a device with our kernels: recorded steps in bfloat16 beside PyTorch in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pagewire.ipc.wire.params import SamplingParams
from pagewire.workers.run.runner import Runner
from tests.workers.architectures import SERVED, VOCAB_SIZE, Architecture
from tests.workers.device.test_cuda import HEADS, load  # noqa: F401
from tests.workers.driver import Driver, values
from tests.workers.parity import make_prompts

PARAMS = SamplingParams(temperature=0.0, logprobs=0, prompt_logprobs=0)


@pytest.mark.every_architecture
@pytest.mark.parametrize("name", SERVED)
def test_every_architecture(name: str, tmp_path: Path, load: Callable[..., Runner]) -> None:  # noqa: F811
    architecture = SERVED[name]
    fields = architecture.fields | HEADS
    folder = Architecture(name, fields, model_type=architecture.model_type).write(tmp_path, dtype="bfloat16")
    found = []
    for dtype in ("float32", "bfloat16"):
        requests = Driver(load(folder, dtype=dtype)).run(make_prompts(VOCAB_SIZE, (9, 3)), 4, PARAMS)
        found.append(np.concatenate([values(part)[1] for r in requests for part in r.prompt_logprobs]))
    print("DIFF", name, np.abs(found[0] - found[1]).mean(), np.abs(found[0] - found[1]).max())
    assert np.abs(found[0] - found[1]).mean() < 0.05
