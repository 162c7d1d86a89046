"""The names of a GGUF file's tensors as transformers' checkpoints have them, and how their values differ.

llama.cpp's names are listed in its `gguf` package (`constants.py`), what its converter does to values in
`convert_hf_to_gguf.py` and its folder `conversion`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pagewire.ipc.counts import MAX_EXPERTS
from pagewire.workers.checkpoint.gguf_hybrids import HYBRIDS
from pagewire.workers.checkpoint.gguf_table import (
    ATTENTION,
    CORRECTION,
    EXPERTS,
    LLAMA,
    NORMS,
    SHARED,
    TOP,
    GGUFNames,
    JoinedForm,
    JoinedTensors,
    TiledHeads,
)

BLOCKS = (
    {"Q8_0": (8, 32, 128), "Q4_0": (4, 32, 8), "Q4_1": (4, 32, 0), "Q5_0": (6, 32, 16), "Q5_1": (6, 32, 0)}
    | {"Q2_K": (4, 16, 0), "Q3_K": (4, 16, 4), "Q4_K": (4, 32, 0), "Q5_K": (6, 32, 0), "Q6_K": (6, 16, 32)}
    | {"IQ4_NL": (4, 32, 128), "IQ4_XS": (4, 32, 128), "MXFP4": (4, 32, 12), "NVFP4": (4, 16, 12)}
    | {"IQ1_S": (4, 32, 128), "IQ1_M": (4, 16, 128), "TQ1_0": (4, 128, 1), "TQ2_0": (4, 128, 1)}
    | {"IQ2_XXS": (4, 32, 128), "IQ2_XS": (4, 16, 128), "IQ2_S": (4, 16, 128)}
    | {"IQ3_XXS": (4, 32, 128), "IQ3_S": (4, 32, 128)}
)
"""The types of quantised blocks that are read: bits, columns of a scale, and the value that stands for 0.
Where it is 0, groups have offsets."""
LAYER = re.compile(r"blk\.(\d+)\.(\w+|shortconv\.\w+)(?:\.(\d+))?(?:\.(weight|bias|scale))?")
IN_LAYER = re.compile(r"blk\.(\d{1,6})\.")
UNUSED = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""Tensors that are part of the configuration."""

CONVOLUTIONS = frozenset({"shortconv.conv", "ssm_conv1d"})
SHARED_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
MLA = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
PER_LAYER_INPUT = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
TOP_PER_LAYER = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
ALTUP = {
    "altup_correct_coef": "altup.correction_coefs",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
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
    "glm4": GGUFNames(
        LLAMA
        | {
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        TOP,
    ),
    "glm4_moe": GGUFNames(
        LLAMA | SHARED_EXPERTS | {"post_attention_norm": "post_attention_layernorm"},
        TOP,
        experts="mlp.experts",
        expert=EXPERTS,
        whole=CORRECTION,
    ),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3"),
        GGUFNames(
            LLAMA | SHARED_EXPERTS | MLA,
            TOP,
            experts="mlp.experts",
            expert=EXPERTS,
            whole=CORRECTION,
            joined={"attn_k_b": JoinedTensors("self_attn.kv_b_proj.weight", "heads", "attn_v_b")},
        ),
    ),
    "gpt_oss": GGUFNames(
        ATTENTION
        | {
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        },
        TOP,
        whole={"attn_sinks.weight": "self_attn.sinks"},
        joined={
            "ffn_gate_exps": JoinedTensors("mlp.experts.gate_up_proj", "transposed stack", "ffn_up_exps"),
            "ffn_down_exps": JoinedTensors("mlp.experts.down_proj", "transposed stack"),
        },
    ),
    "llama4_text": GGUFNames(
        LLAMA
        | {
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
            "ffn_gate_inp": "feed_forward.router",
            "ffn_gate_shexp": "feed_forward.shared_expert.gate_proj",
            "ffn_up_shexp": "feed_forward.shared_expert.up_proj",
            "ffn_down_shexp": "feed_forward.shared_expert.down_proj",
        },
        TOP,
        joined={
            "ffn_gate_exps": JoinedTensors(
                "feed_forward.experts.gate_up_proj", "transposed halves", "ffn_up_exps"
            ),
            "ffn_down_exps": JoinedTensors("feed_forward.experts.down_proj", "transposed stack"),
        },
    ),
    "gemma3n_text": GGUFNames(
        LLAMA | FOUR_NORMS | PER_LAYER_INPUT | ALTUP,
        TOP | TOP_PER_LAYER,
        whole={"altup_correct_scale.weight": "altup.correct_output_scale"},
        lists={
            "altup_proj": "model.altup_projections",
            "altup_unembd_proj": "model.altup_unembed_projections",
        },
    ),
    "gemma4_text": GGUFNames(
        LLAMA
        | FOUR_NORMS
        | PER_LAYER_INPUT
        | {
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "ffn_gate_inp": "router.proj",
        },
        TOP | TOP_PER_LAYER,
        whole={
            "layer_output_scale.weight": "layer_scalar",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
        },
        joined={
            "ffn_gate_up_exps": JoinedTensors("experts.gate_up_proj", "stack"),
            "ffn_down_exps": JoinedTensors("experts.down_proj", "stack"),
        },
    ),
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
    **HYBRIDS,
}
"""By transformers' name of the type."""


Layout = Literal["", "transposed", "row", "middle", "flat"]
"""What transformers has of a tensor: the same; [K, N] of [N, K]; [1, K] of [K]; [C, 1, L] of [C, L]; all numbers of
a matrix in one vector."""


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
    layout: Layout = ""
    is_decay: bool = False
    """Minus the exponential of what transformers has."""
    tiled: TiledHeads | None = None
    """Heads of linear attention that must be put back in order."""
    form: JoinedForm = ""
    """How it is made, if it is no single matrix."""
    other: str = ""
    """The GGUF file's name of the second tensor that it is made of, if there is one."""


def places(
    model_type: str, tensors: Mapping[str, tuple[int, ...]], heads: int, kv_heads: int, num_layers: int
) -> dict[str, WeightPlace]:
    """Where the weights of a model are, by transformers' names.

    tensors: the shapes of the GGUF file's tensors by name. heads, kv_heads: of the model's attention. num_layers:
    of the model; those behind them draft tokens, and are left out.

    Raises:
        KeyError: a tensor of an unknown name.
    """
    names = MODELS[model_type]
    seconds = {joined.other for joined in names.joined.values()}
    found: dict[str, WeightPlace] = {}
    for tensor, shape in tensors.items():
        layer = IN_LAYER.match(tensor)
        if tensor in UNUSED or (layer is not None and int(layer[1]) >= num_layers):
            continue
        match = LAYER.fullmatch(tensor)
        if match is None:
            stem, _, suffix = tensor.rpartition(".")
            if stem in names.lists:
                _check_stack(tensor, shape)
                prefix = names.lists[stem]
                found |= {f"{prefix}.{i}.{suffix}": WeightPlace(tensor, i) for i in range(shape[0])}
            else:
                found[f"{names.top[stem]}.{suffix}"] = _place(names, tensor, stem, shape, 0)
            continue
        number, stem, expert, suffix = match.groups()
        if (own := names.whole.get(stem if suffix is None else f"{stem}.{suffix}")) is not None:
            found[f"{names.layers}.{number}.{own}"] = WeightPlace(
                tensor, layout=_layout(stem, shape), is_decay=stem == "ssm_a", tiled=names.tiled.get(stem)
            )
            continue
        if suffix in (None, "scale"):
            raise KeyError(tensor)
        if stem in seconds:
            continue
        if (joined := names.joined.get(stem)) is not None:
            second = f"blk.{number}.{joined.other}.{suffix}" if joined.other else ""
            if second and second not in tensors:
                raise KeyError(f"{tensor} without {second}")
            if len(shape) == 3:
                _check_stack(tensor, shape)
            name = f"{names.layers}.{number}.{joined.name}" + ("_bias" if suffix == "bias" else "")
            found[name] = WeightPlace(tensor, form=joined.form, other=second)
            continue
        if stem.endswith("_exps") or expert is not None:
            found |= _experts(names, tensor, shape)
            continue
        rows = {"attn_q": heads, "attn_k": kv_heads}.get(stem, 0) if names.rotated else 0
        name = f"{names.layers}.{number}.{names.layer[stem]}.{suffix}"
        found[name] = _place(names, tensor, stem, shape, rows)
    return found


def _place(names: GGUFNames, tensor: str, stem: str, shape: tuple[int, ...], heads: int) -> WeightPlace:
    plus = 1.0 if names.norms_plus_one and stem.endswith("norm") and stem != "ssm_norm" else 0.0
    transposed = names.transposed and len(shape) == 2 and tensor.startswith("blk.")
    layout = "transposed" if transposed else _layout(stem, shape)
    return WeightPlace(tensor, None, heads, plus, layout, tiled=names.tiled.get(stem))


def _layout(stem: str, shape: tuple[int, ...]) -> Layout:
    if stem == "ffn_gate_inp_shexp":
        return "row" if len(shape) == 1 else ""
    if stem in CONVOLUTIONS:
        return "middle" if len(shape) == 2 else ""
    is_column = stem in ("ssm_a", "ssm_d") and len(shape) == 2 and shape[1] == 1
    return "flat" if is_column or (stem == "ssm_norm" and len(shape) == 2) else ""


def joined_shape(form: JoinedForm, first: tuple[int, ...], second: tuple[int, ...] | None) -> tuple[int, ...]:
    """The shape of a weight of one or two tensors, not transposed.

    Raises:
        ValueError: the tensors do not fit each other.
    """
    if form == "heads":
        if second is None or len(first) != 3 or len(second) != 3:
            raise ValueError(f"tensors of shapes {first} and {second} are no keys and values")
        heads, rank, keys = first
        if second[0] != heads or second[2] != rank:
            raise ValueError(f"keys {first} do not fit values {second}")
        return heads * (keys + second[1]), rank
    if second is None:
        return first
    if form == "linear heads":
        if len(first) != 2 or len(second) != 2 or first[1] != second[1]:
            raise ValueError(f"tensors of shapes {first} and {second} are no heads of linear attention")
        return first[0] + second[0], first[1]
    if second != first:
        raise ValueError(f"tensors of shapes {first} and {second} are no two parts of a weight")
    if form == "halves" and len(first) == 2:
        return 2 * first[0], first[1]
    return first[0], 2 * first[1], *first[2:]


def _check_stack(tensor: str, shape: tuple[int, ...]) -> None:
    if shape[0] > MAX_EXPERTS:
        raise KeyError(f"{tensor}: {shape[0]} experts")


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
    _check_stack(tensor, shape)
    return {f"{prefix}.{index}.{leaf}.{suffix}": WeightPlace(tensor, index) for index in range(shape[0])}
