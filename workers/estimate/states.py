"""The states that a model's layers keep, by the tensors of its checkpoint. Imports no torch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from pagewire.workers.checkpoint.headers import TensorHeader

MEMORIES = {"A_log", "conv_qk_grouped", "f_b_proj", "output_gate", "recurrent_param", "v_proj_delayed"}
"""Tensors that only layers with states have, beside the weights [C, 1, K] of their convolutions."""
STATE_SIZES = ("ssm_state_size", "mamba_d_state", "state_size")
GROUPS = ("n_groups", "mamba_n_groups", "mamba_ngroups")
FLOAT_BYTES = 4

Shapes = dict[str, tuple[int, ...]]


def recurrent_modules(tensors: Iterable[TensorHeader]) -> dict[str, Shapes]:
    """The modules that keep states: the shapes of their tensors, by the names of both."""
    found: dict[str, Shapes] = defaultdict(dict)
    for tensor in tensors:
        name, shape = tensor.name.removesuffix(".weight"), tensor.shape
        module, _, leaf = name.rpartition(".")
        if leaf in MEMORIES or _is_convolution(leaf, shape):
            found[module.removesuffix(".rg_lru")][leaf] = shape
    return found


def _is_convolution(leaf: str, shape: tuple[int, ...]) -> bool:
    return "conv" in leaf and len(shape) == 3 and shape[1] == 1


def state_bytes(modules: Mapping[str, Shapes], text: Mapping[str, Any]) -> int:
    """Bytes of a state slot. modules: of `recurrent_modules`. text: the configuration."""
    return FLOAT_BYTES * sum(_elements(shapes, text) for shapes in modules.values())


def _elements(shapes: Shapes, text: Mapping[str, Any]) -> int:
    """Numbers of the states of a module."""
    convolutions = [shape for leaf, shape in shapes.items() if _is_convolution(leaf, shape)]
    channels = sum(shape[0] for shape in convolutions)
    inputs = sum(shape[0] * (shape[2] - 1) for shape in convolutions)
    return inputs + _memory(shapes, channels, text)


def _memory(shapes: Shapes, channels: int, text: Mapping[str, Any]) -> int:
    """Numbers of the state beside the inputs of convolutions of these channels."""
    if "f_b_proj" in shapes:  # of Kimi's delta attention: from a head's size to all heads
        return math.prod(shapes["f_b_proj"])
    if "conv_qk_grouped" in shapes:  # of ZAYA: outputs of its first convolution, and values that come late
        return channels * (shapes["conv_qk_grouped"][2] - 1) + shapes["v_proj_delayed"][0]
    if "recurrent_param" in shapes:
        return math.prod(shapes["recurrent_param"])
    if "output_gate" in shapes:  # of lightning attention
        return shapes["output_gate"][0] * _head_dim(text)
    decays = shapes.get("A_log", ())
    if len(decays) in (2, 3):  # of each channel of Mamba 1
        return math.prod(decays)
    if not decays:
        return 0
    if (key_dim := text.get("linear_key_head_dim")) is not None:
        return int(decays[0] * key_dim * text.get("linear_value_head_dim", key_dim))
    if size := _first(text, STATE_SIZES):
        return int((channels - 2 * _first(text, GROUPS) * size) * size)
    return (
        channels // 3 * _head_dim(text)
    )  # of Ling's delta attention: queries, keys and values of the same size


def _head_dim(text: Mapping[str, Any]) -> int:
    own = text.get("linear_head_dim") or text.get("head_dim")
    return int(own or text["hidden_size"] // text["num_attention_heads"])


def _first(text: Mapping[str, Any], names: Iterable[str]) -> int:
    return next((int(text[name]) for name in names if text.get(name)), 0)
