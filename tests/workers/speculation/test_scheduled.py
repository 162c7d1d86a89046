"""The real scheduler and a runner with a drafter of its own: every kind of request, the same to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagewire.engine_core.schedule.speculation import NoSpeculation
from pagewire.ipc.speculative import Method

from ...engine_core.schedule.simulation import drafting
from ..test_drafts import WAYS, Output, Way, generate
from .speculating import runner_with
from .test_mlp_speculator import write

SIZES = {"max_num_seqs": 32, "num_blocks": 320}
BY_NAME = {way.name: way for way in WAYS}


@pytest.fixture(scope="module")
def expected(llama: Path) -> dict[tuple[int, int], Output]:
    """Every request without drafts."""
    return generate(runner_with(llama, None, **SIZES), BY_NAME["a batch"], NoSpeculation())


def drafter(method: Method, llama: Path, folder: Path) -> Path:
    """The model itself, or an MLP speculator."""
    if method == "mlp_speculator":
        write(folder)
        return folder
    return llama


@pytest.mark.parametrize(
    ("method", "way", "least"),
    [
        ("draft_model", "a batch", 0.5),
        ("draft_model", "preempted", 0.5),
        ("mlp_speculator", "no cache, one step at a time", 0.0),
    ],
)
def test_drafts_of_the_worker_change_nothing(
    llama: Path,
    tmp_path: Path,
    expected: dict[tuple[int, int], Output],
    method: Method,
    way: str,
    least: float,
) -> None:
    """least: the share of drafts that count; a copy of the model drafts its own tokens, but knows no grammar."""
    how: Way = BY_NAME[way]
    runner = runner_with(llama, drafter(method, llama, tmp_path), method, 3, **SIZES)
    outputs = generate(runner, how, drafting("worker", seed=3, longest=3))
    for key, output in outputs.items():
        assert output.content == expected[key].content, key
    num_drafts = sum(output.num_drafts for output in outputs.values())
    assert num_drafts > 20
    assert sum(output.num_accepted for output in outputs.values()) >= least * num_drafts
