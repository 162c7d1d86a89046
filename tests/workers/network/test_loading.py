"""From checkpoints of all forms to a model; sizes; and what is refused, in clear words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from pagewire.engine_core.config.config import EngineConfig
from pagewire.ipc.options.engine_args import EngineArgs
from pagewire.ipc.speculative import SpeculativeConfig
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.worker_messages import Parallel, WorkerConfig
from pagewire.kernels.output import CappedOutput
from pagewire.workers.device import machine
from pagewire.workers.device.cpu import bind_threads
from pagewire.workers.device.kv_size import GIB, cache_size, kv_budget, num_kv_blocks
from pagewire.workers.device.machine import bound_cpus, default_threads, parse_cpus
from pagewire.workers.errors import DisprovenError, LoadError
from pagewire.workers.families import structures
from pagewire.workers.module.structure import DECODERS, GPT_LIKE, LLAMA
from pagewire.workers.module.weights import CheckpointWeights
from pagewire.workers.network import build_module as modules
from pagewire.workers.network import loading, proof
from pagewire.workers.network.module_base import ModuleBase, ModuleHead
from pagewire.workers.network.network import Network
from pagewire.workers.network.proof import prove
from tests.workers.architectures import ARCHITECTURES, GROUPED, SERVED, VOCAB_SIZE, Architecture
from tests.workers.driver import Driver, load_runner
from tests.workers.parity import NUM_TOKENS, make_prompts, our_tokens, transformers_tokens

PROMPTS = make_prompts(VOCAB_SIZE)


def architecture_named(name: str) -> Architecture:
    """The entry of that name in the table."""
    return next(architecture for architecture in ARCHITECTURES if architecture.name == name)


LAYER_BY_LAYER = ("kolibri", "laguna", "mimo", "minimax_m3", "modernbert")
"""How the names begin of those that decode in no compiled call: their layers, or their heads, have none."""
STACKED = (
    "llama",
    "llama with biases",
    "mistral",
    "qwen2",
    "qwen3",
    "seed_oss",
    "internlm3",
    "cwm",
    *(name for name in DECODERS if name in SERVED and not name.startswith(LAYER_BY_LAYER)),
    *sorted(GPT_LIKE & SERVED.keys()),  # a set, whose order differs between processes
)


@pytest.mark.parametrize("name", STACKED)
def test_plain_models_run_as_a_stack(name: str, tmp_path: Path) -> None:
    runner, _ = load_runner(architecture_named(name).write(tmp_path))
    assert runner.model.is_stack
    assert not runner.decoding.why_not


@pytest.mark.parametrize("name", ["kimi_linear", "lfm2_moe", "qwen3_5_text"])
def test_a_disproven_stack_of_a_hybrid_runs_as_a_module(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The halves that were packed for the stack stay as they are."""

    def planted(model: Any, *args: Any) -> Any:
        if isinstance(model.base, Network):
            raise DisprovenError("planted")
        return prove(model, *args)

    monkeypatch.setattr(loading, "prove", planted)
    folder = architecture_named(name).write(tmp_path)
    runner, _ = load_runner(folder)
    assert not runner.model.is_stack
    assert Driver(runner).generate(PROMPTS, 8) == transformers_tokens(folder, PROMPTS, 8)


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_models_of_that_structure_with_other_arithmetic_do_not(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If they are not known to be such, the proof finds it out, and they are packed a second time."""
    proofs: list[object] = []
    monkeypatch.setattr(loading, "prove", lambda *args: (proofs.append(args), prove(*args))[1])
    if known:
        monkeypatch.setattr(structures, "OTHER_ARITHMETIC", {"ministral3"})
    monkeypatch.setitem(DECODERS, "ministral3", LLAMA)  # as if its queries were not scaled
    folder = architecture_named("ministral3").write(tmp_path)
    assert our_tokens(folder, PROMPTS) == transformers_tokens(folder, PROMPTS)
    runner, _ = load_runner(folder)
    assert not runner.model.is_stack
    assert len(proofs) == (2 if known else 4)


@pytest.mark.parametrize(
    ("name", "alone"),
    [
        ("llama", True),
        ("gpt2", True),
        ("cohere", False),
        ("granite", False),
        ("hyperclovax", False),
        ("gemma2", False),
    ],
)
def test_the_output_layer_is_called_alone_where_it_is_all_there_is(
    name: str, alone: bool, tmp_path: Path
) -> None:
    """Or with a factor and a cap that the configuration names."""
    runner, _ = load_runner(architecture_named(name).write(tmp_path))
    head = runner.model.model.head
    assert not isinstance(head, ModuleHead)
    assert isinstance(head, CappedOutput) != alone


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 32},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "rope_theta": 10000.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 128,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotary_variants(rope: dict[str, Any], tmp_path: Path) -> None:
    folder = Architecture("llama", GROUPED | {"rope_parameters": rope}).write(tmp_path)
    assert our_tokens(folder, PROMPTS) == transformers_tokens(folder, PROMPTS)


@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling"])
def test_the_options_change_the_rotary_embedding(form: str, tmp_path: Path) -> None:
    """Whichever way config.json has it: before version 5, transformers wrote its base and its scaling apart."""
    scaling = {"rope_type": "linear", "factor": 2.0}
    wanted = Architecture("llama", GROUPED | {"rope_parameters": {**scaling, "rope_theta": 500.0}})
    expected = transformers_tokens(wanted.write(tmp_path / "wanted"), PROMPTS)
    other = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0, "original_max_position_embeddings": 32}
    folder = Architecture("llama", GROUPED | {"rope_parameters": other}).write(tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    if form == "rope_scaling":
        config |= {"rope_theta": 100.0, "rope_scaling": {**config.pop("rope_parameters")}}
        del config["rope_scaling"]["rope_theta"]
        (folder / "config.json").write_text(json.dumps(config))
    resolved = EngineConfig.resolve(EngineArgs(str(folder), rope_scaling=scaling, rope_theta=500.0))
    overrides = resolved.worker_config().hf_overrides
    runner, _ = load_runner(folder, hf_overrides=overrides)
    assert Driver(runner).generate(PROMPTS, NUM_TOKENS) == expected
    assert Driver(load_runner(folder)[0]).generate(PROMPTS, NUM_TOKENS) != expected


def test_rotary_options_without_an_effect_are_refused(tmp_path: Path) -> None:
    gemma = architecture_named("gemma3_text").write(tmp_path / "gemma3")
    with pytest.raises(ValueError, match="this one may have several"):
        EngineConfig.resolve(EngineArgs(str(gemma), rope_theta=500.0))
    gpt2 = architecture_named("gpt2").write(tmp_path / "gpt2")
    with pytest.raises(LoadError, match="gpt2 has no rotary embedding that rope_theta changes"):
        load_runner(gpt2, hf_overrides={"rope_theta": 500.0})


def test_sharded_checkpoints(llama: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(llama).save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert our_tokens(tmp_path, PROMPTS) == our_tokens(llama, PROMPTS)


def test_bin_checkpoints_are_read_only_where_the_format_says_so(llama: Path, tmp_path: Path) -> None:
    shutil.copy(llama / "config.json", tmp_path)
    torch.save(load_file(llama / "model.safetensors"), tmp_path / "pytorch_model.bin")
    runner, _ = load_runner(tmp_path, load_format="pt")
    assert Driver(runner).generate(PROMPTS, 3) == [t[:3] for t in our_tokens(llama, PROMPTS)]
    for load_format in ("auto", "safetensors"):
        with pytest.raises(LoadError, match=r"\.bin files are pickles, .* only with load_format='pt'"):
            load_runner(tmp_path, load_format=load_format)


@pytest.mark.parametrize("name", ["gpt_oss", "afmoe"])
def test_norms_that_transformers_keeps_in_float32(name: str, tmp_path: Path) -> None:
    """Beside float16, in which a stack computes all of them."""
    runner, _ = load_runner(SERVED[name].write(tmp_path, dtype="float16"), dtype="float16")
    base = runner.model.model.base
    assert isinstance(base, Network) and base.stack.compiled is not None
    assert {norm.weight.dtype for layer in base.stack.layers for norm in layer.norms} == {torch.float16}


@pytest.mark.parametrize("name", ["bloom", "falcon_h1", "llama4_text"])
def test_families_whose_methods_are_ours_are_read_from_pickles(name: str, tmp_path: Path) -> None:
    """Their attention, their states and their experts, where transformers reads the weights."""
    folder = SERVED[name].write(tmp_path / "safetensors")
    from transformers import AutoModelForCausalLM

    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    weights = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    runner, _ = load_runner(tmp_path, load_format="pt")
    expected = transformers_tokens(folder, PROMPTS, 3)
    assert Driver(runner).generate(PROMPTS, 3) == expected


def test_dummy_weights_are_the_same_each_time(llama: Path, tmp_path: Path) -> None:
    shutil.copy(llama / "config.json", tmp_path)
    first, second = (load_runner(tmp_path, load_format="dummy")[0] for _ in range(2))
    assert Driver(first).generate(PROMPTS, 3) == Driver(second).generate(PROMPTS, 3)


@pytest.mark.parametrize(
    ("asked", "got"),
    [("auto", "float32"), ("half", "float16"), ("float16", "float16"), ("bfloat16", "bfloat16")],
)
def test_dtypes(llama: Path, asked: str, got: str) -> None:
    runner, ready = load_runner(llama, dtype=asked)
    assert ready.dtype == got
    assert str(runner.caches[0].k.dtype) == f"torch.{got}"
    assert [len(t) for t in Driver(runner).generate(PROMPTS, 2)] == [2] * len(PROMPTS)


def test_ready_tells_what_was_learned(llama: Path) -> None:
    _, ready = load_runner(llama, max_model_len=None, num_blocks=None, kv_cache_memory_bytes=1 << 20)
    assert (ready.architecture, ready.device, ready.vocab_size) == ("LlamaForCausalLM", "cpu", VOCAB_SIZE)
    assert (ready.max_model_len, ready.eos_token_id) == (128, 2)
    assert ready.bytes_per_block == 2 * 2 * 4 * (16 + 16) * 4
    assert ready.num_blocks == min((1 << 20) // ready.bytes_per_block, 8 * 32)
    weights = sum(w.nbytes for w in load_file(llama / "model.safetensors").values())
    assert ready.weight_bytes == weights
    assert {"import", "config", "weights", "transform", "kv"} <= set(ready.startup_seconds)


def test_overrides(llama: Path) -> None:
    _, ready = load_runner(llama, max_model_len=None, hf_overrides={"max_position_embeddings": 48})
    assert ready.max_model_len == 48


def test_without_sliding_windows_a_model_is_served_up_to_the_smallest(tmp_path: Path) -> None:
    """As vLLM does it: within a window every token sees all tokens before it."""
    fields = GROUPED | {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
    folder = Architecture("ministral", fields).write(tmp_path)
    sizes: dict[str, Any] = {"disable_sliding_window": True, "num_blocks": 100}
    assert load_runner(folder, max_model_len=None, **sizes)[1].max_model_len == 7
    assert load_runner(folder, max_model_len=5, **sizes)[1].max_model_len == 5
    with pytest.raises(
        LoadError, match="max_model_len 8 exceeds the 7 tokens up to which disable_sliding_window"
    ):
        load_runner(folder, max_model_len=8, **sizes)


def test_a_longer_model_must_be_asked_for(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LoadError, match=r"exceeds the model.s limit of 128 positions"):
        load_runner(llama, max_model_len=200, num_blocks=100)
    monkeypatch.setenv("PAGEWIRE_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert load_runner(llama, max_model_len=200, num_blocks=100)[1].max_model_len == 200


def rewrite(source: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy of a checkpoint in another folder, with its tensors changed."""
    folder.mkdir(exist_ok=True)
    shutil.copy(source / "config.json", folder)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_missing_weights(llama: Path, tmp_path: Path) -> None:
    rewrite(llama, tmp_path, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(LoadError, match=r"lacks 1 weights of llama: model.layers.1.mlp.up_proj.weight$"):
        load_runner(tmp_path)


@pytest.mark.parametrize("load_format", ["auto", "pt"])
def test_weights_of_another_model(llama: Path, tmp_path: Path, load_format: str) -> None:
    extra = {f"model.layers.{i}.mlp.up_proj.weight": torch.zeros(1) for i in range(2, 7)}
    rewrite(llama, tmp_path, lambda weights: weights.update(extra))
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"holds 5 tensors that llama has no use for: model.layers.2.mlp"):
        load_runner(tmp_path, load_format=load_format)


def test_tensors_that_are_known_to_be_unused_do_no_harm(llama: Path, tmp_path: Path) -> None:
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.h.0.attn.bias": torch.ones(3),
        "model.layers.0.self_attn.k_scale": torch.ones(1),
        "model.layers.0.mlp.up_proj.bias": torch.zeros(100),
    }
    rewrite(llama, tmp_path, lambda weights: weights.update(extra))
    assert our_tokens(tmp_path, PROMPTS) == our_tokens(llama, PROMPTS)


def test_a_bias_that_would_do_something_is_not_left_out(llama: Path, tmp_path: Path) -> None:
    rewrite(
        llama, tmp_path, lambda weights: weights.update({"model.layers.0.mlp.up_proj.bias": torch.ones(100)})
    )
    with pytest.raises(LoadError, match=r"holds 1 tensors that llama has no use for: .*up_proj.bias"):
        load_runner(tmp_path)


def test_weights_of_another_shape(llama: Path, tmp_path: Path) -> None:
    rewrite(llama, tmp_path, lambda weights: weights.update({"model.norm.weight": torch.ones(5)}))
    with pytest.raises(LoadError, match=r"model.norm.weight .* is of shape \(5,\), of the model \(64,\)"):
        load_runner(tmp_path)


def test_experts_that_do_not_make_a_stack(tmp_path: Path) -> None:
    folder = architecture_named("qwen3_moe").write(tmp_path)
    name = "model.layers.0.mlp.experts.2.gate_proj.weight"
    assert name in load_file(folder / "model.safetensors"), "experts apart, which the module stacks"
    rewrite(folder, tmp_path / "fewer", lambda weights: weights.pop(name))
    with pytest.raises(LoadError, match=r"do not make model.layers.0.mlp.experts.gate_up_proj"):
        load_runner(tmp_path / "fewer")


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe", "gpt_oss", "gemma2", "phi3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_read_one_by_one_are_those_that_transformers_reads(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, from a checkpoint in another dtype."""
    folder = architecture_named(name).write(tmp_path, dtype="float32" if dtype == "bfloat16" else "bfloat16")
    params = SamplingParams(temperature=1.0, logprobs=3)
    outputs = []
    for reason in (None, "for the test"):
        monkeypatch.setattr(modules, "read_by_transformers", lambda *_, reason=reason: reason)
        runner, ready = load_runner(folder, dtype=dtype)
        requests = Driver(runner).run(PROMPTS, 4, params)
        outputs.append((ready.weight_bytes, [(request.output, request.logprobs) for request in requests]))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("tensor", ["model.embed_tokens.weight", "lm_head.weight"])
def test_tied_weights_may_have_either_name(tensor: str, tmp_path: Path) -> None:
    folder = Architecture("llama", GROUPED | {"tie_word_embeddings": True}).write(tmp_path)

    def rename(weights: dict[str, torch.Tensor]) -> None:
        [embedding] = [
            weights.pop(name) for name in list(weights) if "embed_tokens" in name or "lm_head" in name
        ]
        weights[tensor] = embedding

    renamed = rewrite(folder, tmp_path / "renamed", rename)
    assert our_tokens(renamed, PROMPTS) == transformers_tokens(folder, PROMPTS)


def test_a_reading_of_everything_at_once_is_logged(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "pagewire.worker"):
        load_runner(llama)
        assert "at once" not in caplog.text
        shutil.copy(llama / "config.json", tmp_path)
        torch.save(load_file(llama / "model.safetensors"), tmp_path / "pytorch_model.bin")
        load_runner(tmp_path, load_format="pt")
    assert "transformers reads the whole checkpoint at once: load_format is 'pt'" in caplog.text


def test_tables_of_another_version_of_transformers(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import conversion_mapping

    expected = our_tokens(llama, PROMPTS)
    monkeypatch.delattr(conversion_mapping, "get_model_conversion_mapping")
    with caplog.at_level("INFO", "pagewire.worker"):
        assert our_tokens(llama, PROMPTS) == expected
    assert "reads the whole checkpoint at once: this version has other tables" in caplog.text


def test_a_module_that_does_not_call_its_layers(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = our_tokens(llama, PROMPTS)
    monkeypatch.setattr(CheckpointWeights, "_stream", lambda *_: None)  # as if no layer were ever called
    with caplog.at_level("INFO", "pagewire.worker"):
        assert our_tokens(llama, PROMPTS) == expected
    assert "LlamaForCausalLM does not run with one layer at a time" in caplog.text


@pytest.mark.parametrize("name", ["llama", "granite", "gpt2", "qwen3_moe"])
def test_packed_weights_are_not_kept_beside_their_packed_form(name: str, tmp_path: Path) -> None:
    """No dense matrix of the checkpoint is left in the module but its embeddings."""
    runner, _ = load_runner(architecture_named(name).write(tmp_path))
    model = runner.model.model
    parts = [part for part in (model.base, model.head) if isinstance(part, ModuleBase | ModuleHead)]
    modules = [part.module for part in parts]
    tables: list[Any] = [model.base.words] if isinstance(model.base, Network) else []
    kept = [
        name
        for module in modules
        for name, tensor in module.named_parameters()
        if tensor.dim() > 1
        and not name.endswith(("embed_tokens.weight", "wte.weight", "wpe.weight", "gate.weight"))
    ]
    assert kept == []
    tensors = [
        tensor for module in (*modules, *tables) for tensor in (*module.parameters(), *module.buffers())
    ]
    assert all(tensor.device.type == "cpu" for tensor in tensors)


def test_broken_files(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"holds no config.json"):
        load_runner(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LoadError, match=r"config.json of .* cannot be used"):
        load_runner(tmp_path)
    shutil.copy(llama / "config.json", tmp_path)
    with pytest.raises(LoadError, match="cannot load"):
        load_runner(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes()[:2000])
    with pytest.raises(LoadError, match="cannot load"):
        load_runner(tmp_path)


def test_what_is_no_causal_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "led"}))
    with pytest.raises(LoadError, match="encoder-decoder"):
        load_runner(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(LoadError, match=r"config.json of .* cannot be used"):
        load_runner(tmp_path)


def test_devices_and_dtypes_that_are_not_served(llama: Path) -> None:
    with pytest.raises(LoadError, match="device 'tpu' is not supported"):
        load_runner(llama, device="tpu")
    with pytest.raises(LoadError, match="dtype must be one of auto"):
        load_runner(llama, dtype="int3")


def test_kv_sizes() -> None:
    load = WorkerConfig("", max_num_seqs=4, block_size=16)
    assert num_kv_blocks(load, 100, 10, budget=10_000) == 4 * 7
    assert num_kv_blocks(load, 100, 1000, budget=10_000) == 10
    with pytest.raises(LoadError, match=r"needs 7 KV blocks .* only 5 fit; max_model_len 80 would fit"):
        num_kv_blocks(load, 100, 1000, budget=5_999)
    assert num_kv_blocks(WorkerConfig("", num_blocks=9), 100, 1000, budget=0) == 9


def test_states_and_blocks_share_a_budget() -> None:
    load = WorkerConfig("", max_num_seqs=4, block_size=16)
    # 4 running sequences, and of the rest a half each: 35 blocks, and checkpoints of as many bytes
    assert cache_size(load, 1000, 100, 700, 4 * 700 + 2 * 7000) == (70, 14)
    assert cache_size(load, 1000, 100, 700, 10**6) == (4 * 63, 4 + 36), "no more than sequences can use"
    assert cache_size(load, 1000, 100, 700, 6300 + 3 * 700) == (63, 3), (
        "a request of the longest kind comes first"
    )
    assert cache_size(load, 1000, 0, 700, 10_000) == (2 * 4 * 63, 14), "blocks without memory"
    assert cache_size(load, 1000, 100, 0, 10_000) == (100, 0)
    many = replace(load, max_num_seqs=100)
    assert cache_size(many, 1000, 100, 700, 40 * 700) == (70, 30), "half is for running sequences"
    drafting = replace(load, speculative=SpeculativeConfig("ngram", None, 3))
    assert cache_size(drafting, 1000, 100, 700, 8 * 700 + 2 * 7000) == (70, 18), "two slots for each sequence"
    with pytest.raises(LoadError, match=r"and 3 state slots of .* lower max_model_len"):
        cache_size(load, 1000, 100, 700, 6300 + 3 * 700 - 1)
    with pytest.raises(LoadError, match="3 state slots"):
        cache_size(load, 1000, 0, 700, 2 * 700)


def test_kv_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEWIRE_CPU_KVCACHE_SPACE", raising=False)
    load = WorkerConfig("", gpu_memory_utilization=0.5)
    assert kv_budget(load, 64 * GIB, headroom=GIB) == 4 * GIB
    assert kv_budget(load, 6 * GIB, headroom=GIB) == 2 * GIB
    assert kv_budget(load, GIB, headroom=GIB) == 0
    monkeypatch.setenv("PAGEWIRE_CPU_KVCACHE_SPACE", "1.5")
    assert kv_budget(load, 64 * GIB, headroom=GIB) == GIB * 3 // 2
    assert kv_budget(WorkerConfig("", kv_cache_memory_bytes=5), GIB, headroom=GIB) == 5
    monkeypatch.setenv("PAGEWIRE_CPU_KVCACHE_SPACE", "much")
    with pytest.raises(LoadError, match="must be a number of GiB"):
        kv_budget(load, GIB, headroom=0)


def test_thread_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_cpus("0-2,5") == {0, 1, 2, 5}
    monkeypatch.setenv("PAGEWIRE_CPU_OMP_THREADS_BIND", "first")
    with pytest.raises(LoadError, match="PAGEWIRE_CPU_OMP_THREADS_BIND='first'"):
        bind_threads(None)
    monkeypatch.setenv("PAGEWIRE_CPU_OMP_THREADS_BIND", "auto")
    assert bind_threads(3) == 3
    assert bind_threads(None) >= 1


def test_workers_of_a_machine_have_processors_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (Parallel(rank=n, size=2, local_rank=n, local_size=2) for n in range(2))
    monkeypatch.setenv("PAGEWIRE_CPU_OMP_THREADS_BIND", "0-31|32-47,63")
    assert bound_cpus(first) == set(range(32)) and bound_cpus(second) == {*range(32, 48), 63}
    assert (default_threads(first), default_threads(second)) == (32, 17)
    monkeypatch.setenv("PAGEWIRE_CPU_OMP_THREADS_BIND", "0-31")
    with pytest.raises(LoadError, match="binds 1 workers, but this machine has 2"):
        bound_cpus(second)
    monkeypatch.delenv("PAGEWIRE_CPU_OMP_THREADS_BIND")
    monkeypatch.setattr(machine, "usable_cpus", lambda: 8)
    monkeypatch.setattr(machine.psutil, "cpu_count", lambda logical: 8)
    assert [default_threads(Parallel(local_size=n)) for n in (1, 2, 3, 9)] == [8, 4, 2, 1]


@pytest.mark.parametrize(("name", "layers"), [("mamba2", 96), ("llama", 192)])
def test_a_model_that_magnifies_rounding_is_served_and_a_wrong_one_is_not(
    name: str, layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many layers, or states, magnify a difference in the last bit; in bfloat16 it is over the usual 4%."""
    fields = SERVED[name].fields | {"num_hidden_layers": layers, "initializer_range": 0.3}
    model = Architecture(name, fields).write(tmp_path)
    differences: list[float] = []
    measure = proof.worst_difference

    def measured(*tensors: Any) -> float:
        differences.append(measure(*tensors))
        return differences[-1]

    monkeypatch.setattr(proof, "worst_difference", measured)
    load_runner(model, dtype="bfloat16")
    assert differences[0] > 0.04
    results = proof.results
    monkeypatch.setattr(proof, "results", lambda *given: [logits.roll(1, 1) for logits in results(*given)])
    with pytest.raises(DisprovenError, match="its logits with paged attention are wrong"):
        load_runner(model, dtype="bfloat16")
