"""A GGUF file's metadata as the configuration files of a Hugging Face model folder.

The keys are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; what no key says is what llama.cpp
takes for granted of the architecture. The worker's `checkpoint/gguf_names.py` has the names of the tensors.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from typing import Any

from pagewire.ipc.counts import MAX_LAYERS
from pagewire.ipc.gguf import hybrids
from pagewire.ipc.gguf.fields import (
    NUMBER,
    Fields,
    Values,
    expert_fields,
    experts,
    head_size,
    partial_rotary,
    read_floats,
    rms,
    shape_of,
)
from pagewire.ipc.gguf.file import GgufError, GgufFile

CONTROL, USER_DEFINED = 3, 4  # types of tokens
END_OF_TURN = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "<|end_of_text|>",
        "<end_of_utterance>",
    }
)
"""Tokens that end an answer wherever a vocabulary marks them as special; llama.cpp stops at them, too."""

SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
VARYING = ("gemma3n", "gemma4", "granitehybrid", "jamba", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe")
"""Architectures whose layers may differ in heads and in the size of their MLP."""
WITHOUT_ATTENTION = ("mamba", "mamba2")
"""Architectures without attention, positions, and layers between states."""
GROUPED_EXPERTS = {256: (8, 4), 160: (8, 3)}
"""Groups of experts and how many a token gets, of DeepSeek 3 and 2, by their experts: older files do not say it."""
SIGMOID = 2  # expert_gating_func
MAVERICK_EXPERTS = 128  # of the Llama 4 whose queries and keys have no norm


def gguf_model_config(file: GgufFile) -> Values:
    """The content of `config.json`: the model's type, sizes and settings, and the dtype to run it in.

    Raises:
        GgufError: the architecture is not served, or the metadata lacks a value.
    """
    served = ARCHITECTURES.get(file.architecture)
    if served is None:
        raise GgufError(
            f"{file.path}: GGUF files of the architecture {file.architecture!r} are not served, but of "
            f"{', '.join(sorted(ARCHITECTURES))}; the model's safetensors checkpoint may be"
        )
    own, shared = served(file), common(file)
    if "rope_parameters" in own:  # which say what these do
        shared.pop("rope_scaling", None)
    return shared | own


def generation_config(file: GgufFile) -> Values:
    """The content of `generation_config.json`: all tokens that end an answer, and recommended sampling parameters.

    Raises:
        GgufError: a value is of a wrong type.
    """
    config: Values = {"eos_token_id": end_ids(file)} if end_ids(file) else {}
    for key, name in SAMPLING.items():
        value = file.get(f"general.sampling.{key}", NUMBER)
        if value is not None:
            config[name] = value
    return config


def end_ids(file: GgufFile) -> list[int]:
    """The ids of all tokens that end an answer, the main one first."""
    names = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    ids = [token_id for name in names if (token_id := file.get(name, int)) is not None]
    tokens: list[str] = file.get("tokenizer.ggml.tokens", list, [])
    kinds = file.get("tokenizer.ggml.token_type", array, ())
    ids += [
        token_id
        for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in (CONTROL, USER_DEFINED) and token in END_OF_TURN
    ]
    return list(dict.fromkeys(ids))


def common(file: GgufFile) -> Values:
    """The settings that all architectures have."""
    fields = Fields(file)
    if fields.whole("block_count") > MAX_LAYERS:
        raise GgufError(f"{file.path} claims to have {fields.whole('block_count')} layers")
    drafting = fields.get("nextn_predict_layers", int, 0)  # layers behind the others
    if not 0 <= drafting < fields.whole("block_count"):
        raise GgufError(f"{file.path}: {drafting} of {fields.whole('block_count')} layers draft tokens")
    values = {
        "hidden_size": fields.whole("embedding_length"),
        "num_hidden_layers": fields.whole("block_count") - drafting,
        "vocab_size": shape_of(file, "token_embd.weight", 2)[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": best_dtype(file),
    }
    for name in ("bos", "eos"):
        values[f"{name}_token_id"] = file.get(f"tokenizer.ggml.{name}_token_id", int)
    values["pad_token_id"] = None  # it would only make one row of the embedding zero
    return values if file.architecture in WITHOUT_ATTENTION else values | attention(file, fields)


def attention(file: GgufFile, fields: Fields) -> Values:
    """The settings that all architectures with attention have."""
    heads = fields.whole("attention.head_count")
    size = fields.first if file.architecture in VARYING else fields.whole
    values: Values = {
        "intermediate_size": size("feed_forward_length", 1),
        "num_attention_heads": heads,
        "num_key_value_heads": size("attention.head_count_kv", heads),
        "head_dim": head_size(fields),
        "max_position_embeddings": fields.whole("context_length", 2048),
        "rope_theta": fields.number("rope.freq_base", 10000.0),
    }
    if (scaling := rope_scaling(file, fields)) is not None:
        values["rope_scaling"] = scaling
    return values


def best_dtype(file: GgufFile) -> str:
    """The dtype to run a model in: that of its matrices if they are plain, else bfloat16."""
    types = {info.type for info in file.tensors.values() if len(info.shape) > 1}
    plain = {"F32": "float32", "F16": "float16"}
    return plain.get(types.pop(), "bfloat16") if len(types) == 1 else "bfloat16"


def rope_scaling(file: GgufFile, fields: Fields) -> Values | None:
    """How rotary frequencies are changed, as transformers names it.

    A tensor of factors of the frequencies, as Llama 3.1 has it, is a "longrope" that does not depend on the length.
    """
    length = fields.whole("context_length", 2048)
    original = fields.whole("rope.scaling.original_context_length", length)
    if "rope_freqs.weight" in file.tensors:
        factors = read_floats(file, "rope_freqs.weight")
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": length,
        }
    if "rope_factors_long.weight" in file.tensors:
        scaling = {
            "rope_type": "longrope",
            "short_factor": read_floats(file, "rope_factors_short.weight"),
            "long_factor": read_floats(file, "rope_factors_long.weight"),
            "original_max_position_embeddings": original,
        }
        factor = fields.number("rope.scaling.attn_factor", 0.0)
        return scaling | ({"attention_factor": factor} if factor else {})
    kind = fields.get("rope.scaling.type", str, "none")
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    if kind == "yarn" and factor != 1:
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise GgufError(f"{file.path}: rope.scaling.type {kind!r} is none of none, linear, yarn, longrope")
    return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1 else None


def llama_config(file: GgufFile) -> Values:
    """Llama, Mistral and Mixtral, which share a name in GGUF files. A file with experts is Mixtral."""
    fields = Fields(file)
    if "blk.0.ffn_gate_inp.weight" in file.tensors:
        return (
            {"model_type": "mixtral", "sliding_window": None}
            | rms(fields)
            | experts(fields, "num_local_experts")
        )
    return rms(fields) | {
        "model_type": "llama",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
    }


def llama4(file: GgufFile) -> Values:
    """Llama 4. The file does not say its chunks and which layers rotate nothing: the published models are alike.

    Raises:
        GgufError: a model without chunks.
    """
    fields = Fields(file)
    if fields.get("attention.sliding_window", int) == 0:
        raise GgufError(f"{file.path}: Llama 4 without chunks of keys is not served from GGUF files")
    return (
        rms(fields)
        | experts(fields, "num_local_experts")
        | {
            "model_type": "llama4_text",
            "intermediate_size": fields.whole("expert_feed_forward_length"),
            "intermediate_size_mlp": fields.whole("feed_forward_length"),
            "interleave_moe_layer_step": fields.whole("interleave_moe_layer_step", 1),
            "use_qk_norm": fields.whole("expert_count") != MAVERICK_EXPERTS,
            "attention_chunk_size": 8192,
            "no_rope_layer_interval": 4,
        }
    )


def qwen2(file: GgufFile) -> Values:
    """Qwen 2 and 2.5."""
    return {"model_type": "qwen2", "use_sliding_window": False} | rms(Fields(file))


def qwen3(file: GgufFile) -> Values:
    """Qwen 3."""
    return qwen2(file) | {"model_type": "qwen3", "attention_bias": "blk.0.attn_q.bias" in file.tensors}


def qwen2moe(file: GgufFile) -> Values:
    """Qwen 1.5 and 2 with experts, one of them shared by all tokens."""
    shared = shape_of(file, "blk.0.ffn_gate_shexp.weight", 2)[0]
    return (
        qwen2(file)
        | expert_fields(file)
        | {
            "model_type": "qwen2_moe",
            "shared_expert_intermediate_size": shared,
            "norm_topk_prob": False,
        }
    )


def qwen3moe(file: GgufFile) -> Values:
    """Qwen 3 with experts."""
    return qwen3(file) | expert_fields(file) | {"model_type": "qwen3_moe", "norm_topk_prob": True}


def gemma(file: GgufFile) -> Values:
    """Gemma 1."""
    activation = "gelu_pytorch_tanh"
    return {"model_type": "gemma", "hidden_act": activation, "hidden_activation": activation} | rms(
        Fields(file)
    )


def attention_scale(fields: Fields, largest: int) -> Values:
    """The square of the divisor of attention scores. The model of a family with the most layers has another one."""
    if fields.whole("block_count") == largest:
        return {
            "query_pre_attn_scalar": fields.whole("embedding_length") // fields.whole("attention.head_count")
        }
    return {"query_pre_attn_scalar": head_size(fields)}


def windows(fields: Fields, default: int) -> Values:
    """The sliding window, and which layers have it: all but every n-th."""
    pattern = fields.get("attention.sliding_window_pattern", (int, array), default)
    layers = range(fields.whole("block_count"))
    if isinstance(pattern, array):
        slides = [bool(pattern[layer]) if layer < len(pattern) else False for layer in layers]
    else:
        slides = [pattern < 1 or (layer + 1) % pattern != 0 for layer in layers]
    return {
        "sliding_window": fields.whole("attention.sliding_window", 4096),
        "layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides],
    }


def gemma2(file: GgufFile) -> Values:
    """Gemma 2, whose 27B model has 46 layers."""
    fields = Fields(file)
    return (
        gemma(file)
        | attention_scale(fields, 46)
        | windows(fields, 2)
        | {
            "model_type": "gemma2",
            "attn_logit_softcapping": fields.number("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0),
        }
    )


def gemma3(file: GgufFile) -> Values:
    """Gemma 3, whose 27B model has 62 layers. The layers with a window have rotary frequencies of their own."""
    fields = Fields(file)
    local = {"rope_local_base_freq": fields.number("rope.freq_base_swa", 10000.0)}
    scale = attention_scale(fields, 62)
    return gemma(file) | scale | windows(fields, 6) | local | {"model_type": "gemma3_text"}


def phi3(file: GgufFile) -> Values:
    """Phi 3 and 4. A window as long as the context is none."""
    fields = Fields(file)
    window = fields.get("attention.sliding_window", int, 0)
    values = rms(fields) | {"model_type": "phi3", "sliding_window": window or None}
    values["partial_rotary_factor"] = fields.whole("rope.dimension_count", head_size(fields)) / head_size(
        fields
    )
    original = fields.whole("rope.scaling.original_context_length", fields.whole("context_length", 2048))
    return values | {"original_max_position_embeddings": original}


def starcoder2(file: GgufFile) -> Values:
    """StarCoder 2."""
    fields = Fields(file)
    window = fields.get("attention.sliding_window", int, 0)
    return {
        "model_type": "starcoder2",
        "norm_epsilon": fields.number("attention.layer_norm_epsilon", 1e-5),
        "use_bias": "blk.0.attn_q.bias" in file.tensors,
        "sliding_window": window or None,
    }


def stablelm(file: GgufFile) -> Values:
    """StableLM."""
    fields = Fields(file)
    if "blk.0.attn_q_norm.weight" in file.tensors:
        raise GgufError(f"{file.path}: StableLM with a norm for each head is not served from GGUF files")
    return {
        "model_type": "stablelm",
        "layer_norm_eps": fields.number("attention.layer_norm_epsilon", 1e-5),
        "partial_rotary_factor": fields.whole("rope.dimension_count", head_size(fields)) / head_size(fields),
        "use_qkv_bias": "blk.0.attn_q.bias" in file.tensors,
        "use_parallel_residual": bool(fields.get("use_parallel_residual", bool, False)),
    }


def gpt2(file: GgufFile) -> Values:
    """GPT-2."""
    fields = Fields(file)
    return {
        "model_type": "gpt2",
        "n_positions": fields.whole("context_length"),
        "n_inner": fields.whole("feed_forward_length"),
        "layer_norm_epsilon": fields.number("attention.layer_norm_epsilon", 1e-5),
    }


def glm4(file: GgufFile) -> Values:
    """GLM 4 with dense layers."""
    fields = Fields(file)
    return (
        rms(fields)
        | partial_rotary(fields)
        | {
            "model_type": "glm4",
            "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        }
    )


def later_experts(fields: Fields) -> Values:
    """The experts of the layers behind the first ones, as DeepSeek has them."""
    count = fields.whole("expert_count")
    groups, chosen = GROUPED_EXPERTS.get(count, (1, 1))
    return experts(fields, "n_routed_experts") | {
        "moe_intermediate_size": fields.whole("expert_feed_forward_length"),
        "first_k_dense_replace": fields.get("leading_dense_block_count", int, 0),
        "n_shared_experts": fields.get("expert_shared_count", int, 0),
        "n_group": fields.whole("expert_group_count", groups),
        "topk_group": fields.whole("expert_group_used_count", chosen),
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": bool(fields.get("expert_weights_norm", bool, False)),
    }


def glm4moe(file: GgufFile) -> Values:
    """GLM 4.5 and later ones, with experts."""
    fields = Fields(file)
    return (
        rms(fields)
        | partial_rotary(fields)
        | later_experts(fields)
        | {
            "model_type": "glm4_moe",
            "attention_bias": "blk.0.attn_q.bias" in file.tensors,
            "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        }
    )


def deepseek2(file: GgufFile) -> Values:
    """DeepSeek 2 and 3, and models like them. Newer files hold the keys and values of all heads apart."""
    fields = Fields(file)
    rotated = fields.whole("rope.dimension_count")
    keys = fields.whole("attention.key_length_mla", fields.whole("attention.key_length"))
    is_third = fields.get("expert_gating_func", int, 1) == SIGMOID
    values = (
        rms(fields)
        | later_experts(fields)
        | {
            "model_type": "deepseek_v3" if is_third else "deepseek_v2",
            "q_lora_rank": fields.get("attention.q_lora_rank", int),
            "kv_lora_rank": fields.whole("attention.kv_lora_rank"),
            "qk_rope_head_dim": rotated,
            "qk_nope_head_dim": keys - rotated,
            "v_head_dim": fields.whole("attention.value_length_mla", fields.whole("attention.value_length")),
            "head_dim": rotated,
            "num_key_value_heads": fields.whole("attention.head_count"),
            "attention_bias": False,
        }
    )
    if not is_third:
        values["topk_method"] = "greedy" if values["n_group"] == 1 else "group_limited_greedy"
    scaling = rope_scaling(file, fields)
    if scaling is not None and scaling["rope_type"] == "yarn":
        # Of the published models, both factors are equal, and so angles keep their size.
        scale = round(10 * fields.number("rope.scaling.yarn_log_multiplier", 0.1), 6)
        values["rope_scaling"] = scaling | {"mscale": scale, "mscale_all_dim": scale}
    return values


def gpt_oss(file: GgufFile) -> Values:
    """gpt-oss, where every other layer has a window."""
    fields = Fields(file)
    values = (
        rms(fields)
        | windows(fields, 2)
        | experts(fields, "num_local_experts")
        | {
            "model_type": "gpt_oss",
            "intermediate_size": fields.whole("expert_feed_forward_length"),
            "attention_bias": True,
        }
    )
    scaling = rope_scaling(file, fields)
    return values if scaling is None else values | {"rope_scaling": scaling | {"truncate": False}}


def per_layer_inputs(file: GgufFile, fields: Fields) -> Values:
    """The embeddings that each layer of Gemma 3n and 4 has, and the layers that share keys and values."""
    size = fields.get("embedding_length_per_layer_input", int, 0)
    table = "per_layer_token_embd.weight" if size else "token_embd.weight"
    return {
        "hidden_size_per_layer_input": size,
        "vocab_size_per_layer_input": shape_of(file, table, 2)[0],
        "num_kv_shared_layers": fields.get("attention.shared_kv_layers", int, 0),
    }


def gemma3n(file: GgufFile) -> Values:
    """The language model of Gemma 3n."""
    fields = Fields(file)
    layers = fields.whole("block_count")
    widths = fields.get("feed_forward_length", (int, array))
    # A file holds quantiles of a normal distribution, the configuration their shares.
    quantiles = fields.get("activation_sparsity_scale", array, array("f", [-math.inf] * layers))
    return (
        gemma(file)
        | windows(fields, 5)
        | per_layer_inputs(file, fields)
        | {
            "model_type": "gemma3n_text",
            "intermediate_size": list(widths) if isinstance(widths, array) else [widths] * layers,
            "activation_sparsity_pattern": [
                round((1 + math.erf(x / math.sqrt(2))) / 2, 6) for x in quantiles
            ],
            "altup_num_inputs": fields.whole("altup.num_inputs", 4),
            "altup_active_idx": fields.get("altup.active_idx", int, 0),
            "laurel_rank": shape_of(file, "blk.0.laurel_l.weight", 2)[0],
            "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0),
            "rope_parameters": rotary_of_both(fields),
        }
    )


def rotary_of_both(fields: Fields, **whole: Any) -> Values:
    """The rotary embeddings of layers with a window and of the others. whole: more settings of the latter."""
    bases = fields.number("rope.freq_base", 1e6), fields.number("rope.freq_base_swa", 10000.0)
    return {
        "full_attention": {"rope_type": "default", "rope_theta": bases[0]} | whole,
        "sliding_attention": {"rope_type": "default", "rope_theta": bases[1]},
    }


def gemma4(file: GgufFile) -> Values:
    """The language model of Gemma 4. Layers with a window have heads of another size, perhaps of another number."""
    fields = Fields(file)
    slides = windows(fields, 6)
    kinds = slides["layer_types"]
    kv_heads = fields.get("attention.head_count_kv", (int, array))
    widths = fields.get("feed_forward_length", (int, array))
    size = fields.whole("attention.key_length")
    plain = sum(factor == 1 for factor in read_floats(file, "rope_freqs.weight"))
    values = (
        gemma(file)
        | slides
        | per_layer_inputs(file, fields)
        | {
            "model_type": "gemma4_text",
            "head_dim": fields.whole("attention.key_length_swa", size),
            "global_head_dim": size,
            "final_logit_softcapping": fields.get("final_logit_softcapping", NUMBER),
            "use_double_wide_mlp": isinstance(widths, array) and len(set(widths)) > 1,
            "attention_k_eq_v": any(
                f"blk.{layer}.attn_k.weight" in file.tensors
                and f"blk.{layer}.attn_v.weight" not in file.tensors
                for layer, kind in enumerate(kinds)
            ),
            "enable_moe_block": "blk.0.ffn_gate_inp.weight" in file.tensors,
            "rope_parameters": rotary_of_both(
                fields, rope_type="proportional", partial_rotary_factor=2 * plain / size
            ),
        }
    )
    if isinstance(kv_heads, array) and len(set(kv_heads)) > 1:
        by_kind = dict(zip(kinds, kv_heads, strict=False))
        values["num_key_value_heads"] = by_kind.get("sliding_attention")
        values["num_global_key_value_heads"] = by_kind.get("full_attention")
    if values["enable_moe_block"]:
        values |= {
            "num_experts": fields.whole("expert_count"),
            "top_k_experts": fields.whole("expert_used_count"),
            "moe_intermediate_size": fields.whole("expert_feed_forward_length"),
        }
    return values


ARCHITECTURES: dict[str, Callable[[GgufFile], Values]] = {
    "llama": llama_config,
    "qwen2": qwen2,
    "qwen2moe": qwen2moe,
    "qwen3": qwen3,
    "qwen3moe": qwen3moe,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "phi3": phi3,
    "starcoder2": starcoder2,
    "stablelm": stablelm,
    "gpt2": gpt2,
    "glm4": glm4,
    "glm4moe": glm4moe,
    "deepseek2": deepseek2,
    "gpt-oss": gpt_oss,
    "gemma3n": gemma3n,
    "gemma4": gemma4,
    "llama4": llama4,
    "qwen3next": hybrids.qwen3next,
    "qwen35": hybrids.qwen35,
    "qwen35moe": hybrids.qwen35moe,
    "lfm2": hybrids.lfm2,
    "lfm2moe": hybrids.lfm2moe,
    "mamba": hybrids.mamba,
    "mamba2": hybrids.mamba2,
    "falcon-h1": hybrids.falcon_h1,
    "granitehybrid": hybrids.granitehybrid,
    "jamba": hybrids.jamba,
    "nemotron_h": hybrids.nemotron_h,
    "nemotron_h_moe": hybrids.nemotron_h,
}
"""The settings of an architecture beside the common ones, by llama.cpp's name."""
