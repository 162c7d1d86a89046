"""Writes GGUF files of tiny models as llama.cpp's converter does, with its own package for names and layout."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")

COMMON = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "context_length": "max_position_embeddings",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "leading_dense_block_count": "first_k_dense_replace",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "shortconv.l_cache": "conv_L_cache",
    "moe_latent_size": "moe_latent_size",
    "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
}
"""Fields of the metadata by the names that configurations have for them."""


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys in llama.cpp's order: the two of a rotated pair side by side."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def tensors_of(folder: Path, config: Any, arch: str) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint with llama.cpp's names and values, experts stacked."""
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    stacks: dict[str, dict[int, np.ndarray]] = {}
    found: dict[str, np.ndarray] = {}
    pieces = load_file(folder / "model.safetensors").items()
    for name, values in [piece for whole in pieces for piece in divided(*whole, config)]:
        if match := EXPERT.fullmatch(name):
            prefix, expert, leaf = match.groups()
            stacks.setdefault(f"{prefix}.{leaf}.weight", {})[int(expert)] = values
        else:
            found[name] = values
    found |= {name: np.stack([stack[e] for e in sorted(stack)]) for name, stack in stacks.items()}
    written = {}
    for name, values in found.items():
        if config.model_type == "gpt2" and not name.startswith(("transformer", "lm_head")):
            name = f"transformer.{name}"
        written_name = named(names, name, bool(getattr(config, "num_local_experts", 0)))
        assert written_name is not None, name
        written[written_name] = changed(name, values, config, arch)
    if arch == "gemma4":  # angles that stay 0 have a very large divisor
        size = max(layer["head_dim"] for layer in config.to_dict()["per_layer_config"].values())
        plain = int(size * config.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
        written["rope_freqs.weight"] = np.array([1.0] * plain + [1e30] * (size // 2 - plain), np.float32)
    return written


def divided(name: str, values: np.ndarray, config: Any) -> list[tuple[str, np.ndarray]]:
    """The tensors that llama.cpp's converter makes of a tensor, with names as transformers would give them."""
    if "experts.gate_up_proj" in name and config.model_type == "gpt_oss":  # columns of gate and up take turns
        turned = values.swapaxes(1, 2) if values.ndim == 3 else values
        kinds = [name.replace("gate_up_proj", f"{kind}_proj") for kind in ("gate", "up")]
        return [(kind, np.ascontiguousarray(turned[:, part::2])) for part, kind in enumerate(kinds)]
    if "experts.down_proj" in name and config.model_type == "gpt_oss" and values.ndim == 3:
        return [(name, values.swapaxes(1, 2))]
    if name.endswith("in_proj_qkvz.weight"):
        heads, size = config.linear_num_key_heads, config.linear_key_head_dim
        values_of_head = config.linear_num_value_heads // heads * config.linear_value_head_dim
        ends = np.cumsum([size, size, values_of_head])
        parts = np.split(values.reshape(heads, -1, values.shape[-1]), ends, axis=1)
        flat = [part.reshape(-1, values.shape[-1]) for part in parts]
        kinds = [name.replace("in_proj_qkvz", kind) for kind in ("attn_qkv", "attn_gate")]
        return list(zip(kinds, (np.concatenate(flat[:3]), flat[3]), strict=True))
    if "experts.gate_up_proj" in name and config.model_type == "llama4_text":
        halves = np.split(values.swapaxes(1, 2), 2, axis=1)
        return [
            (name.replace("gate_up", kind), half) for kind, half in zip(("gate", "up"), halves, strict=True)
        ]
    if "experts.down_proj" in name and config.model_type == "llama4_text":
        return [(name, values.swapaxes(1, 2))]
    if name.endswith("input_linear.weight"):  # Granite's
        return [
            (name.replace("input_linear", f"{kind}_linear"), half)
            for kind, half in zip(("gate", "up"), np.split(values, 2, axis=-2), strict=True)
        ]
    if name.endswith("kv_b_proj.weight"):
        size = config.qk_nope_head_dim
        heads = values.reshape(config.num_attention_heads, -1, values.shape[-1])
        keys, rest = heads[:, :size].swapaxes(1, 2), heads[:, size:]
        return [(name.replace("kv_b", "k_b"), keys), (name.replace("kv_b", "v_b"), rest)]
    if match := re.fullmatch(r"model\.(altup_(?:unembed_)?projections)\.(\d)\.weight", name):
        return [(f"model.layers.0.experts.{match[2]}.{match[1]}.weight", values)]  # stacked as experts are
    return [(name, values)]


def named(names: gguf.TensorNameMap, name: str, has_experts: bool) -> str | None:
    """llama.cpp's name of a tensor."""
    layer = re.search(r"\.layers\.(\d+)\.", name)
    number = layer[1] if layer else ""
    if match := re.search(r"(shared_mlp|block_sparse_moe)\.(gate|up|output)_linear\.weight", name):
        part = {"output": "down"}.get(match[2], match[2])
        kind = "_exps" if match[1] == "block_sparse_moe" else "_shexp" if has_experts else ""
        return f"blk.{number}.ffn_{part}{kind}.weight"
    if match := re.search(r"(?:mixer|feed_forward)\.experts\.(gate_proj|up_proj|down_proj|w[123])", name):
        part = {"w1": "gate", "w2": "down", "w3": "up"}.get(match[1], match[1].removesuffix("_proj"))
        return f"blk.{number}.ffn_{part}_exps.weight"
    for word, own in (
        ("e_score_correction_bias", f"blk.{number}.exp_probs_b.bias"),
        ("expert_bias", f"blk.{number}.exp_probs_b.bias"),
        ("attn_qkv", f"blk.{number}.attn_qkv.weight"),
        ("attn_gate", f"blk.{number}.attn_gate.weight"),
        ("dt_bias", f"blk.{number}.ssm_dt.bias"),
        ("A_log", f"blk.{number}.ssm_a"),
        ("mixer.D", f"blk.{number}.ssm_d"),
        ("mamba.D", f"blk.{number}.ssm_d"),
        ("router.scale", f"blk.{number}.ffn_gate_inp.scale"),
        ("per_expert_scale", f"blk.{number}.ffn_down_exps.scale"),
        ("altup_projections", "altup_proj.weight"),
        ("altup_unembed_projections", "altup_unembd_proj.weight"),
    ):
        if word in name:
            return own
    if match := re.search(r"experts\.(gate|up|down)_proj_bias", name):
        return f"blk.{number}.ffn_{match[1]}_exps.bias"
    found: str | None = names.get_name(name, try_suffixes=(".weight", ".bias"))
    is_whole = found is not None and not found.endswith((".weight", ".bias"))
    return f"{found}.weight" if is_whole else found


ROTATED = ("llama", "granitehybrid", "nemotron_h", "nemotron_h_moe")
"""Architectures whose queries and keys the converter permutes; the last three by what they inherit."""


def changed(name: str, values: np.ndarray, config: Any, arch: str) -> np.ndarray:
    """Values as llama.cpp stores them."""
    if arch in ROTATED and "q_proj" in name:
        return permuted(values, config.num_attention_heads)
    if arch in ROTATED and "k_proj" in name:
        return permuted(values, config.num_key_value_heads)
    if arch in ("qwen35", "qwen35moe") and "linear_attn" in name:
        values = with_tiled_heads(name, values.squeeze(1) if values.ndim == 3 else values, config)
    if arch == "falcon-h1":
        values = multiplied(name, values, config)
    if name.endswith("A_log"):
        values = -np.exp(values)
    if is_second_mamba(config) and name.endswith(("A_log", ".D")):
        return values[:, None]
    if is_second_mamba(config) and name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        groups = getattr(config, "n_groups", None) or config.mamba_n_groups
        return values.reshape(groups, -1)
    plus_one = arch in ("gemma", "gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe")
    if plus_one and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return values + 1
    if arch == "gpt2" and re.search(r"(c_attn|c_proj|c_fc)\.weight", name):
        return values.T
    return values if name.endswith("layer_scalar") else values.squeeze()


def is_second_mamba(config: Any) -> bool:
    """True for models with layers of Mamba 2."""
    return config.model_type in ("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h")


def with_tiled_heads(name: str, values: np.ndarray, config: Any) -> np.ndarray:
    """Heads of values of linear attention in turns, as llama.cpp repeats heads of keys."""
    keys, size = config.linear_num_key_heads, config.linear_value_head_dim

    def tiled(rows: np.ndarray, size: int) -> np.ndarray:
        by_head = rows.reshape(keys, -1, size, *rows.shape[1:])
        return by_head.swapaxes(0, 1).reshape(rows.shape)

    if "in_proj_qkv" in name or "conv1d" in name:
        before = 2 * keys * config.linear_key_head_dim
        return np.concatenate((values[:before], tiled(values[before:], size)))
    if "out_proj" in name:
        return tiled(values.T, size).T
    if "in_proj_z" in name:
        return tiled(values, size)
    return values if name.endswith("norm.weight") else tiled(values, 1)


def multiplied(name: str, values: np.ndarray, config: Any) -> np.ndarray:
    """Weights of Falcon-H1 with the multipliers of their inputs and outputs."""
    if "mamba.in_proj" in name:
        inner, state = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
        sizes = [inner, inner, state, state, config.mamba_n_heads]
        rows = np.repeat(config.ssm_multipliers, sizes) * config.ssm_in_multiplier
        return values * rows[:, None]
    factors = {
        "down_proj": config.mlp_multipliers[1],
        "gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * config.attention_in_multiplier,
        "q_proj": config.attention_in_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "mamba.out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    return values * next((factor for part, factor in factors.items() if part in name), 1.0)


def write_gguf(
    path: Path,
    folder: Path,
    config: Any,
    arch: str,
    *,
    kind: Callable[[str, np.ndarray], str] = lambda *_: "F32",
    extra: Callable[[gguf.GGUFWriter], None] = lambda _: None,
    fields: dict[str, Any] | None = None,
    split: int = 0,
) -> Path:
    """A GGUF file of the checkpoint in `folder`.

    kind: the type of a tensor, by its name and values. extra: adds to the metadata and tensors. fields: of the
    metadata under the architecture's prefix, beside those of the configuration. split: tensors of a file, of which
    there are several.
    """
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split)
    settings = {name: value for name, value in config.to_dict().items() if not isinstance(value, list)}
    settings = {own: getattr(config, own, None) for own in config.attribute_map} | settings
    values = {name: settings.get(found) for name, found in COMMON.items()}
    counts = (settings.get(name) for name in ("num_local_experts", "n_routed_experts", "num_experts"))
    values["expert_count"] = next((count for count in counts if count), None)
    rope = settings.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    values["rope.freq_base"] = rope.get("rope_theta")
    for name, value in (values | (fields or {})).items():
        if value is not None:
            kinds = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}
            add = kinds.get(type(value), writer.add_array if isinstance(value, list) else writer.add_string)
            add(f"{arch}.{name}", value)
    extra(writer)
    for name, data in tensors_of(folder, config, arch).items():
        data_type = gguf.GGMLQuantizationType[kind(name, data)]
        data = np.ascontiguousarray(data, np.float32)
        writer.add_tensor(name, gguf.quants.quantize(data, data_type), raw_dtype=data_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if not split else sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))[0]
