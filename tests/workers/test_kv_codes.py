"""Models whose keys and values have 8 or 4 bits on the CPU: memory, accuracy, and what tokens depend on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.worker_messages import Row, SlotInit, StepPlan
from pagewire.kernels.data.kv_codes import FOUR_BITS
from pagewire.workers.errors import LoadError
from pagewire.workers.run.runner import Runner
from tests.workers.architectures import GROUPED, INDEXED, LATER_EXPERTS, MLA, VOCAB_SIZE, Architecture
from tests.workers.driver import Driver, load_runner, values
from tests.workers.parity import make_prompts

PARAMS = SamplingParams(temperature=0.0, logprobs=1)
MODELS = {
    "llama": Architecture("llama", GROUPED),  # a compiled stack
    "gemma2": Architecture("gemma2", GROUPED | {"sliding_window": 7, "query_pre_attn_scalar": 12}),
    "deepseek_v32": Architecture(
        "deepseek_v32", INDEXED | LATER_EXPERTS
    ),  # keys of indexers stay as they are
    "deepseek_v2": Architecture("deepseek_v2", MLA | LATER_EXPERTS),  # values are a part of keys
}


@pytest.fixture(
    scope="module",
    params=[*((name, "int8") for name in MODELS), ("llama", "int4"), ("gemma2", "int4")],
    ids="-".join,
)
def load(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Runner]:
    """Makes runners of a model."""
    name, codes = request.param
    folder = MODELS[name].write(tmp_path_factory.mktemp(name), dtype="bfloat16")
    return lambda dtype=codes: load_runner(folder, kv_cache_dtype=dtype)[0]


def test_tokens_and_bits_depend_on_the_request_alone(load: Callable[..., Runner]) -> None:
    """Alone in one step; crowded and in chunks; recomputed after a preemption; behind a cached prefix."""
    runner = load()
    prompts = make_prompts(VOCAB_SIZE, (21, 9, 33, 14, 5, 27))
    alone = [Driver(runner, budget=64).run([prompt], 6, PARAMS, seeds=[0])[0] for prompt in prompts]
    for budget in (7, 100):
        crowd = Driver(runner, budget).run(prompts, 6, PARAMS)
        for one, other in zip(alone, crowd, strict=True):
            assert (one.output, one.logprobs) == (other.output, other.logprobs)

    prompt, whole = prompts[0], alone[0]
    recomputed = SlotInit(1, prompt + whole.output[:4], 21, list(range(10, 18)), PARAMS, seed=0)
    cached = SlotInit(2, prompt + whole.output[:4], 21, [*range(10, 15), 30, 31], PARAMS, seed=0)
    plans = [
        StepPlan(0, [Row(1, 0, 25, num_samples=1)], [recomputed]),
        StepPlan(1, [Row(2, 20, 5, num_samples=1)], [cached]),
    ]
    for plan in plans:
        [row] = runner.step(plan).rows
        assert row.logprobs is not None
        assert (row.token_ids, values(row.logprobs)) == ([whole.output[4]], whole.logprobs[4])


def test_log_probabilities_are_nearly_those_of_the_models_dtype(load: Callable[..., Runner]) -> None:
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    prompts = make_prompts(VOCAB_SIZE, (40, 9))
    runners = load("auto"), load()
    found = [
        torch.tensor(
            [
                logprob
                for request in Driver(runner).run(prompts, 1, params)
                for part in request.prompt_logprobs
                for logprob in values(part)[1]
            ]
        )
        for runner in runners
    ]
    error = (found[0] - found[1]).abs().mean()
    bits = 4 if runners[1].model.kv_shapes[0].dtype == FOUR_BITS else 8
    assert 0 < error < {4: 0.25, 8: 0.05}[bits] * found[0].std()


def test_blocks_are_smaller(load: Callable[..., Runner]) -> None:
    wide, narrow = load("auto"), load()
    shapes = wide.model.kv_shapes
    sizes = [[s.head_dim] if s.values_in_keys else [s.head_dim, s.v_head_dim] for s in shapes]
    elements = sum(s.num_kv_heads * sum(each) * 4 for s, each in zip(shapes, sizes, strict=True))
    in_codes = elements // 2 if narrow.model.kv_shapes[0].dtype == FOUR_BITS else elements
    scales = sum(s.num_kv_heads * len(each) * 4 for s, each in zip(shapes, sizes, strict=True))
    index = sum(2 * s.index_dim * 4 for s in shapes)
    assert wide.block_bytes == 2 * elements + index
    assert narrow.block_bytes == in_codes + 4 * scales + index  # heads of 4 bits are of one group here
    assert narrow.memory()["kv_cache"] == narrow.num_blocks * narrow.block_bytes


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("deepseek_v2", "'int4' is not for the latents of deepseek_v2: 'int8' keeps them in 8 bits"),
        ("opt", "'int4' needs attention heads of an even size, not 13 as in opt: 'int8' takes any"),
    ],
)
def test_what_4_bits_do_not_take_is_refused_by_name(tmp_path: Path, model: str, reason: str) -> None:
    odd = {"hidden_size": 52, "word_embed_proj_dim": 52, "num_attention_heads": 4}
    fields = MODELS["deepseek_v2"].fields if model == "deepseek_v2" else odd
    with pytest.raises(LoadError, match=reason):
        load_runner(Architecture(model, fields).write(tmp_path), kv_cache_dtype="int4")


def test_other_types_of_8_bits_are_refused_by_name(llama: Path) -> None:
    with pytest.raises(
        LoadError, match=r"'fp8' needs a model in bfloat16 or float16 on a GPU.*: 'int8' has 8 bits"
    ):
        load_runner(llama, kv_cache_dtype="fp8")
