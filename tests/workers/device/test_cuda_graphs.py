"""Recorded steps, on an emulated device that replays operations and launches as a CUDA graph does.

The oracle is the same model without graphs: a replay must give what it gives, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pagewire.ipc.speculative import SpeculativeConfig
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.worker_messages import Row, StepPlan, WorkerConfig
from pagewire.workers.device.waits import WaitFinder, WaitsError
from pagewire.workers.module.structure import DECODERS, GPT_LIKE
from pagewire.workers.network.network import Network
from pagewire.workers.process import wiring
from pagewire.workers.run.graphs import recorded_shapes
from pagewire.workers.run.runner import Runner
from tests.kernels.cuda.emulate.launcher import EmulatedLauncher
from tests.kernels.cuda.emulate.tape import Tape
from tests.kernels.cuda.emulate.worker import EmulatedCudaDevice, emulated
from tests.workers.architectures import SERVED, VOCAB_SIZE, Architecture
from tests.workers.device.conftest import HEADS, SIZES
from tests.workers.device.test_cuda import (
    EDITED,
    PLAIN,
    WITH_KERNEL,
    Adapted,
    Core,
    low_rank,
    make_plans,
    outcome,
    write_latents,
)
from tests.workers.driver import GREEDY, Driver, load_runner, tokens_of
from tests.workers.parity import make_prompts
from tests.workers.random_adapters import make_tensors
from tests.workers.random_adapters import write as write_adapter

Load = Callable[..., Runner]
NUM_DRAFTS = 3
STACKED = {*DECODERS, *GPT_LIKE}
DRAFTS = SpeculativeConfig(method="ngram", num_speculative_tokens=NUM_DRAFTS)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Makes runners on emulated devices."""
    launcher = EmulatedLauncher()
    monkeypatch.setattr(wiring, "open_device", lambda config: EmulatedCudaDevice(launcher))
    with emulated(launcher):
        yield lambda folder, **fields: load_runner(folder, **(SIZES | fields))[0]


def write(folder: Path, name: str) -> Path:
    """A model of an architecture, with heads that have a kernel."""
    fields = SERVED[name].fields | HEADS
    return Architecture(name, fields, model_type=SERVED[name].model_type).write(folder, dtype="bfloat16")


def num_replayed(runner: Runner) -> int:
    """How often steps were replayed, but for those by which the start looked whether they are right: all are."""
    assert isinstance(runner.device, EmulatedCudaDevice) and runner.graphs is not None
    assert runner.graphs.shapes == recorded_shapes(runner.config, runner.model.max_model_len)
    return runner.device.num_replayed - len({shape.num_each for shape in runner.graphs.shapes})


@pytest.mark.parametrize(
    "name", ["granite", "gpt_neox", "cohere2", "opt", "phi", "bloom", "starcoder2", "bitnet", "gpt_bigcode"]
)
def test_models_of_other_families_are_replayed(tmp_path: Path, load: Load, name: str) -> None:
    folder, most = write(tmp_path, name), {"max_num_batched_tokens": 64}
    recorded, plain = load(folder, **most), load(folder, **most, enforce_eager=True)
    assert recorded.model.is_stack == (name in STACKED) and plain.graphs is None
    plans = make_plans(make_prompts(VOCAB_SIZE, (9, 20, 1)), 6, [PLAIN, EDITED, GREEDY])
    expected = [outcome(plain.step(plan)) for plan in plans]
    assert [outcome(result) for result in Core(recorded).run(plans)] == expected
    assert num_replayed(recorded) == 6  # the prompts, too


@pytest.mark.parametrize(
    ("name", "reason"), [("dbrx", "aten::bincount has a result that the host must know")]
)
def test_models_that_wait_for_the_device_are_not_recorded(
    tmp_path: Path, load: Load, caplog: pytest.LogCaptureFixture, name: str, reason: str
) -> None:
    """Nor is memory set aside for graphs of them."""
    with caplog.at_level("INFO", "pagewire.worker"):
        runner = load(write(tmp_path, name))
    assert runner.graphs is None and not runner.records
    assert runner.device.plan is not None and runner.device.plan.graphs == 0
    assert f"launched kernel by kernel: the model waits for the device: {reason}" in caplog.text


def of_modules(model: Path, folder: Path, rank: int, modules: Sequence[str]) -> Path:
    """An adapter of some modules of a model's layers, with the shapes that they have in its checkpoint."""
    weights = load_file(model / "model.safetensors")
    names = [name.removesuffix(".weight") for name in weights]
    shapes = {name: tuple(weights[f"{name}.weight"].shape) for name in names if name.endswith(tuple(modules))}
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank / 4, "target_modules": list(shapes)}
    return write_adapter(folder, config, make_tensors(rank, shapes, rank))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "sizes", "modules"),
    [
        ("granite", {}, ["q_proj", "o_proj", "down_proj"]),
        (
            "granite",
            {"intermediate_size": 100},
            ["v_proj", "gate_proj"],
        ),  # down_proj has no kernel of adapters
        ("bloom", {}, ["query_key_value", "dense_h_to_4h"]),
        ("qwen3_5_text", {}, ["in_proj_qkv", "q_proj", "up_proj"]),
    ],
)
def test_other_families_with_adapters_are_replayed(
    tmp_path: Path, load: Load, name: str, sizes: dict[str, int], modules: Sequence[str]
) -> None:
    """Prompts, too, and in batches that are padded; adapters of other ranks come, and some requests have none."""
    fields = SERVED[name].fields | HEADS | sizes
    folder = Architecture(name, fields, model_type=SERVED[name].model_type).write(
        tmp_path / "model", dtype="bfloat16"
    )
    folders = [of_modules(folder, tmp_path / str(rank), rank, modules) for rank in (1, 8)]
    prompts, found = make_prompts(VOCAB_SIZE, (9, 20, 1)), []
    for eager in (True, False):
        adapted = Adapted(partial(load, folder), enforce_eager=eager, max_num_batched_tokens=64)
        assert adapted.runner.model.is_stack
        for index, each in enumerate(folders, 1):
            adapted.load(index, each)
        driver = Driver(adapted.runner, 16)
        orders = ([2, 0, 1], [0, 0, 0], [1, 1, 2])
        found.append([driver.run(prompts, 4, PLAIN, adapters=order) for order in orders])
    eager_outputs, outputs = ([[r.output for r in run] for run in runs] for runs in found)
    assert outputs == eager_outputs and len({str(each) for each in outputs}) == 3
    assert [[r.logprobs for r in run] for run in found[1]] == [[r.logprobs for r in run] for run in found[0]]
    assert num_replayed(adapted.runner) >= 12


def test_adapters_of_the_heads_of_latents_are_not_replayed(
    tmp_path: Path, load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    """Others of the same model are."""
    folder = write_latents("youtu", tmp_path / "model", **WITH_KERNEL)
    modules = (["o_proj"], ["kv_b_proj", "o_proj"])
    folders = [of_modules(folder, tmp_path / str(i), 4, names) for i, names in enumerate(modules)]
    found = []
    for eager in (True, False):
        adapted = Adapted(partial(load, folder), enforce_eager=eager, dtype="bfloat16")
        for index, each in enumerate(folders, 1):
            adapted.load(index, each)
        with caplog.at_level("INFO", "pagewire.worker"):
            found.append([adapted.run(order) for order in ([1, 0, 1], [2, 0, 1])])
    assert found[0] == found[1] and found[0][0] != found[0][1]
    assert num_replayed(adapted.runner) == 3
    assert (
        "adapter 2 are launched kernel by kernel: it changes the heads of latents (kv_b_proj)" in caplog.text
    )


@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1", "bamba", "lfm2"])
def test_models_with_states_are_replayed(tmp_path: Path, load: Load, name: str) -> None:
    """Steps in which each request reads states and writes others, beside padding requests, which have none."""
    folder, most = write(tmp_path, name), {"max_num_batched_tokens": 64}
    recorded, plain = load(folder, **most), load(folder, **most, enforce_eager=True)
    prompts, params = make_prompts(VOCAB_SIZE, (9, 20, 1)), [PLAIN, GREEDY, PLAIN]
    found, expected = (Driver(runner, 16).run(prompts, 6, params) for runner in (recorded, plain))
    assert [(r.output, r.logprobs) for r in found] == [(r.output, r.logprobs) for r in expected]
    assert num_replayed(recorded) >= 6 and plain.graphs is None


def test_drafts_of_models_with_states_are_replayed(tmp_path: Path, load: Load) -> None:
    """Their states are kept where each draft ends; the next step reads those after the last that counts."""
    folder = write(tmp_path, "qwen3_5_text")
    recorded, plain = (load(folder, speculative=DRAFTS, enforce_eager=eager) for eager in (False, True))
    [prompt] = make_prompts(VOCAB_SIZE, (9,))
    first = Row(0, 0, 9, num_samples=1, states=[(9, 0)])
    [begin] = make_plans([prompt], 1, [PLAIN])
    begin.rows = [first]
    plans = [begin]
    for step in range(3):
        states = [(10 + step + n, 1 + step + n) for n in range(4)]
        row = Row(0, 9 + step, 4, [], [7, 8, 9], 4, state=step, states=states)
        plans.append(StepPlan(1 + step, [row]))
    assert [outcome(recorded.step(plan)) for plan in plans] == [outcome(plain.step(plan)) for plan in plans]
    assert num_replayed(recorded) == 3


def drafted_plans(
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    drafts: Sequence[Sequence[Sequence[int]]],
) -> list[StepPlan]:
    """All prompts in the first step, and then a step for each list of drafts, one for each request.

    All drafts but the first of the last step count as wrong: each step follows the one before by a token.
    """
    plans = make_plans(prompts, 1 + len(drafts), params)
    for plan, of_step in zip(plans[1:], drafts, strict=True):
        plan.rows = [
            Row(row.slot, row.start, 1 + len(own), [], list(own), 1 + len(own))
            for row, own in zip(plan.rows, of_step, strict=True)
        ]
    return plans


@pytest.mark.parametrize("num_requests", [1, 3])
@pytest.mark.parametrize("params", [GREEDY, PLAIN, EDITED], ids=["greedy", "plain", "edited"])
def test_steps_that_verify_drafts_are_replayed(
    llama: Path, load: Load, params: SamplingParams, num_requests: int
) -> None:
    """Also in a batch that is padded."""
    recorded, plain = load(llama, speculative=DRAFTS), load(llama, speculative=DRAFTS, enforce_eager=True)
    prompts = make_prompts(VOCAB_SIZE, (9, 20, 1)[:num_requests])
    drafts = [[[7, 8, 9 + step]] * num_requests for step in range(4)]
    plans = drafted_plans(prompts, [params] * num_requests, drafts)
    expected = [outcome(plain.step(plan)) for plan in plans]
    assert [outcome(recorded.step(plan)) for plan in plans] == expected
    assert num_replayed(recorded) == 4


def test_steps_with_latents_are_replayed(tmp_path: Path, load: Load) -> None:
    """With drafts, for which attention has another kernel, and without, in a batch that is padded."""
    folder = write_latents("youtu", tmp_path, **WITH_KERNEL)
    fields = {"speculative": DRAFTS, "dtype": "bfloat16"}
    recorded, plain = load(folder, **fields), load(folder, **fields, enforce_eager=True)
    assert recorded.model.kv_shapes[0].values_in_keys
    prompts, drafts = make_prompts(VOCAB_SIZE, (9, 20, 1)), [[7, 8, 9]] * 3
    plans = drafted_plans(prompts, [PLAIN] * 3, [drafts, [[]] * 3, drafts])
    assert [outcome(recorded.step(plan)) for plan in plans] == [outcome(plain.step(plan)) for plan in plans]
    assert num_replayed(recorded) == 3


def test_steps_with_chosen_keys_are_replayed(tmp_path: Path, load: Load) -> None:
    """Of requests that have fewer keys than are chosen, as many, and more, in a batch that is padded."""
    sizes = {**WITH_KERNEL, "index_head_dim": 64, "first_k_dense_replace": 2}
    folder = write_latents("deepseek_v32", tmp_path, **sizes)
    recorded, plain = (load(folder, dtype="bfloat16", enforce_eager=eager) for eager in (False, True))
    plans = make_plans(make_prompts(VOCAB_SIZE, (1, 4, 20)), 6, [PLAIN] * 3)
    expected = [outcome(plain.step(plan)) for plan in plans]
    assert [outcome(result) for result in Core(recorded).run(plans)] == expected
    assert num_replayed(recorded) == 5


def test_drafts_that_are_right_count_in_replayed_steps(llama: Path, load: Load) -> None:
    [prompt] = make_prompts(VOCAB_SIZE, (9,))
    runner = load(llama, speculative=DRAFTS)
    alone = [
        token_id for plan in make_plans([prompt], 6, [GREEDY]) for token_id in tokens_of(runner.step(plan))
    ]
    runner.step(StepPlan(6, [], freed_slots=[0]))
    before = num_replayed(runner)
    plans = drafted_plans([prompt], [GREEDY], [[alone[1 : 1 + NUM_DRAFTS]]])
    found = [token_id for plan in plans for token_id in tokens_of(runner.step(plan))]
    assert found == alone[: 2 + NUM_DRAFTS] and num_replayed(runner) == before + 1


def test_steps_with_fewer_drafts_are_replayed(llama: Path, load: Load) -> None:
    """Where some request has fewer than the others, or all have fewer than the most, or none has any."""
    recorded, plain = load(llama, speculative=DRAFTS), load(llama, speculative=DRAFTS, enforce_eager=True)
    prompts = make_prompts(VOCAB_SIZE, (9, 20))
    plans = drafted_plans(prompts, [PLAIN, PLAIN], [[[7, 8, 9], [7]], [[7, 8], [8, 9]], [[], []]])
    assert [outcome(recorded.step(plan)) for plan in plans] == [outcome(plain.step(plan)) for plan in plans]
    assert num_replayed(recorded) == 3


def test_drafts_of_rows_with_adapters(llama: Path, load: Load, tmp_path: Path) -> None:
    """Each token of a row has the row's adapter."""

    def of_llama(**fields: Any) -> Runner:
        return load(llama, speculative=DRAFTS, **fields)

    folders = [low_rank(tmp_path / str(rank), rank, rank) for rank in (1, 8)]
    prompts, drafts = make_prompts(VOCAB_SIZE, (9, 2, 5)), [[[7, 8, 9]] * 3, [[1, 2, 3]] * 3]
    found = []
    for eager in (True, False):
        adapted = Adapted(of_llama, enforce_eager=eager)
        for index, folder in enumerate(folders, 1):
            adapted.load(index, folder)
        plans = drafted_plans(prompts, [PLAIN] * 3, drafts)
        for init, adapter in zip(plans[0].inits, (2, 0, 1), strict=True):
            init.adapter = adapter
        found.append([outcome(adapted.runner.step(plan)) for plan in plans])
    assert found[0] == found[1] and num_replayed(adapted.runner) == 2


def test_results_of_layers_are_those_of_the_replayed_step(
    llama: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter such as EAGLE-3 reads them: they are not those of the shape that was recorded last."""
    monkeypatch.setattr(Network, "taps", (1, 2))
    recorded, plain = load(llama), load(llama, enforce_eager=True)
    plans = make_plans(make_prompts(VOCAB_SIZE, (9, 20, 1)), 4, [GREEDY] * 3)
    for plan in plans:
        found, expected = (tapped_by(runner, plan) for runner in (recorded, plain))
        assert all(torch.equal(a[: len(b)], b) for a, b in zip(found, expected, strict=True))
    assert num_replayed(recorded) == 3


def tapped_by(runner: Runner, plan: StepPlan) -> list[torch.Tensor]:
    runner.step(plan)
    network = runner.model.model.base
    assert isinstance(network, Network)
    return [network.tapped[layer].clone() for layer in (1, 2)]


def test_wrong_graphs_of_drafts_are_noticed(
    llama: Path, load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as those of which a replay leaves what the recording computed, where those of one token are right."""
    record = EmulatedCudaDevice.record

    def stale(self: EmulatedCudaDevice, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        result, replay = work(), record(self, work)
        return (lambda: result) if len(result) > 2 else replay

    assert load(llama, max_num_seqs=2, speculative=DRAFTS).graphs is not None
    monkeypatch.setattr(EmulatedCudaDevice, "record", stale)
    assert load(llama, max_num_seqs=2).graphs is not None
    graphs = load(llama, max_num_seqs=2, speculative=DRAFTS).graphs
    assert graphs is not None and graphs.shapes == [(1, 1, 1), (2, 2, 1)]
    assert (
        "steps of up to 4 tokens of each request are launched kernel by kernel: replayed CUDA" in caplog.text
    )


@pytest.mark.parametrize(
    ("fields", "drafted"),
    [
        ({}, [1, 2, 3]),
        ({"max_num_batched_tokens": 9}, [1, 2]),
        ({"max_num_batched_tokens": 3}, []),
        ({"speculative": None}, []),
    ],
)
def test_shapes_with_drafts(fields: dict[str, Any], drafted: list[int]) -> None:
    config = WorkerConfig("", **{"max_num_seqs": 3, "speculative": DRAFTS} | fields)
    shapes = recorded_shapes(config, 64)
    assert [shape for shape in shapes if shape.num_each == 1] == [(1, 1, 1), (2, 2, 1), (3, 3, 1)]
    assert [shape for shape in shapes if shape.num_each == 4] == [(4 * size, size, 4) for size in drafted]


MASK = torch.tensor([True, False])


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x[MASK],
        lambda x: x.index_put_((MASK,), x.new_zeros(1)),
        lambda x: x.long().bincount(),
        lambda x: x.unique(),
        lambda x: torch.tensor(3.0),
        lambda x: x.to("meta"),
        lambda x: x.repeat_interleave(torch.ones(2, dtype=torch.long)),
    ],
)
def test_what_waits_is_found(work: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(WaitsError, match=r"^aten::"), WaitFinder():
        work(torch.ones(2))


def test_what_does_not_wait_is_not_found() -> None:
    with WaitFinder():
        x = torch.ones(2, 3)
        assert x[torch.zeros(1, dtype=torch.long)].shape == (1, 3)
        assert (x.view(6).add_(1).to(torch.bfloat16) * 2.0).where(
            torch.ones(6, dtype=torch.bool), 0
        ).shape == (6,)


def test_a_tape_does_again_what_was_recorded() -> None:
    """On what its memory holds now, but for what the host has made of it."""
    numbers, factors = torch.tensor([1.0, 2.0]), [10.0]
    out = torch.zeros(2)

    def work() -> torch.Tensor:
        return out.copy_(numbers.view(2, 1).mul(factors[0]).flatten()) + 1

    tape = Tape()
    result = tape.record(work)
    numbers.fill_(5)
    factors[0] = 1000.0
    tape.replay()
    assert (out.tolist(), result.tolist()) == ([50, 50], [51, 51])


@pytest.mark.parametrize(
    "work", [lambda x: (x + 1).tolist(), lambda x: (x + 1).cpu(), lambda x: (x + 1).numpy()]
)
def test_the_host_cannot_look_at_what_is_recorded(work: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(2)
    with pytest.raises(RuntimeError, match="stream is capturing: the host looks at a tensor"):
        Tape().record(lambda: work(x))  # type: ignore[arg-type, return-value]
    assert x.tolist() == [1, 1] and (x + 1).tolist() == [2, 2]


@pytest.mark.parametrize(
    ("fields", "prompts"),
    [
        ({}, [(64, 3, 128), (96, 3, 128), (128, 3, 128)]),
        ({"max_num_seqs": 70}, [(t, r, 128) for t in (64, 96, 128) for r in (8, min(t, 70))]),
        ({"max_num_batched_tokens": 63}, []),
        ({"max_num_seqs": 1}, [(64, 1, 64)]),
    ],
)
def test_shapes_with_prompts(fields: dict[str, Any], prompts: list[tuple[int, int, int]]) -> None:
    config = WorkerConfig("", **{"max_num_seqs": 3, "max_num_batched_tokens": 130} | fields)
    shapes = recorded_shapes(config, 64)
    assert [shape for shape in shapes if shape.num_each > 1] == prompts
