"""Models from GGUF files that are written as llama.cpp's converter would: configuration, weights, tokens."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pagewire.ipc.gguf.file import BLOCKS, is_gguf
from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.workers.checkpoint.gguf import blocks as gguf_blocks
from pagewire.workers.checkpoint.gguf.blocks import BLOCK_TYPES, quantised
from pagewire.workers.checkpoint.gguf.reader import GgufCheckpoint
from pagewire.workers.checkpoint.headers import read_headers
from pagewire.workers.errors import LoadError
from pagewire.workers.module.configuration import load_config
from tests.gguf_headers import content
from tests.workers.architectures import (
    EXPERTS,
    GEMMA4,
    GEMMA4_LARGE,
    GPT2_SIZES,
    GROUPED,
    LATER_EXPERTS,
    LLAMA4,
    MAMBA,
    MLA,
    NEMOTRON_H,
    NUM_GROUPS,
    SERVED,
    VOCAB_SIZE,
    WINDOWED,
    Architecture,
)
from tests.workers.driver import load_runner
from tests.workers.gguf_files import multiplied, permuted, write_gguf
from tests.workers.parity import make_prompts, our_tokens, transformers_tokens

ROUTED = EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": []}
WINDOW = GROUPED | {"sliding_window": 7}
GEMMA_SCALE = {"query_pre_attn_scalar": 16, "layer_types": WINDOWED}
LAYER_NORM = {"attention.layer_norm_epsilon": 1e-5}
BIASED = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}

MLA_FIELDS = {
    "attention.key_length": 24,
    "attention.value_length": 16,
    "attention.head_count_kv": 1,
    "attention.key_length_mla": 24,
    "attention.value_length_mla": 12,
}
GEMMA3N = {name: value for name, value in GEMMA4.items() if name != "global_head_dim"} | {
    "intermediate_size": 96,
    "laurel_rank": 8,
    "activation_sparsity_pattern": [0.95, *[0.0] * 4],
}
SLIDES = {"attention.sliding_window_pattern": [kind == "sliding_attention" for kind in GEMMA4["layer_types"]]}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 12,
    "shared_expert_intermediate_size": 32,
    "layer_types": ["linear_attention", "full_attention"],
}
ROTATES = {"rope.dimension_count": 4, "full_attention_interval": 2}
SSM_OF_LINEAR = {"ssm.inner_size": 64}
NO_ATTENTION = {"feed_forward_length": 0, "attention.head_count": 0}
SSM_OF_MAMBA = NO_ATTENTION | {
    "attention.layer_norm_rms_epsilon": 1e-5,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 128,
    "ssm.state_size": 4,
    "ssm.time_step_rank": 4,
}
SSM = {
    "attention.layer_norm_rms_epsilon": 1e-5,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 128,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 8,
}
NORMED_SSM = SSM | {"ssm.group_count": NUM_GROUPS}
MULTIPLIED = {
    "mamba_norm_before_gate": False,
    "embedding_multiplier": 2.5,
    "lm_head_multiplier": 0.3,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 1.3,
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.8,
    "mlp_multipliers": [0.6, 1.4],
    "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9],
}
GRANITE = {
    "rms_norm_eps": 1e-5,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}
NOT_ROTATED = {"rope.scaling.finetuned": False, "attention.head_count_kv": [0, 2]}
DENSE_NEMOTRON = {
    "moe_shared_expert_intermediate_size": 7688,  # the default: no layer has experts
    "num_hidden_layers": 3,
    "layers_block_type": ["linear_attention", "mlp", "full_attention"],
}
NEMOTRON_3 = {
    "num_hidden_layers": 3,
    "layers_block_type": ["linear_attention", "moe", "full_attention"],
    "moe_latent_size": 24,
    "routed_scaling_factor": 2.5,
}
NEMOTRON = {"block_count": 3, "attention.head_count_kv": [0, 0, 2]}
SCOUT = {  # what the file does not say
    "num_hidden_layers": 4,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "floor_scale": 8192,
    "attn_scale": 0.1,
}
FOLDED = {"falcon-h1": MULTIPLIED, "falcon-h1 with norms": MULTIPLIED}
"""Settings that the converter multiplies weights with."""
HEADS_OF_TWO_SIZES = {"attention.key_length": 32, "attention.key_length_swa": 16}

# llama.cpp's name, the model in transformers, and metadata that its configuration does not name.
MODELS: dict[str, tuple[str, Architecture, dict[str, Any]]] = {
    "llama": ("llama", Architecture("llama", GROUPED), {}),
    "llama with biases": ("llama", Architecture("llama", GROUPED | BIASED), {}),
    "mixtral": (
        "llama",
        Architecture("mixtral", GROUPED | {"num_local_experts": 4, "sliding_window": None}),
        {},
    ),
    "qwen2": ("qwen2", Architecture("qwen2", GROUPED), {}),
    "qwen3": ("qwen3", Architecture("qwen3", GROUPED), {}),
    "qwen2moe": (
        "qwen2moe",
        Architecture("qwen2_moe", GROUPED | ROUTED | {"shared_expert_intermediate_size": 32}),
        {},
    ),
    "qwen3moe": ("qwen3moe", Architecture("qwen3_moe", GROUPED | ROUTED | {"norm_topk_prob": True}), {}),
    "gemma": ("gemma", Architecture("gemma", GROUPED), {}),
    "gemma2": ("gemma2", Architecture("gemma2", WINDOW | GEMMA_SCALE), {}),
    "gemma3": (
        "gemma3",
        Architecture("gemma3_text", WINDOW | GEMMA_SCALE),
        {"attention.sliding_window_pattern": 2},
    ),
    "phi3": (
        "phi3",
        Architecture("phi3", WINDOW | {"original_max_position_embeddings": 128}),
        {"rope.dimension_count": 16},
    ),
    "starcoder2": ("starcoder2", Architecture("starcoder2", WINDOW), LAYER_NORM),
    "stablelm": (
        "stablelm",
        Architecture("stablelm", GROUPED | {"use_qkv_bias": True}),
        LAYER_NORM | {"rope.dimension_count": 4, "use_parallel_residual": False},
    ),
    "glm4": ("glm4", Architecture("glm4", GROUPED | {"attention_bias": True}), {"rope.dimension_count": 8}),
    "glm4moe": (
        "glm4moe",
        Architecture("glm4_moe", GROUPED | LATER_EXPERTS | {"use_qk_norm": True}),
        {"rope.dimension_count": 8},
    ),
    "deepseek 3": (
        "deepseek2",
        Architecture("deepseek_v3", MLA | LATER_EXPERTS),
        MLA_FIELDS | {"expert_gating_func": 2},
    ),
    "deepseek 2": (
        "deepseek2",
        Architecture("deepseek_v2", MLA | LATER_EXPERTS | {"q_lora_rank": None}),
        MLA_FIELDS,
    ),
    "gpt-oss": (
        "gpt-oss",
        Architecture("gpt_oss", WINDOW | {"num_local_experts": 4, "layer_types": WINDOWED}),
        {"expert_feed_forward_length": 100},
    ),
    "gemma3n": (
        "gemma3n",
        Architecture("gemma3n_text", GEMMA3N),
        SLIDES
        | {"activation_sparsity_scale": [1.6448536, *[-math.inf] * 4], "feed_forward_length": [96] * 5},
    ),
    "gemma4": ("gemma4", Architecture("gemma4_text", GEMMA4), SLIDES | HEADS_OF_TWO_SIZES),
    "gemma4 with experts": (
        "gemma4",
        Architecture("gemma4_text", GEMMA4_LARGE),
        HEADS_OF_TWO_SIZES
        | {"attention.head_count_kv": [2, 1], "attention.sliding_window_pattern": [True, False]}
        | {"expert_used_count": 2},
    ),
    "qwen3next": (
        "qwen3next",
        Architecture("qwen3_next", GROUPED | ROUTED | LINEAR | {"norm_topk_prob": True}),
        {"rope.dimension_count": 4, "full_attention_interval": 2, "ssm.inner_size": 48},
    ),
    "lfm2": (
        "lfm2",
        Architecture(
            "lfm2", GROUPED | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
        ),
        {"attention.head_count_kv": [0, 2], "attention.layer_norm_rms_epsilon": 1e-5},
    ),
    "lfm2moe": (
        "lfm2moe",
        Architecture("lfm2_moe", SERVED["lfm2_moe"].fields),
        {
            "attention.head_count_kv": [0, 2],
            "attention.layer_norm_rms_epsilon": 1e-5,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
        },
    ),
    "qwen35": ("qwen35", SERVED["qwen3_5_text"], ROTATES | SSM_OF_LINEAR),
    "qwen35moe": ("qwen35moe", SERVED["qwen3_5_moe_text"], ROTATES | SSM_OF_LINEAR),
    "mamba": ("mamba", Architecture("mamba", MAMBA | {"intermediate_size": 128}), SSM_OF_MAMBA),
    "falcon mamba": (
        "mamba",
        Architecture("falcon_mamba", MAMBA | {"intermediate_size": 128}),
        SSM_OF_MAMBA | {"ssm.dt_b_c_rms": True},
    ),
    "mamba2": ("mamba2", SERVED["mamba2"], NO_ATTENTION | NORMED_SSM),
    "falcon-h1": ("falcon-h1", Architecture("falcon_h1", SERVED["falcon_h1"].fields | MULTIPLIED), SSM),
    "falcon-h1 with norms": (
        "falcon-h1",
        Architecture("falcon_h1", SERVED["falcon_h1"].fields | MULTIPLIED | {"mamba_rms_norm": True}),
        SSM,
    ),
    "bamba": (
        "granitehybrid",
        SERVED["bamba"],
        NORMED_SSM | {"rope.scaling.finetuned": True, "attention.head_count_kv": [0, 2]},
    ),
    "granitehybrid": (
        "granitehybrid",
        Architecture("granitemoehybrid", SERVED["granitemoehybrid"].fields | GRANITE),
        NORMED_SSM | NOT_ROTATED | {"expert_shared_feed_forward_length": 32},
    ),
    "granitehybrid without experts": (
        "granitehybrid",
        Architecture(
            "granitemoehybrid", SERVED["granitemoehybrid"].fields | GRANITE | {"num_local_experts": 0}
        ),
        NORMED_SSM | NOT_ROTATED | {"feed_forward_length": 32},
    ),
    "jamba": (
        "jamba",
        SERVED["jamba"],
        {
            "attention.head_count_kv": [0, 2],
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 128,
            "ssm.state_size": 4,
            "ssm.time_step_rank": 8,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        Architecture("nemotron_h", GROUPED | NEMOTRON_H | DENSE_NEMOTRON),
        SSM | NEMOTRON | {"feed_forward_length": [0, 100, 0]},
    ),
    "nemotron_h_moe": (
        "nemotron_h_moe",
        Architecture("nemotron_h", SERVED["nemotron_h"].fields | NEMOTRON_3),
        SSM | NEMOTRON | {"feed_forward_length": [0, 36, 0]},
    ),
    "llama4": (
        "llama4",
        Architecture("llama4_text", LLAMA4 | SCOUT),
        {"feed_forward_length": 96, "expert_feed_forward_length": 100},
    ),
    "gpt2": (
        "gpt2",
        Architecture("gpt2", GPT2_SIZES | {"n_inner": 256}),
        LAYER_NORM | {"feed_forward_length": 256},
    ),
}
FREE = {  # what a GGUF file does not say, since no result depends on it
    *(
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "initializer_range",
        "dtype",
        "hidden_act",
        "hidden_activation",
    ),
    *("partial_rotary_factor", "intermediate_size", "num_key_value_heads", "head_dim", "rope_theta"),
}


UNUSED = {  # by the model, or by all but its first initialisation, or sizes that its weights show
    *("num_attention_heads", "max_position_embeddings", "mamba_chunk_size", "chunk_size", "dtype"),
    *("time_step_min", "time_step_max", "initializer_range", "intermediate_size"),
}


def configuration(path: Path, **overrides: Any) -> Any:
    """The worker's configuration of a GGUF file."""
    return load_config(WorkerConfig(str(path), hf_overrides=overrides))


@pytest.mark.parametrize("name", MODELS)
def test_configuration_and_weights_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    arch, model, fields = MODELS[name]
    folder = model.write(tmp_path / "checkpoint")
    path = write_gguf(tmp_path / "model.gguf", folder, model.config(), arch, fields=fields)
    config = configuration(path)
    ours, theirs = config.to_dict(), model.config().to_dict()
    assert theirs.keys() - ours.keys() - FREE - UNUSED == set()
    folded = FOLDED.get(name, {})
    for key in theirs.keys() - FREE - UNUSED - (folded.keys() - {"mamba_norm_before_gate"}):
        expected = pytest.approx(theirs[key], rel=1e-6) if isinstance(theirs[key], float) else theirs[key]
        assert ours[key] == expected, key
    for key in FREE & theirs.keys() - UNUSED:
        assert theirs[key] in (None, ours[key]) or key.endswith("_id") or name == "gpt2", key
    checkpoint = GgufCheckpoint(path, config)
    expected_weights = load_file(folder / "model.safetensors")
    assert set(checkpoint.names) == expected_weights.keys()
    for weight, expected in expected_weights.items():
        assert checkpoint.on_meta(weight).shape == expected.shape
        if folded:
            multiple = multiplied(weight, expected.numpy(), model.config())
            expected = torch.from_numpy(np.ascontiguousarray(multiple, np.float32))
        torch.testing.assert_close(checkpoint.read(weight), expected, rtol=1e-6, atol=1e-7)


STATES = ["qwen35", "lfm2moe", "mamba2", "falcon-h1", "granitehybrid", "jamba", "nemotron_h_moe"]
"""One of each kind: weights and settings of all are compared above."""


@pytest.mark.parametrize("name", ["qwen2moe", "gpt2", "gpt-oss", "gemma4 with experts", "llama4", *STATES])
def test_tokens_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    arch, model, fields = MODELS[name]
    folder = model.write(tmp_path / "checkpoint")
    path = write_gguf(tmp_path / "model.gguf", folder, model.config(), arch, fields=fields)
    prompts = make_prompts(VOCAB_SIZE, (19, 5))
    assert our_tokens(path, prompts, 6) == transformers_tokens(folder, prompts, 6)


ROPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "linear": ("llama", {"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 4.0}),
    "yarn": (
        "llama",
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {"type": "yarn", "factor": 4.0, "original_context_length": 32},
    ),
    "gpt-oss": (
        "gpt-oss",
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False},
        {"type": "yarn", "factor": 4.0, "original_context_length": 32},
    ),
    "deepseek": (
        "deepseek 3",
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "mscale": 0.7,
            "mscale_all_dim": 0.7,
        },
        {"type": "yarn", "factor": 4.0, "original_context_length": 32, "yarn_log_multiplier": 0.07},
    ),
    "llama4": (
        "llama4",
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        {},
    ),
    "gemma3": ("gemma3", {"rope_type": "linear", "factor": 8.0}, {"type": "linear", "factor": 8.0}),
    "llama3": (
        "llama",
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        {},
    ),
}


@pytest.mark.parametrize("name", ROPES)
def test_rotary_frequencies(name: str, tmp_path: Path) -> None:
    arch, rope, fields = ROPES[name]
    model = MODELS[arch][1]
    theta = {"rope_theta": 500000.0}
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    both = {"full_attention": rope | theta, "sliding_attention": plain}
    parameters = both if arch == "gemma3" else rope | theta
    model = Architecture(model.name, model.fields | {"rope_parameters": parameters})
    folder = model.write(tmp_path / "checkpoint")

    def factors(writer: Any) -> None:
        if rope["rope_type"] == "llama3":
            exact = 500000.0 ** -(np.arange(0, 16, 2) / 16)
            values = (exact / rotary(model.config()).inv_freq.numpy()).astype(np.float32)
            writer.add_tensor("rope_freqs.weight", values)

    scaling = {f"rope.scaling.{key}": value for key, value in fields.items()} | MODELS[arch][2]
    own = MODELS[arch][0]
    path = write_gguf(tmp_path / "model.gguf", folder, model.config(), own, fields=scaling, extra=factors)
    ours, theirs = rotary(configuration(path)), rotary(model.config())
    if "mscale_all_dim" in rope:  # which changes attention's scale, not the angles
        assert ours.config.rope_parameters["mscale_all_dim"] == rope["mscale_all_dim"]
    frequencies = [key for key, _ in theirs.named_buffers() if "original" not in key]
    assert frequencies
    for key in frequencies:
        torch.testing.assert_close(getattr(ours, key), getattr(theirs, key), rtol=1e-6, atol=0)
        scale = key.replace("inv_freq", "attention_scaling")
        assert getattr(ours, scale) == pytest.approx(getattr(theirs, scale))


def rotary(config: Any) -> Any:
    """The rotary embedding of a configuration's model."""
    from transformers import AutoModel

    with torch.device("meta"):
        model = AutoModel.from_config(config)
    return type(model.rotary_emb)(config)


# Where a block of each type has numbers of float16.
HALVES = {
    **dict.fromkeys(("Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "IQ1_M": (),
    "NVFP4": (),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "MXFP4": (),
}
ROUNDED = {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"}
ROUNDED |= {kind for kind in BLOCK_TYPES if kind.startswith(("IQ1", "IQ2", "IQ3"))}


def random_blocks(kind: str, shape: tuple[int, int]) -> np.ndarray:
    """Blocks of a type, uint8 [*shape, bytes], whose scales are like those of weights."""
    draw = np.random.default_rng(0)
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = draw.integers(0, 256, (*shape, size), dtype=np.uint8)
    for start in HALVES[kind]:
        scales = draw.normal(0, 0.01, (*shape, 1)).astype(np.float16)
        blocks[..., start : start + 2] = scales.view(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = draw.integers(100, 150, shape)
    elif kind == "NVFP4":
        blocks[..., :4] &= 127  # no scale is negative
    elif kind == "IQ1_M":  # the highest four bits of four words are the scale
        scales = draw.normal(0, 0.01, shape).astype(np.float16).view(np.uint16)
        for word in range(4):
            blocks[..., 49 + 2 * word] &= 15
            blocks[..., 49 + 2 * word] |= ((scales >> 4 * word & 15) << 4).astype(np.uint8)
    return blocks


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_blocks_are_the_numbers_that_ggml_reads(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = random_blocks(kind, (7, 3))
    expected = gguf.quants.dequantize(blocks.reshape(7, -1), gguf.GGMLQuantizationType[kind])
    several = 2 * blocks[0].size  # chunks, the last a part of one
    monkeypatch.setattr(gguf_blocks, "CHUNK_BYTES", several)
    weight = quantised(torch.from_numpy(blocks), kind, torch.float32)
    assert weight.shape == expected.shape
    error = np.linalg.norm(weight.dense().numpy() - expected) / np.linalg.norm(expected)
    assert 0 < error < 5e-4 if kind in ROUNDED else error == 0


def test_the_block_types_are_those_of_ggml() -> None:
    known = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {number: known[number] for number in BLOCKS} == BLOCKS


def test_scales_that_are_no_numbers_are_refused() -> None:
    blocks = torch.full((1, 1, 18), 255, dtype=torch.uint8)
    with pytest.raises(LoadError, match="a tensor of type Q4_0 has scales that are no numbers of float16"):
        quantised(blocks, "Q4_0", torch.float32)


def mixed(name: str, data: np.ndarray) -> str:
    """A type for each tensor: matrices are quantised, some of them in other ways."""
    if data.ndim == 1 or data.shape[-1] % 32:
        return "F32"
    kinds = {
        "attn_k": "Q8_0",
        "attn_v": "Q5_1",
        "output": "Q5_0",
        "token_embd": "F16",
        "ffn_gate_inp": "BF16",
    }
    return next((kind for part, kind in kinds.items() if part in name), "Q4_0" if "gate" in name else "Q4_1")


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_quantised_matrices_are_weights_of_integers(name: str, tmp_path: Path) -> None:
    """Rows of queries and keys, and matrices of a stack of experts, are taken apart as they are stored."""
    arch, model, _ = MODELS[name]
    model = Architecture(model.name, model.fields | {"intermediate_size": 96})
    folder = model.write(tmp_path / "checkpoint")
    path = write_gguf(tmp_path / "model.gguf", folder, model.config(), arch, kind=mixed)
    checkpoint = GgufCheckpoint(path, configuration(path))
    schemes = set()
    for key, values in load_file(folder / "model.safetensors").items():
        if values.dim() == 1:
            continue
        weight = checkpoint.weight(key, torch.float32)
        assert weight.dtype == torch.float32
        schemes.add(weight.scheme.name)
        expected = roundtrip(key, values.numpy(), model.config(), name)
        assert np.array_equal(weight.dense().numpy(), expected), key
        assert np.array_equal(checkpoint.read(key).float().numpy(), expected), key
    assert schemes == {"dense", "int4/32-8", "int4/32-0", "int8/32-128", "int6/32-0", "int6/32-16"}
    checkpoint.let_go()
    assert np.array_equal(weight.dense().numpy(), expected)
    runner, ready = load_runner(path)
    assert (ready.dtype, runner.model.vocab_size) == ("bfloat16", VOCAB_SIZE)


def test_experts_of_two_tensors_are_quantised_one_by_one(tmp_path: Path) -> None:
    """Rows of gate and up take turns; where their types differ, they are held as floats."""
    arch, model, fields = MODELS["gpt-oss"]
    model = Architecture(model.name, model.fields | {"intermediate_size": 96})
    folder = model.write(tmp_path / "checkpoint")
    exact = load_file(folder / "model.safetensors")
    for second, scheme in (("MXFP4", "table4/32"), ("Q8_0", "dense")):
        kinds = {
            "ffn_gate_exps.weight": "MXFP4",
            "ffn_up_exps.weight": second,
            "ffn_down_exps.weight": "Q8_0",
        }

        def kind(name: str, _: np.ndarray, kinds: dict[str, str] = kinds) -> str:
            return next((own for part, own in kinds.items() if part in name), "F32")

        path = write_gguf(
            tmp_path / f"{second}.gguf",
            folder,
            model.config(),
            arch,
            kind=kind,
            fields=fields | {"expert_feed_forward_length": 96},
        )
        checkpoint = GgufCheckpoint(path, configuration(path))
        name = "model.layers.1.mlp.experts.gate_up_proj"
        stack = list(checkpoint.stacked(name, torch.float32, transposed=True))
        assert len(stack) == 4 and all(weight.scheme.name.startswith(scheme) for weight in stack)
        dense = torch.stack([weight.dense().T for weight in stack])
        assert torch.equal(checkpoint.read(name), dense)
        rows = exact[name].swapaxes(1, 2).numpy()
        for part, own in enumerate(("MXFP4", second)):
            one = gguf.GGMLQuantizationType[own]
            expected = gguf.quants.dequantize(gguf.quants.quantize(rows[:, part::2].copy(), one), one)
            assert np.array_equal(dense.swapaxes(1, 2)[:, part::2].numpy(), expected)
    assert load_runner(path)[1].dtype == "bfloat16"
    headers = {header.name: header for header in read_headers(path).tensors}
    assert headers[name].shape == (4, 192, 64) and headers[name].num_bytes == 4 * 96 * 2 * (17 + 34)


def test_quantised_heads_of_linear_attention_are_put_back_in_order(tmp_path: Path) -> None:
    """Rows, and groups of columns, as they are stored."""
    sizes = {"linear_value_head_dim": 32, "linear_num_value_heads": 8, "linear_num_key_heads": 2}
    model = Architecture("qwen3_5_text", SERVED["qwen3_5_text"].fields | sizes)
    folder = model.write(tmp_path / "checkpoint")
    kinds = {"ssm_out": "Q4_K", "attn_qkv": "Q4_0", "attn_gate": "Q8_0"}

    def kind(name: str, _: np.ndarray) -> str:
        return next((own for part, own in kinds.items() if f"{part}.weight" in name), "F32")

    writable = gguf.quants.quantize

    def quantize(data: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
        return k_quantised(data) if kind.name == "Q4_K" else writable(data, kind)

    fields = ROTATES | {"ssm.inner_size": 256}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.quants, "quantize", quantize)
        path = write_gguf(tmp_path / "model.gguf", folder, model.config(), "qwen35", kind=kind, fields=fields)
    checkpoint = GgufCheckpoint(path, configuration(path))
    exact = load_file(folder / "model.safetensors")
    for part, scheme in (
        ("in_proj_qkv", "int4/32-8"),
        ("in_proj_z", "int8/32-128"),
        ("out_proj", "int4/32-0"),
    ):
        name = f"model.layers.0.linear_attn.{part}.weight"
        weight = checkpoint.weight(name, torch.float32)
        assert weight.scheme.name == scheme and torch.equal(weight.dense(), checkpoint.read(name))
        assert (weight.dense() - exact[name]).norm() / exact[name].norm() < 0.11


def k_quantised(data: np.ndarray) -> np.ndarray:
    """Blocks of type Q4_K, which the package `gguf` only reads. All scales of 6 bits are one, as are minimums."""
    rows = data.reshape(*data.shape[:-1], -1, 8, 32)
    low = np.maximum(-rows.min(axis=(-1, -2), keepdims=True), 1e-6)
    scale = (rows.max(axis=(-1, -2), keepdims=True) + low) / 15
    codes = np.clip(np.rint((rows + low) / scale), 0, 15).astype(np.uint8)
    halves = np.concatenate([part[..., 0] for part in (scale, low)], axis=-1).astype(np.float16)
    ones = np.array([1] * 8 + [0x11] * 4, np.uint8)
    packed = codes[..., 0::2, :] | codes[..., 1::2, :] << 4
    blocks = [
        halves.reshape(*codes.shape[:-2], 2).view(np.uint8),
        np.broadcast_to(ones, (*codes.shape[:-2], 12)),
        packed.reshape(*codes.shape[:-2], 128),
    ]
    return np.concatenate(blocks, axis=-1).reshape(*data.shape[:-1], -1)


def test_keys_and_values_of_all_heads_become_one_matrix(tmp_path: Path) -> None:
    arch, model, fields = MODELS["deepseek 3"]
    sizes = {"kv_lora_rank": 32, "qk_nope_head_dim": 32}
    model = Architecture(model.name, model.fields | sizes)
    folder = model.write(tmp_path / "checkpoint")
    fields = fields | {
        "attention.key_length": 40,
        "attention.key_length_mla": 40,
        "attention.value_length": 32,
    }

    def kind(name: str, _: np.ndarray) -> str:
        return "Q8_0" if "attn_k_b" in name or "attn_v_b" in name else "F32"

    path = write_gguf(tmp_path / "model.gguf", folder, model.config(), arch, kind=kind, fields=fields)
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    weight = GgufCheckpoint(path, configuration(path)).weight(name, torch.float32)
    exact = load_file(folder / "model.safetensors")[name]
    assert weight.scheme.name == "int8/32-128" and weight.shape == exact.shape
    assert (weight.dense() - exact).norm() / exact.norm() < 0.01
    (header,) = (header for header in read_headers(path).tensors if header.name == name)
    assert (header.shape, header.dtype) == (tuple(exact.shape), "Q8_0")


def test_layers_that_draft_are_left_out(tmp_path: Path) -> None:
    arch, model, fields = MODELS["glm4moe"]
    folder = model.write(tmp_path / "checkpoint")

    def more(writer: Any) -> None:
        writer.add_uint32("glm4moe.nextn_predict_layers", 1)
        for name in ("attn_norm", "nextn.eh_proj", "nextn.enorm"):
            writer.add_tensor(f"blk.2.{name}.weight", np.ones((4, 64), np.float32))

    fields = fields | {"block_count": 3}
    path = write_gguf(tmp_path / "model.gguf", folder, model.config(), arch, fields=fields, extra=more)
    config = configuration(path)
    assert config.num_hidden_layers == 2
    assert set(GgufCheckpoint(path, config).names) == load_file(folder / "model.safetensors").keys()


def roundtrip(key: str, values: np.ndarray, config: Any, name: str) -> np.ndarray:
    """A weight's numbers after it was stored and read by ggml's own functions."""
    short = {
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "embed_tokens": "token_embd",
        "lm_head": "output",
        "o_proj": "attn_output",
        "gate_proj": "ffn_gate",
        "w1": "ffn_gate",
        "block_sparse_moe.gate": "ffn_gate_inp",
    }
    stored = next((part for word, part in short.items() if word in key), "ffn_up")
    kind = gguf.GGMLQuantizationType[mixed(stored, values)]
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(stored)
    order = np.arange(len(values)) if heads is None else permuted(np.arange(len(values)), heads)
    numbers = gguf.quants.dequantize(gguf.quants.quantize(values[order], kind), kind)
    return numbers.reshape(values.shape)[np.argsort(order)]


def test_split_files(tmp_path: Path) -> None:
    arch, model, _ = MODELS["llama"]
    folder = model.write(tmp_path / "checkpoint")
    path = write_gguf(tmp_path / "model.gguf", folder, model.config(), arch, split=8)
    assert len(list(tmp_path.glob("*.gguf"))) == 3 and is_gguf(path)
    checkpoint = GgufCheckpoint(path, configuration(path))
    for name, expected in load_file(folder / "model.safetensors").items():
        torch.testing.assert_close(checkpoint.read(name), expected)


def test_what_is_refused(tmp_path: Path, llama: Path) -> None:
    arch, model, _ = MODELS["llama"]
    path = write_gguf(tmp_path / "model.gguf", llama, model.config(), arch)
    config = configuration(path)
    whole = path.read_bytes()
    for change, words in (
        (whole[:-5000], "does not lie within the file; it may be cut off"),
        (whole.replace(b"blk.1.ffn_up", b"blk.1.ffn_xx"), "has tensors that llama has no use for: 'ffn_xx'"),
        (b"no model", "does not begin with the letters GGUF"),
        (
            content({}, [("token_embd.weight", (2, 256), 15, bytes(584))]),
            "is of type Q8_K; .* types F32, F16, BF16",
        ),
        (
            content({}, [("output_norm.weight", (32,), 2, bytes(18))]),
            "is of type Q4_0; .* vectors of F32, F16, BF16",
        ),
        (content({}, [("blk.0.ffn_up_exps.weight", (2, 4), 0, bytes(32))]), r"is of shape \(2, 4\)"),
        (content({}, [("blk.0.ffn_up.weight", (2, 2, 4), 0, bytes(64))]), r"is of shape \(2, 2, 4\)"),
    ):
        path.write_bytes(change)
        with pytest.raises(LoadError, match=words):
            GgufCheckpoint(path, config)
    path.write_bytes(whole.replace(b"blk.1.ffn_up", b"blk.9.ffn_up"))
    with pytest.raises(LoadError, match=r"lacks 1 weights of llama: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_runner(path)
    path.write_bytes(whole)
    with pytest.raises(LoadError, match=r"the metadata of .*model\.gguf cannot be used: 'nonsense'"):
        configuration(path, model_type="nonsense")
    with pytest.raises(LoadError, match="opt is not served from GGUF files, but llama, mixtral"):
        GgufCheckpoint(path, Architecture("opt", {"ffn_dim": 96}).config())
