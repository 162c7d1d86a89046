"""The real scheduler and a runner with a drafter of its own: every kind of request, the same to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagewire.engine_core.schedule.speculation import NoSpeculation
from pagewire.ipc.speculative import Method, SpeculativeConfig
from tests.engine_core.schedule.simulation import drafting
from tests.workers.driver import load_runner
from tests.workers.speculation import test_eagle3, test_mlp_speculator
from tests.workers.speculation.mtp_models import write_mtp
from tests.workers.speculation.speculating import runner_with
from tests.workers.test_drafts import WAYS, Output, Way, generate

SIZES = {"max_num_seqs": 32, "num_blocks": 320}
BY_NAME = {way.name: way for way in WAYS}
PREEMPTED = BY_NAME["preempted"]


@pytest.fixture(scope="module")
def expected(llama: Path) -> dict[tuple[int, int], Output]:
    """Every request without drafts."""
    return generate(runner_with(llama, None, **SIZES), BY_NAME["a batch"], NoSpeculation())


def drafter(method: Method, llama: Path, folder: Path) -> Path:
    """The model itself, or a random one of another kind."""
    if method == "draft_model":
        return llama
    if method == "eagle3":
        test_eagle3.write(folder, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 0, 0]})
    else:
        test_mlp_speculator.write(folder)
    return folder


@pytest.mark.parametrize(
    ("method", "way", "least"),
    [
        ("draft_model", "a batch", 0.5),
        ("draft_model", "preempted", 0.5),
        ("mlp_speculator", "no cache, one step at a time", 0.0),
        ("eagle3", "preempted", 0.0),
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


@pytest.mark.parametrize(("name", "num_mtp"), [("deepseek_v3", 1), ("glm4_moe", 2)])
def test_layers_of_the_models_checkpoint_change_nothing(tmp_path: Path, name: str, num_mtp: int) -> None:
    folder = write_mtp(tmp_path, name, num_mtp, dtype="bfloat16")
    plain = load_runner(folder, **SIZES)[0]
    runner = load_runner(folder, speculative=SpeculativeConfig("mtp", None, 3), **SIZES)[0]
    expected = generate(plain, PREEMPTED, NoSpeculation())
    outputs = generate(runner, PREEMPTED, drafting("worker", seed=3, longest=3))
    for key, output in outputs.items():
        assert output.content == expected[key].content, key
    assert sum(output.num_drafts for output in outputs.values()) > 20
