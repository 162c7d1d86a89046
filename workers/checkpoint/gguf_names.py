"""The names of a GGUF file's tensors as transformers' checkpoints have them, and how their values differ.

llama.cpp's names are listed in its `gguf` package (`constants.py`), what its converter does to values in
`convert_hf_to_gguf.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pagewire.ipc.counts import MAX_EXPERTS

BLOCKS = (
    {"Q8_0": (8, 32, 128), "Q4_0": (4, 32, 8), "Q4_1": (4, 32, 0), "Q5_0": (8, 32, 16), "Q5_1": (8, 32, 0)}
    | {"Q2_K": (4, 16, 0), "Q3_K": (4, 16, 4), "Q4_K": (4, 32, 0), "Q5_K": (8, 32, 0), "Q6_K": (8, 16, 32)}
    | {"IQ4_NL": (4, 32, 128), "IQ4_XS": (4, 32, 128), "MXFP4": (4, 32, 12), "NVFP4": (4, 16, 12)}
    | {"IQ1_S": (4, 32, 128), "IQ1_M": (4, 16, 128), "TQ1_0": (4, 128, 1), "TQ2_0": (4, 128, 1)}
    | {"IQ2_XXS": (4, 32, 128), "IQ2_XS": (4, 16, 128), "IQ2_S": (4, 16, 128)}
    | {"IQ3_XXS": (4, 32, 128), "IQ3_S": (4, 32, 128)}
)
"""The types of quantised blocks that are read: bits, columns of a scale, and the value that stands for 0.
Where it is 0, groups have offsets."""
LAYER = re.compile(r"blk\.(\d+)\.(\w+)(?:\.(\d+))?\.(weight|bias)")
UNUSED = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""Tensors that are part of the configuration."""

ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
LLAMA = ATTENTION | NORMS | GATED
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
SHARED = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
EXPERTS = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
MIXTRAL_EXPERTS = {"ffn_gate": "w1", "ffn_up": "w3", "ffn_down": "w2"}
FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


@dataclass(frozen=True)
class GGUFNames:
    """The names of one type of models."""

    layer: Mapping[str, str]
    """In a layer: llama.cpp's part of a name to transformers'."""
    top: Mapping[str, str]
    """Outside of the layers."""
    layers: str = "model.layers"
    experts: str = ""
    """Where a layer has its experts."""
    expert: Mapping[str, str] | None = None
    """In an expert, as in a layer."""
    rotated: bool = False
    """The rows of queries and keys are in the order in which llama.cpp rotates them: pairs side by side."""
    norms_plus_one: bool = False
    """Norms are stored with 1 added to their weights."""
    transposed: bool = False
    """Matrices within layers are [K, N] in transformers."""


MODELS: dict[str, GGUFNames] = {
    "llama": GGUFNames(LLAMA, TOP, rotated=True),
    "mixtral": GGUFNames(
        LLAMA | {"ffn_gate_inp": "block_sparse_moe.gate"},
        TOP,
        experts="block_sparse_moe.experts",
        expert=MIXTRAL_EXPERTS,
        rotated=True,
    ),
    "qwen2": GGUFNames(LLAMA, TOP),
    "qwen3": GGUFNames(LLAMA, TOP),
    "qwen2_moe": GGUFNames(LLAMA | SHARED, TOP, experts="mlp.experts", expert=EXPERTS),
    "qwen3_moe": GGUFNames(LLAMA | SHARED, TOP, experts="mlp.experts", expert=EXPERTS),
    "gemma": GGUFNames(LLAMA, TOP, norms_plus_one=True),
    "gemma2": GGUFNames(LLAMA | FOUR_NORMS, TOP, norms_plus_one=True),
    "gemma3_text": GGUFNames(LLAMA | FOUR_NORMS, TOP, norms_plus_one=True),
    "phi3": GGUFNames(
        {
            **NORMS,
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        TOP,
    ),
    "starcoder2": GGUFNames(ATTENTION | NORMS | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}, TOP),
    "stablelm": GGUFNames(LLAMA, TOP),
    "gpt2": GGUFNames(
        GPT2,
        {
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        layers="transformer.h",
        transposed=True,
    ),
}
"""By transformers' name of the type."""


@dataclass(frozen=True)
class WeightPlace:
    """A weight of a transformers checkpoint, as a GGUF file holds it."""

    tensor: str
    """The GGUF file's name."""
    expert: int | None = None
    """Which matrix of a stack [E, N, K]; None: the tensor is no stack."""
    heads: int = 0
    """Number of heads whose rows must be put back in order; 0: they are in order."""
    plus: float = 0.0
    """What must be subtracted."""
    transposed: bool = False
    is_row: bool = False
    """A vector that transformers has as a matrix [1, K]."""


def places(
    model_type: str, tensors: Mapping[str, tuple[int, ...]], heads: int, kv_heads: int
) -> dict[str, WeightPlace]:
    """Where the weights of a model are, by transformers' names.

    tensors: the shapes of the GGUF file's tensors by name. heads, kv_heads: of the model's attention.

    Raises:
        KeyError: a tensor of an unknown name.
    """
    names = MODELS[model_type]
    found: dict[str, WeightPlace] = {}
    for tensor, shape in tensors.items():
        if tensor in UNUSED:
            continue
        match = LAYER.fullmatch(tensor)
        if match is None:
            stem, _, suffix = tensor.rpartition(".")
            found[f"{names.top[stem]}.{suffix}"] = _place(names, tensor, stem, shape, 0)
            continue
        number, stem, expert, suffix = match.groups()
        if stem.endswith("_exps") or expert is not None:
            found |= _experts(names, tensor, shape)
            continue
        rows = {"attn_q": heads, "attn_k": kv_heads}.get(stem, 0) if names.rotated else 0
        name = f"{names.layers}.{number}.{names.layer[stem]}.{suffix}"
        found[name] = _place(names, tensor, stem, shape, rows)
    return found


def _place(names: GGUFNames, tensor: str, stem: str, shape: tuple[int, ...], heads: int) -> WeightPlace:
    plus = 1.0 if names.norms_plus_one and stem.endswith("norm") else 0.0
    transposed = names.transposed and len(shape) == 2 and tensor.startswith("blk.")
    return WeightPlace(
        tensor, None, heads, plus, transposed, stem == "ffn_gate_inp_shexp" and len(shape) == 1
    )


def _experts(names: GGUFNames, tensor: str, shape: tuple[int, ...]) -> dict[str, WeightPlace]:
    """The matrices of a stack of experts, or of a single expert, as older files have them."""
    match = LAYER.fullmatch(tensor)
    assert match is not None
    number, stem, expert, suffix = match.groups()
    if names.expert is None:
        raise KeyError(stem)
    leaf = names.expert[stem.removesuffix("_exps")]
    prefix = f"{names.layers}.{number}.{names.experts}"
    if expert is not None:
        return {f"{prefix}.{expert}.{leaf}.{suffix}": WeightPlace(tensor)}
    if shape[0] > MAX_EXPERTS:
        raise KeyError(f"{tensor}: {shape[0]} experts")
    return {f"{prefix}.{index}.{leaf}.{suffix}": WeightPlace(tensor, index) for index in range(shape[0])}
