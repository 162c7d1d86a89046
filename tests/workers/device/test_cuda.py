"""The worker on a GPU, emulated or real: steps launched ahead, recorded steps, tokens that only the device knows.

The oracle is transformers in float32 on the same weights; beyond that, that a step gives to the bit what it gives
when every one is waited for and none is recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.embeddings import media_of
from pagewire.ipc.wire.items import LogprobRows, Prompt
from pagewire.ipc.wire.lora import LoadAdapter, LoRAConfig
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.worker_messages import (
    Masks,
    Parallel,
    Row,
    SlotInit,
    StepPlan,
    StepResult,
    WorkerConfig,
)
from pagewire.kernels.cuda import latents, linear, quantised_linear, states
from pagewire.kernels.cuda.source import Variant
from pagewire.kernels.cuda.trials import channel_trials, matrix_trials, trials
from pagewire.kernels.cuda.variants import Launches, variants_of
from pagewire.workers.device import cuda
from pagewire.workers.device.cpu import CpuTokenSampler
from pagewire.workers.device.cuda import CudaDevice
from pagewire.workers.device.interface import KernelNeeds
from pagewire.workers.device.open import open_device, own_gpu
from pagewire.workers.errors import LoadError
from pagewire.workers.module.configuration import indexed_latents
from pagewire.workers.network.loading import ModelSettings
from pagewire.workers.network.model import Model
from pagewire.workers.process import wiring
from pagewire.workers.process.calls import call
from pagewire.workers.process.main import Pipeline
from pagewire.workers.run.graphs import recorded_sizes
from pagewire.workers.run.runner import Runner
from tests.kernels.cuda.emulate.launcher import EmulatedLauncher
from tests.kernels.cuda.emulate.worker import EmulatedCudaDevice
from tests.workers.architectures import (
    DELTA_RULE,
    GEMMA4,
    RECURRENT,
    SERVED,
    VOCAB_SIZE,
    Architecture,
)
from tests.workers.device.conftest import HEADS
from tests.workers.driver import GREEDY, Driver, load_runner, tokens_of, values
from tests.workers.parity import make_prompts, transformers_tokens
from tests.workers.peft_adapters import peft_logprobs
from tests.workers.random_adapters import load as load_adapter
from tests.workers.random_adapters import make_tensors, write

PLAIN = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, logprobs=2)
EDITED = SamplingParams(
    temperature=1.0,
    presence_penalty=0.7,
    repetition_penalty=1.3,
    min_tokens=3,
    stop_token_ids=[5, 6],
    bad_words_token_ids=[[9], [11, 12]],
)


def check_recorded(runner: Runner, num_recorded: int, num_replayed: int, num_starts: int = 1) -> None:
    """Where that can be counted. Each start replays a step to see that graphs are right."""
    if isinstance(runner.device, EmulatedCudaDevice):
        replayed = runner.device.num_replayed - num_starts
        assert (runner.device.num_recorded, replayed) == (num_recorded, num_replayed)


class Core:
    """What a worker's connection leads to: plans go ahead of results."""

    def __init__(self, runner: Runner, masks: Sequence[Masks] = ()) -> None:
        self.runner, self.steps = runner, Pipeline(self, runner)  # type: ignore[arg-type]
        self.results: list[StepResult] = []
        self.masks = {mask.step_id: mask for mask in masks}

    descriptors: Sequence[int] = ()

    def is_quiet(self) -> bool:
        return True

    def send(self, result: StepResult) -> None:
        self.results.append(result)

    def receive_masks(self, step_id: int) -> Masks:
        assert [result.step_id for result in self.results] == list(range(step_id)), "all before it is known"
        return self.masks[step_id]

    def run(self, plans: Sequence[StepPlan]) -> list[StepResult]:
        """Launch all, each before the one before it is finished."""
        for plan in plans:
            with never_waiting(self.runner):
                self.steps.launch(plan)
            if isinstance(self.runner.device, EmulatedCudaDevice):
                assert len(self.results) == plan.step_id
        self.steps.finish()
        return self.results


@contextmanager
def never_waiting(runner: Runner) -> Iterator[None]:
    """Within, PyTorch raises where it would wait for a GPU. The one wait, for an event, is none of these."""
    if isinstance(runner.device, EmulatedCudaDevice):
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def make_plans(
    prompts: Sequence[Sequence[int]], num_steps: int, params: Sequence[SamplingParams], masked: bool = False
) -> list[StepPlan]:
    """All prompts in the first step; then one token of each in every step."""
    inits = [
        SlotInit(i, list(p), len(p), [3 * i, 3 * i + 1, 3 * i + 2], params[i], seed=i, stop_ids=[5, 6])
        for i, p in enumerate(prompts)
    ]
    rows = [Row(i, 0, len(p), num_samples=1) for i, p in enumerate(prompts)]
    plans = [StepPlan(0, rows, inits, masked=masked)]
    for step in range(1, num_steps):
        rows = [Row(i, len(p) + step - 1, 1, num_samples=1) for i, p in enumerate(prompts)]
        plans.append(StepPlan(step, rows, masked=masked))
    return plans


def outcome(result: StepResult) -> tuple[object, ...]:
    rows = map(result.row, range(result.num_rows))
    return tuple((row.token_ids, row.logprobs and values(row.logprobs), row.error) for row in rows)


def test_tokens_are_those_of_transformers(llama: Path, load: Callable[..., Runner]) -> None:
    check_tokens(llama, load())


def check_tokens(folder: Path, runner: Runner) -> None:
    """No token was much more likely to transformers in float32, and log probabilities are nearly the same."""
    from transformers import AutoModelForCausalLM

    prompts = make_prompts(VOCAB_SIZE)
    params = SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)
    causal = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for request in Driver(runner).run(prompts, 6, params):
        ids = torch.tensor([request.prompt + request.output])
        with torch.inference_mode():
            wanted = causal(ids).logits[0, :-1].log_softmax(-1)
        chosen = wanted.gather(1, ids[0, 1:, None])[:, 0]
        generated = slice(len(request.prompt) - 1, None)
        assert (wanted.amax(1) - chosen)[generated].max() < 0.1  # no token was much more likely
        found = [
            part for rows in request.prompt_logprobs for part in np.reshape(values(rows)[1], (-1, 2))[:, 0]
        ]
        found += [logprobs[0] for _, logprobs, _ in request.logprobs]  # type: ignore[misc]
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float32), chosen, rtol=0, atol=0.1)


LAYERS = {
    "model.layers.0.self_attn.q_proj": (64, 64),
    "model.layers.0.self_attn.v_proj": (32, 64),
    "model.layers.1.self_attn.o_proj": (64, 64),
    "model.layers.1.mlp.gate_proj": (96, 64),
    "model.layers.0.mlp.down_proj": (64, 96),
}
HEAD, EMBEDDING = "lm_head", "model.embed_tokens"


class Adapted:
    """A runner that serves adapters."""

    def __init__(self, load: Callable[..., Runner], **fields: Any) -> None:
        self._awake = threading.Event()
        self.runner = load(lora=LoRAConfig(max_loras=4, max_lora_rank=8), wake=self._awake.set, **fields)

    def load(self, index: int, folder: Path) -> None:
        """Load an adapter, in the place of another one or in none."""
        self.runner.adapters.drop(index)
        message = load_adapter(self.runner.adapters, LoadAdapter(index, str(folder)), self._awake)
        assert message.error is None

    def run(self, adapters: Sequence[int], num_steps: int = 4) -> list[tuple[object, ...]]:
        """What requests with these adapters come to, of which each step is launched before the last is finished."""
        prompts = make_prompts(VOCAB_SIZE, (9, 2, 5)[: len(adapters)])
        plans = make_plans(prompts, num_steps, [PLAIN] * len(prompts))
        for init, adapter in zip(plans[0].inits, adapters, strict=True):
            init.adapter = adapter
        outcomes = [outcome(result) for result in Core(self.runner).run(plans)]
        self.runner.step(StepPlan(num_steps, [], freed_slots=list(range(len(prompts)))))
        return outcomes


def low_rank(folder: Path, seed: int, rank: int, modules: Sequence[str] = tuple(LAYERS)) -> Path:
    """An adapter of some modules."""
    shapes = {module: (LAYERS | {HEAD: (VOCAB_SIZE, 64)})[module] for module in modules}
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank / 4, "target_modules": list(shapes)}
    return write(folder, config, make_tensors(seed, shapes, rank))


def test_steps_with_adapters_give_what_peft_does(
    llama: Path, load: Callable[..., Runner], tmp_path: Path
) -> None:
    """Also recorded ones, which are others than those without adapters."""
    adapted, folder = Adapted(load), low_rank(tmp_path, 0, 4)
    adapted.load(1, folder)
    prompts = make_prompts(VOCAB_SIZE, (9, 9))
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    requests = Driver(adapted.runner, 32).run(prompts, 3, params, adapters=[1, 0])
    check_recorded(adapted.runner, num_recorded=8, num_replayed=2)
    for request, adapter in zip(requests, (folder, None), strict=True):
        (rows,) = request.prompt_logprobs
        ours, theirs = torch.tensor(values(rows)[1]), peft_logprobs(llama, adapter, request.prompt)
        torch.testing.assert_close(ours.flatten(), torch.tensor(theirs), rtol=0, atol=0.2)
    Driver(adapted.runner, 32).generate(prompts, 3, adapters=[0, 0])
    check_recorded(adapted.runner, num_recorded=8, num_replayed=4)


@pytest.mark.parametrize("prompts", [False, True])
def test_replaying_steps_with_adapters_changes_nothing(
    load: Callable[..., Runner], tmp_path: Path, prompts: bool
) -> None:
    """Whichever adapters come and go, of any rank, in batches that are padded. prompts: they are replayed, too."""
    most = {"max_num_batched_tokens": 64 if prompts else 63}
    folders = [low_rank(tmp_path / str(rank), rank, rank) for rank in (1, 8)]
    folders.append(low_rank(tmp_path / "some", 3, 5, ["model.layers.1.mlp.gate_proj", HEAD]))
    plain, ahead = Adapted(load, enforce_eager=True, **most), Adapted(load, **most)
    found = []
    for adapted in (plain, ahead):
        for index in (1, 2):
            adapted.load(index, folders[index - 1])
        outcomes = [adapted.run(adapters) for adapters in ([1, 0, 2], [2, 2, 2], [0, 1], [0, 0])]
        adapted.load(1, folders[2])
        outcomes.append(adapted.run([1, 0, 2]))
        found.append(outcomes)
    assert found[0] == found[1]
    assert len({str(outcomes) for outcomes in found[0]}) == 5  # adapters change what comes
    num_replayed = 5 * (4 if prompts else 3)
    check_recorded(ahead.runner, 10 if prompts else 8, num_replayed, num_starts=2 if prompts else 1)


def whole(folder: Path, module: str, shape: tuple[int, int]) -> Path:
    """An adapter with a weight in the place of a module's."""
    shapes = {"model.layers.0.self_attn.v_proj": (32, 64)}
    config = {"peft_type": "LORA", "r": 2, "target_modules": list(shapes), "modules_to_save": [module]}
    weight = {f"base_model.model.{module}.weight": torch.randn(shape)}
    return write(folder, config, make_tensors(5, shapes, 2) | weight)


def embedding(folder: Path) -> Path:
    """An adapter of the embedding of tokens."""
    names = [f"base_model.model.{EMBEDDING}.lora_embedding_{matrix}" for matrix in "AB"]
    config = {"peft_type": "LORA", "r": 2, "target_modules": ["embed_tokens"]}
    tensors = (torch.randn(2, VOCAB_SIZE), torch.randn(64, 2))
    return write(folder, config, dict(zip(names, tensors, strict=True)))


def test_adapters_that_recorded_steps_cannot_have(
    load: Callable[..., Runner], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps with them are launched kernel by kernel, for a reason that is logged once."""
    folders = [
        low_rank(tmp_path / "low", 0, 4),
        whole(tmp_path / "layer", "model.layers.1.self_attn.o_proj", (64, 64)),
        embedding(tmp_path / "embedding"),
        whole(tmp_path / "head", HEAD, (VOCAB_SIZE, 64)),
    ]
    plain, ahead = Adapted(load, enforce_eager=True), Adapted(load)
    found = []
    with caplog.at_level("INFO", "pagewire.worker"):
        for adapted in (plain, ahead):
            for index, folder in enumerate(folders, 1):
                adapted.load(index, folder)
            found.append([adapted.run(adapters) for adapters in ([1, 2], [3, 0, 1], [1, 4])])
    assert found[0] == found[1]
    check_recorded(
        ahead.runner, num_recorded=8, num_replayed=3
    )  # the output layer is outside of recorded steps
    messages = [record.getMessage() for record in caplog.records if "kernel by kernel" in record.getMessage()]
    assert messages == [
        "steps with adapter 2 are launched kernel by kernel: it has what kernels lack, such as weights in the "
        "place of the model's (modules_to_save)",
        "steps with adapter 3 are launched kernel by kernel: it changes the embedding of tokens",
    ]


@pytest.mark.parametrize("kept", ["fp8", "fp8_e5m2"])
def test_keys_and_values_of_8_bits(load: Callable[..., Runner], kept: str) -> None:
    """Half the memory, and nearly the same log probabilities."""
    prompts = make_prompts(VOCAB_SIZE, (30, 9))
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    wide, narrow = load(), load(kv_cache_dtype=kept)
    assert 2 * narrow.block_bytes == wide.block_bytes
    found = [
        [
            values(part)[1]
            for request in Driver(runner).run(prompts, 2, params)
            for part in request.prompt_logprobs
        ]
        for runner in (wide, narrow)
    ]
    differences = (np.concatenate(found[0]) - np.concatenate(found[1])).__abs__()
    assert 0 < differences.mean() < (0.1 if kept == "fp8" else 0.2)


def test_scales_of_keys_and_values(load: Callable[..., Runner]) -> None:
    """A cache whose floats are too coarse without scales is right with them, and each layer has its own."""
    prompts = make_prompts(VOCAB_SIZE, (30, 9))
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)

    def found(**fields: Any) -> np.ndarray[Any, Any]:
        requests = Driver(load(**fields)).run(prompts, 2, params)
        return np.concatenate([values(part)[1] for request in requests for part in request.prompt_logprobs])

    wide = found()
    errors = [
        np.abs(found(kv_cache_dtype="fp8", kv_scales=scales) - wide).mean()
        for scales in ([], [0.03, 0.02], [300.0, 0.02])
    ]
    assert max(errors[:2]) < 0.1 < errors[2]


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_codes_are_for_cpus(load: Callable[..., Runner], name: str) -> None:
    with pytest.raises(
        LoadError, match=rf"kv_cache_dtype '{name}' is for CPUs, not for cuda.*'fp8' has 8 bits there"
    ):
        load(kv_cache_dtype=name)


def test_floats_of_8_bits_are_for_gpus(llama: Path) -> None:
    with pytest.raises(LoadError, match="kv_cache_dtype 'fp8' needs a model in bfloat16 or float16 on a GPU"):
        load_runner(llama, kv_cache_dtype="fp8")
    with pytest.raises(LoadError, match=r"kv_cache_dtype must be one of auto, int8, int4.*, got 'int3'"):
        load_runner(llama, kv_cache_dtype="int3")


@pytest.mark.parametrize("params", [GREEDY, PLAIN, EDITED], ids=["greedy", "plain", "edited"])
def test_launching_ahead_and_replaying_change_nothing(
    load: Callable[..., Runner], params: SamplingParams
) -> None:
    prompts = make_prompts(VOCAB_SIZE, (9, 20, 1))
    plans = make_plans(prompts, 7, [params, PLAIN, params])
    plain = load(enforce_eager=True)
    assert plain.graphs is None
    wanted = [outcome(plain.step(plan)) for plan in plans]
    ahead = load()
    assert [outcome(result) for result in Core(ahead).run(plans)] == wanted
    check_recorded(ahead, num_recorded=4, num_replayed=6)


def test_embeddings_are_laid_over_tokens_and_such_steps_are_not_replayed(load: Callable[..., Runner]) -> None:
    """Even where they are those of one token."""
    runner = load()
    (tokens,) = make_prompts(VOCAB_SIZE, (9,))
    with torch.inference_mode():
        ids = torch.tensor(tokens, device=runner.device.torch_device)
        rows = runner.model.model.base.words(ids).float().cpu()
    embeddings = Tensor("float32", tuple(rows.shape), rows.numpy().tobytes())
    outcomes = []
    for prompt in (Prompt(tokens), Prompt([0] * 9, media_of(embeddings))):
        init = SlotInit(0, prompt.token_ids, 9, [0, 1, 2], GREEDY, 0, media=prompt.places())
        plans = [
            StepPlan(0, [Row(0, 0, 8, media=prompt.embeddings(0, 8))], [init]),
            StepPlan(1, [Row(0, 8, 1, num_samples=1, media=prompt.embeddings(8, 9))]),
            StepPlan(2, [Row(0, 9, 1, num_samples=1)], freed_slots=[]),
        ]
        outcomes.append([outcome(result) for result in Core(runner).run(plans)])
        runner.step(StepPlan(-1, [], [], [0]))
    assert outcomes[0] == outcomes[1]
    check_recorded(runner, num_recorded=4, num_replayed=2 + 1)


def test_a_vocabulary_that_is_too_large_for_the_kernels(
    load: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = make_plans(make_prompts(VOCAB_SIZE, (9, 20)), 5, [PLAIN, EDITED])
    wanted = [outcome(result) for result in Core(load()).run(plans)]
    monkeypatch.setattr(cuda, "MAX_VOCAB_SIZE", VOCAB_SIZE - 1)
    runner = load()
    assert isinstance(runner.sampler, CpuTokenSampler)
    steps = Pipeline(core := Core(runner), runner)  # type: ignore[arg-type]
    for plan in plans:
        steps.launch(plan)
    steps.finish()
    assert [outcome(result) for result in core.results] == wanted


def test_a_slot_goes_to_another_request_while_its_last_step_runs(load: Callable[..., Runner]) -> None:
    """The first request was ended when its next step was on its way; that one's token is nobody's."""
    first, second = make_prompts(VOCAB_SIZE, (8, 5))
    [begin, go_on] = make_plans([first], 2, [EDITED])
    taken = SlotInit(0, second, len(second), [7, 8], EDITED, seed=3)
    plans = [begin, go_on, StepPlan(2, [Row(0, 0, 5, num_samples=1)], [taken], freed_slots=[0])]
    plans += [StepPlan(3 + i, [Row(0, 5 + i, 1, num_samples=1)]) for i in range(4)]
    found = [tokens_of(result) for result in Core(load()).run(plans)][2:]
    alone = load(enforce_eager=True)
    assert found == [tokens_of(alone.step(plan)) for plan in plans[2:]]


def test_masks_wait_for_the_step_before(load: Callable[..., Runner]) -> None:
    plans = make_plans(make_prompts(VOCAB_SIZE, (4, 6)), 4, [PLAIN, PLAIN], masked=True)
    allowed = [{10 + step} for step in range(4)]
    masks = []
    for plan, ids in zip(plans, allowed, strict=True):
        bits = np.zeros((1, VOCAB_SIZE // 32), np.uint32)
        for i in ids:
            bits[0, i // 32] |= np.uint32(1 << i % 32)
        masks.append(Masks(plan.step_id, [1], Tensor("int32", bits.shape, bits.tobytes())))
    results = Core(load(), masks).run(plans)
    assert [tokens_of(result)[1] for result in results] == [10, 11, 12, 13]
    free = [
        tokens_of(result)[0]
        for result in Core(load()).run(make_plans(make_prompts(VOCAB_SIZE, (4,)), 4, [PLAIN]))
    ]
    assert [tokens_of(result)[0] for result in results] == free


@pytest.mark.parametrize("num_right", [0, 2, 3])
def test_drafts_change_no_token(load: Callable[..., Runner], num_right: int) -> None:
    [prompt] = make_prompts(VOCAB_SIZE, (9,))
    plans = make_plans([prompt], 6, [GREEDY])
    runner = load()
    alone = [token_id for plan in plans for token_id in tokens_of(runner.step(plan))]
    runner.step(StepPlan(6, [], freed_slots=[0]))
    drafts = [*alone[1 : 1 + num_right], *((t + 1) % VOCAB_SIZE for t in alone[1 + num_right : 4])]
    drafted = [plans[0], StepPlan(1, [Row(0, 9, 4, [], drafts, 4)])]
    drafted.append(StepPlan(2, [Row(0, 10 + num_right, 1, num_samples=1)]))
    found = [token_id for plan in drafted for token_id in tokens_of(runner.step(plan))]
    assert found == alone[: len(found)] and len(found) == 3 + num_right


def prompt_logprobs(result: StepResult) -> LogprobRows:
    """Those of the only row."""
    [row] = result.rows
    assert row.prompt_logprobs is not None
    return row.prompt_logprobs


def test_log_probabilities_of_a_prompt_that_came_token_by_token(load: Callable[..., Runner]) -> None:
    """They are computed before the next step is launched, which overwrites the states of a recorded one."""
    [prompt] = make_prompts(VOCAB_SIZE, (4,))
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    plans = [StepPlan(i, [Row(0, i, 1, num_prompt_logprobs=1)]) for i in range(3)]
    plans[0].inits.append(SlotInit(0, prompt, 4, [3], params, seed=0))
    plain = load(enforce_eager=True)
    wanted = [values(prompt_logprobs(plain.step(plan))) for plan in plans]
    found = load()
    core = Core(found)
    for plan in plans:
        core.steps.launch(plan)
    core.steps.finish()
    assert [values(prompt_logprobs(result)) for result in core.results] == wanted


def test_nothing_that_takes_other_ranks_runs_when_a_step_finishes(
    load: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks finish a step before or after they launch the next one, so their sums would be taken for others."""
    [prompt] = make_prompts(VOCAB_SIZE, (9,))
    params = SamplingParams(temperature=0.0, prompt_logprobs=1, logprobs=1)
    runner = load()
    init = SlotInit(0, prompt, 9, [3], params, seed=0)
    step = runner.launch(StepPlan(0, [Row(0, 0, 9, num_samples=1, num_prompt_logprobs=8)], [init]))
    step.sample(lambda: None)
    monkeypatch.setattr(Model, "logits", lambda *_: pytest.fail("logits were computed"))
    monkeypatch.setattr(Model, "hidden_states", lambda *_: pytest.fail("the model ran"))
    result = step.finish()
    assert len(values(prompt_logprobs(result))[2]) == 8 and len(tokens_of(result)) == 1


def test_an_empty_plan_goes_behind_the_step_that_runs(load: Callable[..., Runner]) -> None:
    [begin] = make_plans(make_prompts(VOCAB_SIZE, (3,)), 1, [GREEDY])
    core = Core(load())
    core.steps.launch(begin)
    core.steps.launch(StepPlan(1, [], freed_slots=[0]))
    core.steps.finish()
    assert [result.step_id for result in core.results] == [0, 1]


def test_steps_with_prompts_are_replayed(load: Callable[..., Runner]) -> None:
    """Alone, after others, in chunks, and among requests that decode; longer ones are launched kernel by kernel."""
    recorded, plain = (load(max_num_batched_tokens=96, enforce_eager=eager) for eager in (False, True))
    prompts = make_prompts(VOCAB_SIZE, (40, 20, 1, 50, 55))
    inits = [
        SlotInit(i, p, len(p), [4 * i + j for j in range(4)], PLAIN, seed=i) for i, p in enumerate(prompts)
    ]
    plans = [
        StepPlan(0, [Row(0, 0, 40, num_samples=1, num_prompt_logprobs=39)], inits[:1]),
        StepPlan(1, [Row(0, 40, 1, num_samples=1), Row(1, 0, 12)], inits[1:2]),
        StepPlan(
            2,
            [
                Row(0, 41, 1, num_samples=1),
                Row(1, 12, 8, num_samples=1),
                Row(2, 0, 1, num_samples=1),
                Row(3, 0, 50),
            ],
            inits[2:4],
        ),
        StepPlan(3, [Row(3, 50 - 1, 1, num_samples=1), Row(0, 42, 1, num_samples=1)]),
        StepPlan(4, [Row(4, 0, 55, num_samples=1), Row(3, 0, 50)], inits[4:]),
    ]
    found, expected = ([outcome(runner.step(plan)) for plan in plans] for runner in (recorded, plain))
    assert found == expected
    check_recorded(recorded, num_recorded=6, num_replayed=4, num_starts=2)


@pytest.mark.parametrize("tags", [None, ["kv_cache"]])
def test_steps_are_recorded_again_after_a_sleep(load: Callable[..., Runner], tags: list[str] | None) -> None:
    runner = load()
    plans = make_plans(make_prompts(VOCAB_SIZE, (9, 2)), 4, [GREEDY, GREEDY])
    before = [outcome(result) for result in Core(runner).run(plans)]
    call(runner, "sleep", [1, tags], {})
    assert runner.graphs is None and not runner.caches
    call(runner, "wake_up", [], {})
    assert [outcome(result) for result in Core(runner).run(plans)] == before
    check_recorded(runner, num_recorded=8, num_replayed=6, num_starts=2)


class StaleDevice(EmulatedCudaDevice):
    """A device whose graphs lack a launch: a replay leaves what the recording computed."""

    def record(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        result = work()
        return lambda: result


def test_graphs_that_compute_something_else_are_not_used(
    load: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plans = make_plans(make_prompts(VOCAB_SIZE, (9, 2)), 3, [GREEDY, GREEDY])
    plain = load(enforce_eager=True)
    expected = [outcome(result) for result in Core(plain).run(plans)]
    if not isinstance(plain.device, EmulatedCudaDevice):
        pytest.skip("a GPU's graphs are right")
    monkeypatch.setattr(wiring, "open_device", lambda config: StaleDevice())
    runner = load()
    assert runner.graphs is None and [outcome(result) for result in Core(runner).run(plans)] == expected
    assert "replayed CUDA graphs compute something else" in caplog.text


def test_tokens_that_did_not_arrive_are_an_error(
    load: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event that is reached before the copy in front of it is done would give the tokens of another step."""
    runner = load()
    plans = make_plans(make_prompts(VOCAB_SIZE, (9,)), 2, [GREEDY])
    Core(runner).run(plans[:1])
    monkeypatch.setattr(type(runner.device), "download", lambda self, source, target: self.record_event())
    with pytest.raises(RuntimeError, match="the tokens of a step did not arrive from the device"):
        runner.step(plans[1])


def test_states_on_a_gpu(tmp_path: Path, load: Callable[..., Runner]) -> None:
    """In bfloat16, beside float32."""
    # Of 8 heads, so that all weights of the file lie aligned.
    fields = HEADS | DELTA_RULE | {"layer_types": RECURRENT, "linear_num_value_heads": 8}
    folder = Architecture("qwen3_5_text", fields).write(tmp_path, dtype="bfloat16")
    prompts, params = make_prompts(VOCAB_SIZE, (9, 2)), SamplingParams(temperature=0.0, prompt_logprobs=0)
    runners = [load(folder, dtype=dtype) for dtype in ("float32", "bfloat16")]
    found = [
        np.concatenate([values(part)[1] for r in runs for part in r.prompt_logprobs])
        for runs in (Driver(runner).run(prompts, 3, params) for runner in runners)
    ]
    assert np.abs(found[0] - found[1]).mean() < 0.05


@pytest.mark.parametrize(
    ("name", "fields", "head_dim"), [("qwen3_5_text", {"head_dim": 32}, 32), ("mamba2", {}, 0)]
)
def test_kernels_of_states_are_compiled_and_tried_before_the_first_step(
    name: str, fields: dict[str, Any], head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of a model without attention, whose states have heads that attention has no kernel for."""
    launcher, tried, compiled = EmulatedLauncher(), list[Launches](), list[Variant]()
    monkeypatch.setattr(launcher, "load", lambda variants, progress: compiled.extend(variants))
    monkeypatch.setattr(EmulatedCudaDevice, "try_kernels", lambda self, launches: tried.append(launches))
    dtype = torch.bfloat16
    config = Architecture(name, SERVED[name].fields | fields).config()
    EmulatedCudaDevice(launcher).prepare(ModelSettings(config, None, dtype, dtype, [], 64).kernel_needs)
    assert [launches.head_dim for launches in tried] == [head_dim]
    names = {trial.name for trial in trials(tried[0])}
    assert names >= {trial.name for trial in (*matrix_trials(dtype), *channel_trials(dtype))}
    assert set(compiled) >= set(states.variants(dtype))


def test_kernels_of_packed_weights_are_compiled_where_some_may_be(
    tmp_path: Path, load: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for a model whose weights are plain numbers: there are more of these kernels than of all others."""
    tried = list[Launches]()
    for kind in (CudaDevice, EmulatedCudaDevice):
        monkeypatch.setattr(kind, "try_kernels", lambda self, launches: tried.append(launches))
    folder = Architecture("llama", HEADS | {"hidden_size": 64, "intermediate_size": 64}).write(tmp_path)
    for quantization in (None, "int8"):
        load(folder, dtype="bfloat16", quantization=quantization)
    assert [launches.packed for launches in tried] == [False, True]
    plain, packed = (set(variants_of(launches)) for launches in tried)
    products = linear.variants(torch.bfloat16, dense=False) + quantised_linear.variants(
        torch.bfloat16, capability=tried[1].capability
    )
    assert packed - plain == set(products) and plain < packed


def test_heads_of_two_sizes(tmp_path: Path, load: Callable[..., Runner]) -> None:
    """In bfloat16 by the kernels of each size, beside PyTorch's own attention in float32."""
    fields = GEMMA4 | {"head_dim": 32, "global_head_dim": 64, "num_key_value_heads": 1}
    folder = Architecture("gemma4_text", fields).write(tmp_path, bites=False)
    wide, kernels = (load(folder, dtype=dtype) for dtype in ("float32", "bfloat16"))
    sizes = [(shape.head_dim, shape.source) for shape in kernels.model.kv_shapes]
    assert sizes == [(32, None), (64, None), (32, None), (32, 2), (64, 1)]
    check_close(wide, kernels)


def check_close(*runners: Runner) -> None:
    """Two runners give prompts about the same log probabilities."""
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    found = [
        np.concatenate([values(part)[1] for r in runs for part in r.prompt_logprobs])
        for runs in (Driver(runner).run(make_prompts(VOCAB_SIZE), 2, params) for runner in runners)
    ]
    assert np.abs(found[0] - found[1]).mean() < 0.05


def write_latents(name: str, folder: Path, **sizes: int) -> Path:
    """A model whose latents have these sizes."""
    own = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "q_lora_rank": 32} | sizes
    experts = {"moe_intermediate_size": 32, "intermediate_size": 64}
    return Architecture(name, SERVED[name].fields | own | experts).write(folder)


WITH_KERNEL = {"kv_lora_rank": 256, "qk_rope_head_dim": 32}


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_keys_that_are_longer_than_values(name: str, tmp_path: Path, load: Callable[..., Runner]) -> None:
    """As latents expand to: the cache has values as long as keys, with zeros behind them."""
    folder = write_latents(name, tmp_path)
    wide, kernels = (load(folder, dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert {(shape.head_dim, shape.v_head_dim) for shape in kernels.model.kv_shapes} == {(32, 32)}
    check_close(wide, kernels)


@pytest.mark.parametrize(
    ("name", "rank", "rotated"), [("deepseek_v2", 256, 32), ("deepseek_v3", 512, 64), ("youtu", 256, 32)]
)
def test_latents(name: str, rank: int, rotated: int, tmp_path: Path, load: Callable[..., Runner]) -> None:
    """The cache has them as they are, once: prompts, also in chunks, and the tokens after them."""
    folder = write_latents(name, tmp_path, kv_lora_rank=rank, qk_rope_head_dim=rotated)
    wide, kernels = (
        load(folder, dtype=dtype, max_num_batched_tokens=16) for dtype in ("float32", "bfloat16")
    )
    shapes = {(shape.num_kv_heads, shape.head_dim, shape.values_in_keys) for shape in kernels.model.kv_shapes}
    assert shapes == {(1, rank + rotated, True)}
    assert {cache.nbytes for cache in kernels.caches} == {24 * 16 * (rank + rotated) * 2}
    check_close(wide, kernels)


def test_latents_in_8_bits_are_refused_by_name(tmp_path: Path, load: Callable[..., Runner]) -> None:
    """Only those with a kernel: others are expanded, and their keys and values take fewer bits."""
    folder = write_latents("deepseek_v3", tmp_path, **WITH_KERNEL)
    with pytest.raises(
        LoadError,
        match=r"attends to latents in torch.float8_e4m3fn: use kv_cache_dtype='auto', which takes 288",
    ):
        load(folder, dtype="bfloat16", kv_cache_dtype="fp8")
    needs = KernelNeeds(torch.bfloat16, torch.float8_e4m3fn, set(), latents={(272, 256): 32})
    EmulatedCudaDevice().prepare(needs)


def test_chosen_keys_are_refused_by_name_where_latents_are_expanded() -> None:
    """Unless no request has more keys than are chosen. Layers with a window may be expanded beside them."""
    sizes = {(576, 512): 192, (1088, 1024): 256}
    device = EmulatedCudaDevice()
    device.prepare(KernelNeeds(torch.bfloat16, torch.bfloat16, set(), latents=sizes, indexed={(576, 512)}))
    with pytest.raises(
        LoadError, match="indexer chooses among latents of 1088 numbers, only of 288, 576: use"
    ):
        device.prepare(KernelNeeds(torch.bfloat16, torch.bfloat16, set(), latents=sizes, indexed=set(sizes)))
    device.prepare(KernelNeeds(torch.float32, torch.float32, set(), latents=sizes, indexed=set(sizes)))
    device.kernels.replace(latents.METHOD)
    with pytest.raises(LoadError, match="among latents of 576 numbers"):
        device.prepare(
            KernelNeeds(torch.bfloat16, torch.bfloat16, set(), latents=sizes, indexed={(576, 512)})
        )
    config = SERVED["dots3_note_text"].config()
    assert indexed_latents(config, 7) == {(24, 16)} and indexed_latents(config, 6) == set()
    assert indexed_latents(SERVED["deepseek_v3"].config(), 7) == set()


def test_heads_without_a_kernel_are_refused_by_name() -> None:
    device = EmulatedCudaDevice()
    with pytest.raises(
        LoadError, match=r"attends with heads of 5120 numbers, only with 32, .*: use device='cpu'"
    ):
        device.prepare(KernelNeeds(torch.bfloat16, torch.bfloat16, {256, 5120}))
    device.prepare(KernelNeeds(torch.float32, torch.float32, {256, 5120}))  # by PyTorch


def test_more_requests_than_were_recorded(load: Callable[..., Runner]) -> None:
    runner = load(max_num_batched_tokens=2)
    assert runner.graphs is not None and runner.graphs.shapes == [(1, 1, 1), (2, 2, 1)]
    plans = make_plans(make_prompts(VOCAB_SIZE, (2, 2, 2)), 3, [GREEDY] * 3)
    assert len(Core(runner).run(plans)) == 3
    check_recorded(runner, num_recorded=2, num_replayed=0)


def test_float32_without_kernels(tmp_path: Path, load: Callable[..., Runner]) -> None:
    """Token for token what transformers gives: PyTorch does what no kernel serves."""
    folder = Architecture("llama", HEADS).write(tmp_path)
    prompts = make_prompts(VOCAB_SIZE)
    runner = load(folder)
    assert runner.graphs is None
    assert Driver(runner).generate(prompts, 6) == transformers_tokens(folder, prompts, 6)


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (20, [1, 2, 4, 8, 16, 20]),
        (300, [1, 2, 4, *range(8, 256, 8), 256, 288, 300]),
    ],
)
def test_recorded_sizes(most: int, sizes: list[int]) -> None:
    assert recorded_sizes(most) == sizes


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_devices_that_are_not_there() -> None:
    assert open_device(WorkerConfig("", device="auto", num_threads=1)).name == "cpu"
    with pytest.raises(LoadError, match=r"torch.*finds no GPU.*pagewire doctor"):
        open_device(WorkerConfig("", device="cuda:1"))
    with pytest.raises(LoadError, match="device 'tpu' is not supported: use auto, cpu, cuda or cuda:N"):
        open_device(WorkerConfig("", device="tpu"))


def test_each_worker_of_a_machine_takes_a_gpu_of_its_own() -> None:
    places = [Parallel(rank=n, size=3, local_rank=n, local_size=3) for n in range(3)]
    assert [own_gpu(place, 8) for place in places] == [0, 1, 2]
    assert [own_gpu(place, 1) for place in places] == [0, 0, 0]  # the launcher shows each its own
    with pytest.raises(LoadError, match="3 workers are on a machine with 2 GPUs"):
        own_gpu(places[2], 2)
