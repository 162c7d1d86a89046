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
    for name, values in load_file(folder / "model.safetensors").items():
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
        written_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert written_name is not None, name
        written[written_name] = changed(name, values, config, arch)
    return written


def changed(name: str, values: np.ndarray, config: Any, arch: str) -> np.ndarray:
    """Values as llama.cpp stores them."""
    if arch == "llama" and "q_proj" in name:
        return permuted(values, config.num_attention_heads)
    if arch == "llama" and "k_proj" in name:
        return permuted(values, config.num_key_value_heads)
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return values + 1
    if arch == "gpt2" and re.search(r"(c_attn|c_proj|c_fc)\.weight", name):
        return values.T
    return values.squeeze()


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
    values = {name: getattr(config, found, None) for name, found in COMMON.items()}
    values["expert_count"] = getattr(config, "num_local_experts", values["expert_count"])
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    values["rope.freq_base"] = rope.get("rope_theta")
    for name, value in (values | (fields or {})).items():
        if value is not None:
            add = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}.get(
                type(value), writer.add_string
            )
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
