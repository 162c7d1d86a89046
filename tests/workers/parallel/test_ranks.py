"""A model over several ranks, in the threads of one process: token for token what one worker generates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.worker_messages import Parallel, Ready, WorkerConfig
from pagewire.kernels.cpu.build import REFERENCE
from pagewire.workers.checkpoint.headers import read_headers
from pagewire.workers.errors import LoadError
from pagewire.workers.estimate.fit import sizes_of
from pagewire.workers.module.matrices import is_linear, is_stack
from pagewire.workers.module.shards import Shards
from pagewire.workers.network.build_layer import LayerBuilder
from pagewire.workers.network.build_module import module_on_meta
from pagewire.workers.run.runner import Runner
from tests.workers.architectures import (
    EXPERTS,
    GROUPED,
    HYBRIDS,
    MAMBA2,
    SERVED,
    VOCAB_SIZE,
    Architecture,
)
from tests.workers.driver import GREEDY, Driver, load_runner
from tests.workers.parallel.threads import Rank, Threads, run_ranks
from tests.workers.parity import NUM_TOKENS, OWN_POSITIONS, make_prompts
from tests.workers.quantised_models import write_packed
from tests.workers.versions import skip_before

FORMS = (  # each has its own way to be divided
    *(
        "llama with biases",
        "gpt2",
        "gpt_bigcode",
        "phi3",
        "olmo2",
        "deepseek_v3",
        "bitnet",
        "lfm2",
        "qwen3_next",
    ),
    "falcon with groups",
)
WHOLE = (
    "q_a_proj",
    "kv_a_proj_with_mqa",
    "gate",
    "router",
    "shared_expert_gate",
    "wg",
    "wpe",
    "embed_positions",
    *("wq_b", "wk", "weights_proj"),  # of indexers, which choose the same keys on all ranks
    *("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_input_gate", "per_layer_projection"),
    "proj",  # of Gemma 4's router
)
"""Last parts of the names of matrices that every rank has: small ones, whose outputs all ranks need."""
UNDIVIDED = {
    "codegen": "its queries, values and keys lie in four blocks",
    "dbrx": "the experts of a layer are one matrix",
}
"""Served by one rank only, and why."""
DIVIDED_STATES = {
    *("bamba", "granitemoehybrid", "lfm2", "lfm2_moe", "lfm3", "mamba2", "nemotron_h"),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
}
MODULES = {"axk2", "diffllama", "doge", "dots3_note_text", "hy_v4"}
"""Decoders that no structure describes, and that keep no states."""
STATES = {architecture.name for architecture in HYBRIDS} - DIVIDED_STATES
"""Likewise, since their layers keep states that are not divided."""
ONE_GROUP = Architecture("bamba", GROUPED | MAMBA2 | {"attn_layer_indices": [1], "mamba_n_groups": 1})
"""Both ranks have heads of the same group, which is normed as a whole."""
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
BLOCKS = WIDE | {
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
"""Each of two ranks has whole blocks of 256 inputs, of each of which a quantised product leaves an outlier out."""
MOE = BLOCKS | EXPERTS | {"moe_intermediate_size": 512}


@dataclass
class RankResult:
    """What a rank has generated, and what it had loaded."""

    tokens: list[list[int]]
    ready: Ready
    runner: Runner


def generate_over_ranks(
    folder: Path,
    size: int,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] = GREEDY,
    **fields: Any,
) -> Sequence[RankResult]:
    """What each rank of a group generates."""

    def work(rank: Rank) -> RankResult:
        runner, ready = load_runner(folder, collective=rank, **fields)
        return RankResult(Driver(runner).generate(prompts, NUM_TOKENS, params), ready, runner)

    return run_ranks(size, work)


def check_parity(folder: Path, size: int, **fields: Any) -> tuple[Ready, Sequence[RankResult]]:
    """Compare the tokens of all ranks with those of one worker."""
    prompts = make_prompts(VOCAB_SIZE)
    runner, ready = load_runner(folder, **fields)
    expected = Driver(runner).generate(prompts, NUM_TOKENS)
    results = generate_over_ranks(folder, size, prompts, **fields)
    for result in results:
        assert result.tokens == expected
        assert result.ready.vocab_size == ready.vocab_size
        assert result.runner.model.is_stack == runner.model.is_stack
    return ready, results


@pytest.mark.parametrize("name", FORMS)
def test_two_ranks_generate_what_one_worker_does(name: str, tmp_path: Path) -> None:
    check_parity(SERVED[name].write(tmp_path), 2)


@pytest.mark.every_architecture
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "name", sorted(SERVED.keys() - FORMS - UNDIVIDED.keys() - MODULES - STATES - DIVIDED_STATES)
)
def test_every_architecture(name: str, size: int, tmp_path: Path) -> None:
    check_parity(SERVED[name].write(tmp_path), size)


@pytest.mark.every_architecture
@pytest.mark.parametrize(
    ("name", "size"), [*((name, 2) for name in sorted(DIVIDED_STATES)), ("lfm2", 4), ("qwen3_5_text", 4)]
)
def test_every_architecture_whose_states_are_divided(name: str, size: int, tmp_path: Path) -> None:
    check_parity(SERVED[name].write(tmp_path), size)


@pytest.mark.parametrize("name", sorted(UNDIVIDED))
def test_what_cannot_be_divided_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    folder = SERVED[name].write(tmp_path)
    words = f"cannot be divided over 2 ranks: {UNDIVIDED[name]}.*; use pipeline_parallel_size, or one rank"
    with pytest.raises(LoadError, match=words):
        generate_over_ranks(folder, 2, [[1]])


@pytest.mark.parametrize("name", sorted({*MODULES, "minimax", "zamba2"}))
def test_what_runs_as_a_module_is_refused_with_the_way_out(name: str, tmp_path: Path) -> None:
    """Before weights are read: whether its heads or states could be divided does not count."""
    folder = SERVED[name].write(tmp_path)
    (folder / "model.safetensors").unlink()
    words = (
        f"{name} is served without tensor_parallel_size: its layers run as transformers' module .* describe"
    )
    with pytest.raises(LoadError, match=words):
        generate_over_ranks(folder, 2, [[1]])


def test_heads_with_states_are_divided(tmp_path: Path) -> None:
    """Each rank has half of the states' memory, but for the group that both have."""
    ready, results = check_parity(ONE_GROUP.write(tmp_path), 2)
    group = 2 * ONE_GROUP.fields["mamba_d_state"] * (4 - 1) * 4  # what the convolution keeps of it
    assert [result.ready.bytes_per_state for result in results] == [(ready.bytes_per_state + group) // 2] * 2


@pytest.mark.parametrize("name", sorted(STATES))
def test_states_that_are_not_divided(name: str) -> None:
    causal = module_on_meta(WorkerConfig(""), SERVED[name].config(), torch.float32)
    with pytest.raises(LoadError, match=r"those of \w+ are not divided; use pipeline_parallel_size"):
        Shards(causal, Rank(1, Threads(2)))


def test_states_whose_heads_do_not_fit_are_refused() -> None:
    mamba2 = Architecture("mamba2", SERVED["mamba2"].fields | {"n_groups": 2})
    for model, reason in ((mamba2, "2 groups of heads"), (SERVED["qwen3_next"], "2 heads of keys")):
        causal = module_on_meta(WorkerConfig(""), model.config(), torch.float32)
        with pytest.raises(LoadError, match=reason):
            Shards(causal, Rank(1, Threads(3)))


@pytest.mark.parametrize("name", sorted(SERVED.keys() - UNDIVIDED.keys() - MODULES - STATES - OWN_POSITIONS))
def test_all_large_weights_are_divided(name: str) -> None:
    """But for decoders of encoders' types, for which there is no plan: every rank has all of them."""
    if name == "nemotron":
        skip_before((5, 21), "it has a plan for this model")
    causal = module_on_meta(WorkerConfig(""), SERVED[name].config(), torch.float32)
    shards = Shards(causal, Rank(1, Threads(2)))
    for path, module in causal.named_modules():
        parts = path.split(".")
        if any(part.endswith("norm") for part in parts):  # those of A.X have layers of their own
            continue
        if parts == ["lm_head", "dense"]:  # before ModernBERT's output layer, for one row of each sequence
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            divisible = is_stack(module, leaf) or (parameter.dim() == 2 and leaf == "weight")
            if divisible and path.rpartition(".")[2] not in WHOLE:
                assert shards.cut(f"{path}.{leaf}") is not None, f"{path}.{leaf} {tuple(parameter.shape)}"
            if is_linear(module):
                assert shards.cut(f"{path}.{leaf}") is not None or path.rpartition(".")[2] in WHOLE


def test_a_rank_holds_its_part_only(tmp_path: Path) -> None:
    folder = Architecture("llama", WIDE | {"vocab_size": VOCAB_SIZE}).write(tmp_path)
    whole, results = check_parity(folder, 2)
    for result in results:
        assert result.ready.bytes_per_block * 2 == whole.bytes_per_block
        assert result.ready.weight_bytes == pytest.approx(whole.weight_bytes / 2, rel=0.02)
        assert [shape.num_kv_heads for shape in result.runner.model.kv_shapes] == [1, 1]
    # What was expected by the header alone. In another dtype than the file's, all weights are copies.
    config = WorkerConfig(str(folder), dtype="bfloat16", parallel=Parallel(1, 2))
    sizes = sizes_of(read_headers(folder), config, REFERENCE)
    rank = results[1]
    assert sizes.kv_token_bytes * 2 * rank.runner.config.block_size == rank.ready.bytes_per_block
    assert sizes.weight_bytes * 2 == pytest.approx(rank.ready.weight_bytes, rel=0.02)


@pytest.mark.parametrize(("heads", "size"), [((6, 3), 2), ((4, 1), 3), ((6, 2), 4)])
def test_heads_need_not_divide_evenly(heads: tuple[int, int], size: int, tmp_path: Path) -> None:
    sizes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": 16}
    widths = {"hidden_size": 96, "intermediate_size": 72}
    check_parity(Architecture("llama", sizes | widths).write(tmp_path), size)


def test_sizes_that_cannot_be_divided_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    folder = Architecture("llama", GROUPED).write(tmp_path)
    (folder / "model.safetensors").rename(folder / "kept")
    read = (folder / "kept").read_bytes()
    header = 8 + int.from_bytes(read[:8], "little")
    (folder / "model.safetensors").write_bytes(read[:header] + bytes(len(read) - header))  # zeros only
    with pytest.raises(LoadError, match=r"over 3 ranks: it has 4 attention heads, with 2 .* that work: 2, 4"):
        generate_over_ranks(folder, 3, [[1]])


def test_a_family_without_a_plan_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagewire.workers.module import parallel_plan

    monkeypatch.delitem(parallel_plan.TABLE, "gpt2")
    with pytest.raises(LoadError, match=r"GPT2LMHeadModel cannot be divided over 2 ranks: .* has a plan"):
        generate_over_ranks(SERVED["gpt2"].write(tmp_path), 2, [[1]])


def test_what_every_rank_computes_is_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack that forgets a sum is noticed by the logits."""
    own = LayerBuilder.of
    monkeypatch.setattr(LayerBuilder, "of", lambda *args: dataclasses.replace(own(*args), ranks=None))
    with pytest.raises(LoadError, match="its logits with paged attention are wrong"):
        generate_over_ranks(SERVED["llama"].write(tmp_path), 2, [[1]])


@pytest.mark.parametrize(
    ("name", "fields", "quantization"),
    [
        ("llama", BLOCKS, "int4"),
        ("llama", BLOCKS, "fp8"),
        ("qwen3_moe", MOE, "int4"),
    ],
)
def test_quantised_while_loading(name: str, fields: Any, quantization: str, tmp_path: Path) -> None:
    check_parity(Architecture(name, fields).write(tmp_path), 2, quantization=quantization)


def test_a_quantised_checkpoint(tmp_path: Path) -> None:
    folder, _ = write_packed(Architecture("llama", BLOCKS).write(tmp_path / "dense"), tmp_path, group=32)
    check_parity(folder, 2)


def test_groups_that_a_cut_divides_become_smaller(tmp_path: Path) -> None:
    """A rank has one and a half groups of 128. Inputs are rounded in other groups then, so tokens may differ."""
    folder, _ = write_packed(Architecture("llama", WIDE).write(tmp_path / "dense"), tmp_path, group=128)
    results = generate_over_ranks(folder, 2, make_prompts(VOCAB_SIZE))  # the proof compares the logits
    assert results[0].tokens == results[1].tokens
    stack: Any = results[0].runner.model.model.base
    assert stack.stack.layers[0].down.scheme.group == 64


def test_keys_and_values_of_8_bits(tmp_path: Path) -> None:
    check_parity(Architecture("llama", WIDE).write(tmp_path), 2, kv_cache_dtype="int8")


def test_weights_that_are_in_memory_as_a_whole(tmp_path: Path) -> None:
    check_parity(SERVED["gpt_oss"].write(tmp_path), 2, load_format="dummy")


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_bits_do_not_depend_on_the_batch(name: str, tmp_path: Path) -> None:
    folder = SERVED[name].write(tmp_path, dtype="bfloat16")
    prompts = make_prompts(VOCAB_SIZE)
    sampled = SamplingParams(temperature=1.0, logprobs=5)

    def work(rank: Rank) -> tuple[list[object], list[object]]:
        runner, _ = load_runner(folder, collective=rank)
        driver = Driver(runner, budget=9)
        together = [(s.output, s.logprobs) for s in driver.run(prompts, 6, sampled)]
        alone = []
        for seed, prompt in enumerate(prompts):
            (one,) = Driver(runner, budget=16).run([prompt], 6, sampled, [seed])
            alone.append((one.output, one.logprobs))
        return list(together), alone

    (together, alone), (other, _) = run_ranks(2, work)
    assert together == alone
    assert together == other
