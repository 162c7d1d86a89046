"""Drafters over two ranks, in the threads of one process: all ranks propose the same, and no output changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from pagewire.engine_core.schedule.speculation import NoSpeculation
from pagewire.ipc.speculative import Method, SpeculativeConfig
from pagewire.ipc.wire.worker_messages import Parallel, Row, SlotInit, StepPlan, StepResult, WorkerConfig
from pagewire.workers.checkpoint.headers import read_headers
from pagewire.workers.device.cpu import CpuEvent
from pagewire.workers.errors import LoadError
from pagewire.workers.estimate.fit import sizes_of
from pagewire.workers.process.calls import call
from pagewire.workers.process.main import CoreSession, Pipeline
from pagewire.workers.run.runner import Runner
from tests.engine_core.schedule.simulation import drafting
from tests.workers.architectures import GROUPED, VOCAB_SIZE, Architecture
from tests.workers.driver import GREEDY, load_runner
from tests.workers.parallel.threads import Rank, run_ranks
from tests.workers.parity import make_prompts
from tests.workers.speculation import test_eagle3, test_mlp_speculator
from tests.workers.speculation.mtp_models import MtpOracle, write_mtp
from tests.workers.speculation.speculating import DraftOracle, Proposal, SpeculativeDriver
from tests.workers.test_drafts import WAYS, generate

T = TypeVar("T")
NUM_DRAFTS = 3
PREEMPTED = next(way for way in WAYS if way.name == "preempted")
EAGLE_LAYERS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 0, 0]}}  # of a model of two


def over_ranks(
    model: Path, speculative: SpeculativeConfig | None, work: Callable[[Runner], T], **fields: Any
) -> Sequence[T]:
    """What each of two ranks returns."""

    def run(rank: Rank) -> T:
        return work(load_runner(model, collective=rank, speculative=speculative, **fields)[0])

    return run_ranks(2, run)


def speculate(runner: Runner) -> list[list[Proposal]]:
    """The proposals for prompts in chunks, with drafts that are wrong, and steps without drafts."""
    driver = SpeculativeDriver(runner, 13, lambda step, slot: (step + slot) % (NUM_DRAFTS + 1))
    sequences = [driver.add(i, prompt, GREEDY) for i, prompt in enumerate(make_prompts(VOCAB_SIZE))]
    driver.run(sequences, 9)
    return [s.proposals for s in sequences]


def proposals_of(model: Path, speculative: SpeculativeConfig) -> list[Proposal]:
    """What both of two ranks propose."""
    first, second = over_ranks(model, speculative, speculate)
    assert first == second
    proposals = [proposal for each in first for proposal in each]
    assert {len(proposal.drafts) for proposal in proposals} == {1, 2, 3}
    return proposals


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random draft model, which two ranks can divide."""
    fields = GROUPED | {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
    return Architecture("llama", fields).write(tmp_path_factory.mktemp("small"), seed=5)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of a single attention head, which no ranks can divide."""
    fields = GROUPED | {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    return Architecture("llama", fields).write(tmp_path_factory.mktemp("single"), seed=6)


def drafter(method: Method, llama: Path, folder: Path) -> SpeculativeConfig:
    """The model itself, or a random one of another kind."""
    if method == "eagle3":
        test_eagle3.write(folder, **EAGLE_LAYERS)
    elif method == "mlp_speculator":
        test_mlp_speculator.write(folder)
    return SpeculativeConfig(method, str(llama if method == "draft_model" else folder), NUM_DRAFTS)


@pytest.mark.parametrize("method", ["draft_model", "mlp_speculator", "eagle3"])
def test_drafts_change_no_bit(llama: Path, tmp_path: Path, method: Method) -> None:
    """Under the real scheduler, of which each rank has a copy, with every kind of request."""
    sizes = {"max_num_seqs": 32, "num_blocks": 320}

    def plain(runner: Runner) -> Any:
        return generate(runner, PREEMPTED, NoSpeculation())

    def drafted(runner: Runner) -> Any:
        return generate(runner, PREEMPTED, drafting("worker", seed=3, longest=NUM_DRAFTS))

    expected, _ = over_ranks(llama, None, plain, **sizes)
    first, second = over_ranks(llama, drafter(method, llama, tmp_path), drafted, **sizes)
    assert first == second
    for key, output in first.items():
        assert output.content == expected[key].content, key
    num_drafts = sum(output.num_drafts for output in first.values())
    num_accepted = sum(output.num_accepted for output in first.values())
    assert num_drafts > 20 and num_accepted >= (0.5 * num_drafts if method == "draft_model" else 0)


@pytest.mark.parametrize("size", [1, 2])
def test_a_draft_model_proposes_what_transformers_says(llama: Path, small: Path, size: int) -> None:
    """Divided over both ranks, or whole on each of them."""
    speculative = SpeculativeConfig("draft_model", str(small), NUM_DRAFTS, draft_tensor_parallel_size=size)
    DraftOracle(small).check(proposals_of(llama, speculative))

    def sizes(runner: Runner) -> tuple[int, int]:
        drafter = sizes_of(read_headers(llama), runner.config, "avx2").drafter
        assert drafter is not None
        assert drafter.kv_token_bytes * runner.config.block_size == runner.drafter.block_bytes
        return runner.drafter.weight_bytes, runner.drafter.block_bytes

    alone = sizes(load_runner(llama, speculative=SpeculativeConfig("draft_model", str(small), 3))[0])
    for own in over_ranks(llama, speculative, sizes):
        assert own == alone if size == 1 else own[0] < 0.7 * alone[0] and own[1] * 2 == alone[1]


def test_a_draft_model_that_cannot_be_divided_is_whole(llama: Path, single: Path) -> None:
    speculative = SpeculativeConfig("draft_model", str(single), NUM_DRAFTS)
    DraftOracle(single).check(proposals_of(llama, speculative))
    divided = SpeculativeConfig("draft_model", str(single), NUM_DRAFTS, draft_tensor_parallel_size=2)
    with pytest.raises(
        LoadError, match=r"cannot be divided over 2 ranks.*speculative_draft_tensor_parallel_size=1 every"
    ):
        over_ranks(llama, divided, speculate)


def test_an_mlp_speculator_proposes_what_its_formula_says(llama: Path, tmp_path: Path) -> None:
    settings, weights = test_mlp_speculator.write(tmp_path)
    proposals = proposals_of(llama, SpeculativeConfig("mlp_speculator", str(tmp_path), NUM_DRAFTS))
    hidden = test_mlp_speculator.hidden_states(llama, proposals)
    for proposal, state in zip(proposals, hidden, strict=True):
        expected = test_mlp_speculator.expected_drafts(settings, weights, state, proposal.before[-1])
        assert proposal.drafts == expected[: len(proposal.drafts)]


@pytest.mark.parametrize(
    "changes", [{}, {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}]
)
def test_an_eagle3_head_proposes_what_its_formula_says(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """Divided; or whole on both ranks, as it has a single attention head."""
    for name, value in zip(("HEADS", "KV_HEADS", "HEAD_DIM"), changes.values(), strict=False):
        monkeypatch.setattr(test_eagle3, name, value)
    oracle = test_eagle3.Oracle(llama, *test_eagle3.write(tmp_path, **EAGLE_LAYERS, **changes))
    speculative = SpeculativeConfig("eagle3", str(tmp_path), NUM_DRAFTS)
    oracle.check(proposals_of(llama, speculative))
    alone = load_runner(llama, speculative=speculative)[0].drafter.block_bytes
    own = over_ranks(llama, speculative, lambda runner: runner.drafter.block_bytes)
    assert [num_bytes * (1 if changes else 2) for num_bytes in own] == [alone] * 2


def test_every_rank_needs_memory_for_the_whole_embedding_of_an_eagle3_head(
    llama: Path, tmp_path: Path
) -> None:
    """One of its own, in another dtype than the model's, so that it has to be converted."""
    test_eagle3.write(tmp_path, own_embedding=True, **EAGLE_LAYERS)
    speculative = SpeculativeConfig("eagle3", str(tmp_path), NUM_DRAFTS)

    def parts(num_ranks: int) -> dict[str, int]:
        config = WorkerConfig(
            str(llama), dtype="bfloat16", parallel=Parallel(size=num_ranks), speculative=speculative
        )
        drafter = sizes_of(read_headers(llama), config, "avx2").drafter
        assert drafter is not None
        return {part.part: part.packed_bytes for part in drafter.parts}

    alone, own = parts(1), parts(2)
    assert own["embedding"] == alone["embedding"] == VOCAB_SIZE * test_eagle3.HIDDEN * 2
    assert own["attention"] * 2 == alone["attention"]


def test_layers_of_the_models_checkpoint_propose_what_their_formula_says(tmp_path: Path) -> None:
    write_mtp(tmp_path, "deepseek_v3", 2, own=True)
    speculative = SpeculativeConfig("mtp", None, NUM_DRAFTS)
    MtpOracle(tmp_path).check(proposals_of(tmp_path, speculative))
    alone = load_runner(tmp_path, speculative=speculative)[0].drafter
    for num_bytes, block_bytes in over_ranks(
        tmp_path, speculative, lambda r: (r.drafter.weight_bytes, r.drafter.block_bytes)
    ):
        # Every rank has the latents, which all heads read.
        assert num_bytes < alone.weight_bytes and block_bytes == alone.block_bytes


def test_ranks_sleep_and_wake_with_their_drafters(llama: Path, small: Path) -> None:
    def work(runner: Runner) -> list[list[Proposal]]:
        full = runner.memory()
        call(runner, "sleep", [2], {})
        assert runner.memory()["weights"] == runner.memory()["kv_cache"] == 0
        call(runner, "wake_up", [None], {})
        assert all(runner.memory()[name] == full[name] for name in ("weights", "kv_cache"))
        return speculate(runner)

    first, second = over_ranks(llama, SpeculativeConfig("draft_model", str(small), NUM_DRAFTS), work)
    assert first == second
    DraftOracle(small).check([proposal for each in first for proposal in each])


class LateEvent(CpuEvent):
    """An event that a device has not reached when it is looked at."""

    def reached(self) -> bool:
        return False


@dataclass
class Results:
    """Takes the place of the connection to the core."""

    sent: list[StepResult]
    descriptors: tuple[int, ...] = ()

    def is_quiet(self) -> bool:
        return True

    def send(self, message: StepResult) -> None:
        self.sent.append(message)


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_ranks_draft_in_the_same_order(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Method
) -> None:
    """On devices that run ahead one rank may find a step over before the next one is launched, another after it."""
    prompts = make_prompts(VOCAB_SIZE, (9, 5, 6))

    def plan(number: int) -> StepPlan:
        """A step of one more prompt."""
        prompt = prompts[number]
        init = SlotInit(number, prompt, len(prompt), [8 * number + i for i in range(8)], GREEDY, 0)
        return StepPlan(number, [Row(number, 0, len(prompt), num_samples=1, num_drafts=NUM_DRAFTS)], [init])

    def work(runner: Runner) -> list[list[int]]:
        if runner.collective.rank:
            monkeypatch.setattr(runner.device, "record_event", lambda: LateEvent(time.monotonic()))
        results = Results([])
        pipeline = Pipeline(cast(CoreSession, results), runner)
        for number in range(len(prompts)):
            pipeline.launch(plan(number))
        pipeline.finish()
        return [row.drafts for result in results.sent for row in result.rows]

    first, second = over_ranks(llama, drafter(method, llama, tmp_path), work)
    assert first == second and [len(drafts) for drafts in first] == [NUM_DRAFTS] * len(prompts)
