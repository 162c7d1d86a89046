"""Stages of a pipeline on emulated GPUs, whose steps are recorded: to the bit what a worker without graphs does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from torch import Tensor

from pagewire.ipc.speculative import SpeculativeConfig
from pagewire.ipc.wire.worker_messages import Parallel
from pagewire.workers.process import wiring
from pagewire.workers.run.graphs import recorded_shapes
from pagewire.workers.run.runner import Runner
from tests.kernels.cuda.emulate.launcher import EmulatedLauncher
from tests.kernels.cuda.emulate.worker import EmulatedCudaDevice, emulated
from tests.workers.architectures import SERVED, VOCAB_SIZE, Architecture
from tests.workers.device.conftest import HEADS, SIZES
from tests.workers.device.test_cuda import Adapted, low_rank
from tests.workers.driver import load_runner
from tests.workers.parallel.pipelined import Output, generate
from tests.workers.parallel.test_stages import Parrot
from tests.workers.parallel.threads import Rank, run_ranks
from tests.workers.parity import make_prompts

PROMPTS = make_prompts(VOCAB_SIZE, (9, 20, 1, 5))
MOST = {"max_num_batched_tokens": 64}  # steps with prompts are recorded, too
Load = Callable[..., Runner]


def send_itself(rank: Rank, states: Tensor, target: int) -> None:
    """Send a tensor that is read when it is received: as late as NCCL may read it."""
    rank.send_object(states, target)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Makes runners on emulated devices, and ranks of a pipeline of them."""
    launcher = EmulatedLauncher()
    monkeypatch.setattr(wiring, "open_device", lambda config: EmulatedCudaDevice(launcher))
    monkeypatch.setattr(Rank, "send", send_itself)

    def load_rank(folder: Path, rank: Rank | None = None, **fields: object) -> Runner:
        if rank is not None:
            fields["parallel"] = Parallel(rank.rank, rank.size, stages=rank.size)
        return load_runner(folder, rank, **(SIZES | fields))[0]

    with emulated(launcher):
        yield load_rank


def write(folder: Path, name: str) -> Path:
    """A model of an architecture, with heads that have a kernel."""
    fields = SERVED[name].fields | HEADS | {"num_hidden_layers": 3}
    return Architecture(name, fields, model_type=SERVED[name].model_type).write(folder, dtype="bfloat16")


def replaying(runner: Runner, work: Callable[[], list[Output]]) -> list[Output]:
    """What a rank generates, all of whose steps are replayed; no shape was dropped as wrong."""
    device, graphs = runner.device, runner.graphs
    assert isinstance(device, EmulatedCudaDevice) and graphs is not None
    assert graphs.shapes == recorded_shapes(runner.config, runner.model.max_model_len)
    num_replayed, num_run = device.num_replayed, 0
    run = runner.launcher._run

    def count(*args: object) -> object:
        nonlocal num_run
        num_run += 1
        return run(*args)  # type: ignore[arg-type]

    runner.launcher._run = count  # type: ignore[assignment, method-assign]
    outputs = work()
    assert device.num_replayed - num_replayed == num_run > 6
    return outputs


@pytest.mark.parametrize(
    ("name", "stages"), [("llama", 2), ("llama", 3), ("granite", 2), ("opt", 2), ("bamba", 2)]
)
def test_replayed_stages_compute_what_one_worker_does(
    load: Load, tmp_path: Path, name: str, stages: int
) -> None:
    """As stacks and as modules, in batches that are padded, and with states."""
    folder = write(tmp_path, name)
    expected, _ = generate(load(folder, enforce_eager=True), PROMPTS)

    def work(rank: Rank) -> list[Output]:
        runner = load(folder, rank, **MOST)
        return replaying(runner, lambda: generate(runner, PROMPTS, rank)[0])

    assert run_ranks(stages, work) == [expected] * stages


def test_drafts_in_replayed_stages(load: Load, tmp_path: Path) -> None:
    folder, speculative = write(tmp_path, "llama"), SpeculativeConfig("ngram", num_speculative_tokens=3)
    expected, _ = generate(load(folder, enforce_eager=True), PROMPTS)

    def work(rank: Rank) -> list[Output]:
        runner = load(folder, rank, speculative=speculative, **MOST)
        return replaying(runner, lambda: generate(runner, PROMPTS, rank, speculation=Parrot(expected))[0])

    assert run_ranks(2, work) == [expected] * 2


def test_adapters_in_replayed_stages(load: Load, tmp_path: Path) -> None:
    """Each stage has a part of the adapters, and some requests have none."""
    folder = write(tmp_path, "llama")
    adapters = [low_rank(tmp_path / str(rank), rank, rank) for rank in (1, 8)]

    def adapted(rank: Rank | None, **fields: object) -> Runner:
        adapted = Adapted(lambda **others: load(folder, rank, **others), **fields)
        for index, each in enumerate(adapters, 1):
            adapted.load(index, each)
        return adapted.runner

    def outputs(runner: Runner, rank: Rank | None, of_prompts: Sequence[int]) -> list[Output]:
        return generate(runner, PROMPTS, rank, adapters=of_prompts)[0]

    plain = adapted(None, enforce_eager=True)
    orders = ([1, 0, 2, 2], [0, 0, 0, 0])
    expected = [outputs(plain, None, order) for order in orders]
    assert expected[0] != expected[1]

    def work(rank: Rank) -> list[list[Output]]:
        runner = adapted(rank, **MOST)
        return [replaying(runner, partial(outputs, runner, rank, order)) for order in orders]

    assert run_ranks(2, work) == [expected] * 2
