"""The settings of models in GGUF files whose layers keep states: linear attention, Mamba, short convolutions.

A key `ssm.*` has the meaning that llama.cpp's converter gives it: `ssm.time_step_rank` is the number of heads of
Mamba 2 and of linear attention.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from pagewire.ipc.gguf.fields import (
    Fields,
    Values,
    expert_fields,
    experts,
    head_size,
    partial_rotary,
    rms,
    shape_of,
)
from pagewire.ipc.gguf.file import GgufError, GgufFile

LONGEST_GRANITE = 1 << 17
"""Tokens of the published Granite 4: where nothing is rotated, the converter writes 2**20 for any model."""


def num_layers(fields: Fields) -> int:
    """The number of layers, without those that draft tokens."""
    drafting: int = fields.get("nextn_predict_layers", int, 0)
    return fields.whole("block_count") - drafting


def layers_with(file: GgufFile, tensor: str) -> list[int]:
    """The layers that have a tensor of this name."""
    return [layer for layer in range(num_layers(Fields(file))) if f"blk.{layer}.{tensor}" in file.tensors]


def kinds_of_layers(file: GgufFile, tensor: str, having: str, lacking: str) -> list[str]:
    """The type of each layer: `having` where there is a tensor of this name, `lacking` where there is none."""
    chosen = set(layers_with(file, tensor))
    return [having if layer in chosen else lacking for layer in range(num_layers(Fields(file)))]


def linear_attention(file: GgufFile) -> Values:
    """Layers of Qwen 3 Next and 3.5: every n-th attends to all keys, the others are linear."""
    fields = Fields(file)
    every = fields.whole("full_attention_interval", 4)
    kinds = range(1, num_layers(fields) + 1)
    heads = fields.whole("ssm.time_step_rank")
    return (
        rms(fields)
        | partial_rotary(fields)
        | {
            "layer_types": ["linear_attention" if layer % every else "full_attention" for layer in kinds],
            "linear_conv_kernel_dim": fields.whole("ssm.conv_kernel"),
            "linear_key_head_dim": fields.whole("ssm.state_size"),
            "linear_num_key_heads": fields.whole("ssm.group_count"),
            "linear_num_value_heads": heads,
            "linear_value_head_dim": fields.whole("ssm.inner_size") // heads,
        }
    )


def shared_expert(file: GgufFile) -> Values:
    """The experts of a layer, with one for all tokens."""
    size = shape_of(file, "blk.0.ffn_gate_shexp.weight", 2)[0]
    return expert_fields(file) | {"shared_expert_intermediate_size": size}


def qwen3next(file: GgufFile) -> Values:
    """Qwen 3 Next, which has experts."""
    return linear_attention(file) | shared_expert(file) | {"model_type": "qwen3_next", "norm_topk_prob": True}


def qwen35(file: GgufFile) -> Values:
    """Qwen 3.5 and 3.6 with dense layers."""
    return linear_attention(file) | {"model_type": "qwen3_5_text"}


def qwen35moe(file: GgufFile) -> Values:
    """Qwen 3.5 and 3.6 with experts."""
    return linear_attention(file) | shared_expert(file) | {"model_type": "qwen3_5_moe_text"}


def lfm2(file: GgufFile) -> Values:
    """LFM 2, where layers without heads of keys are convolutions."""
    fields = Fields(file)
    heads = fields.get("attention.head_count_kv", (int, array))
    counts = heads if isinstance(heads, array) else [heads] * fields.whole("block_count")
    return {
        "model_type": "lfm2",
        "norm_eps": fields.number("attention.layer_norm_rms_epsilon", 1e-5),
        "conv_L_cache": fields.whole("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["full_attention" if count else "conv" for count in counts],
    }


def lfm2moe(file: GgufFile) -> Values:
    """LFM 2 with experts in its later layers."""
    fields = Fields(file)
    return (
        lfm2(file)
        | experts(fields, "num_experts")
        | {
            "model_type": "lfm2_moe",
            "moe_intermediate_size": fields.whole("expert_feed_forward_length"),
            "num_dense_layers": fields.get("leading_dense_block_count", int, 0),
            "use_expert_bias": bool(layers_with(file, "exp_probs_b.bias")),
            "norm_topk_prob": True,
        }
    )


def sizes_of_mamba(fields: Fields) -> dict[str, int]:
    """Sizes of Mamba 2: its heads, the size of one, groups, a state's size, and the kernel of the convolution.

    Raises:
        GgufError: the inner size is no multiple of the heads.
    """
    inner, heads = fields.whole("ssm.inner_size"), fields.whole("ssm.time_step_rank")
    if inner % heads:
        raise GgufError(f"{fields.path}: ssm.inner_size is {inner} for {heads} heads")
    return {
        "heads": heads,
        "size": inner // heads,
        "groups": fields.whole("ssm.group_count", 1),
        "state": fields.whole("ssm.state_size"),
        "kernel": fields.whole("ssm.conv_kernel"),
    }


def mamba(file: GgufFile) -> Values:
    """Mamba, and Falcon Mamba, which differs in norms without weights."""
    fields = Fields(file)
    width = fields.whole("embedding_length")
    inner = fields.whole("ssm.inner_size")
    return {
        "model_type": "falcon_mamba" if fields.get("ssm.dt_b_c_rms", bool, False) else "mamba",
        "layer_norm_epsilon": fields.number("attention.layer_norm_rms_epsilon", 1e-5),
        "expand": inner // width,
        "intermediate_size": inner,
        "state_size": fields.whole("ssm.state_size"),
        "conv_kernel": fields.whole("ssm.conv_kernel"),
        "time_step_rank": fields.whole("ssm.time_step_rank"),
        "use_conv_bias": "blk.0.ssm_conv1d.bias" in file.tensors,
    }


def mamba2(file: GgufFile) -> Values:
    """Mamba 2."""
    fields = Fields(file)
    sizes = sizes_of_mamba(fields)
    return {
        "model_type": "mamba2",
        "layer_norm_epsilon": fields.number("attention.layer_norm_rms_epsilon", 1e-5),
        "expand": fields.whole("ssm.inner_size") // fields.whole("embedding_length"),
        "num_heads": sizes["heads"],
        "head_dim": sizes["size"],
        "n_groups": sizes["groups"],
        "state_size": sizes["state"],
        "conv_kernel": sizes["kernel"],
        "use_conv_bias": "blk.0.ssm_conv1d.bias" in file.tensors,
    }


def mamba2_layers(file: GgufFile) -> Values:
    """The layers of Mamba 2 in Falcon-H1, Granite 4 and Bamba."""
    fields = Fields(file)
    sizes = sizes_of_mamba(fields)
    return {
        "mamba_n_heads": sizes["heads"],
        "mamba_d_head": sizes["size"],
        "mamba_n_groups": sizes["groups"],
        "mamba_d_state": sizes["state"],
        "mamba_d_conv": sizes["kernel"],
        "mamba_conv_bias": bool(layers_with(file, "ssm_conv1d.bias")),
    }


def falcon_h1(file: GgufFile) -> Values:
    """Falcon-H1, whose layers both attend and keep states. Its multipliers are in the file's weights."""
    fields = Fields(file)
    return (
        rms(fields)
        | mamba2_layers(file)
        | {
            "model_type": "falcon_h1",
            "mamba_d_ssm": fields.whole("ssm.inner_size"),
            "mamba_rms_norm": bool(layers_with(file, "ssm_norm.weight")),
            "mamba_norm_before_gate": False,
            "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        }
    )


def granitehybrid(file: GgufFile) -> Values:
    """Granite 4 with layers of Mamba 2; and Bamba, which the converter writes under the same name."""
    fields = Fields(file)
    if fields.get("rope.scaling.finetuned", bool, False):
        return (
            rms(fields)
            | mamba2_layers(file)
            | {"model_type": "bamba", "attn_layer_indices": layers_with(file, "attn_q.weight")}
        )
    values = (
        rms(fields)
        | mamba2_layers(file)
        | {
            "model_type": "granitemoehybrid",
            "max_position_embeddings": min(fields.whole("context_length", 2048), LONGEST_GRANITE),
            "mamba_expand": fields.whole("ssm.inner_size") // fields.whole("embedding_length"),
            "layer_types": kinds_of_layers(file, "attn_q.weight", "full_attention", "linear_attention"),
            "position_embedding_type": None,
            "attention_multiplier": fields.number("attention.scale", head_size(fields) ** -0.5),
            "embedding_multiplier": fields.number("embedding_scale", 1.0),
            "residual_multiplier": fields.number("residual_scale", 1.0),
            "logits_scaling": fields.number("logit_scale", 1.0),
            "num_local_experts": 0,
            "shared_intermediate_size": fields.whole("feed_forward_length"),
        }
    )
    if layers_with(file, "ffn_gate_inp.weight"):
        values |= experts(fields, "num_local_experts")
        values["shared_intermediate_size"] = fields.whole("expert_shared_feed_forward_length")
    return values


def nemotron_h(file: GgufFile) -> Values:
    """Nemotron-H and Nemotron Nano 2 and 3, whose layers do one thing each."""
    fields = Fields(file)
    sizes = sizes_of_mamba(fields)
    kinds = dict.fromkeys(range(num_layers(fields)), "linear_attention")
    for tensor, kind in (("attn_q", "full_attention"), ("ffn_up", "mlp"), ("ffn_gate_inp", "moe")):
        kinds |= dict.fromkeys(layers_with(file, f"{tensor}.weight"), kind)
    values = {
        "model_type": "nemotron_h",
        "layers_block_type": list(kinds.values()),
        "layer_norm_epsilon": fields.number("attention.layer_norm_rms_epsilon", 1e-5),
        "mamba_num_heads": sizes["heads"],
        "mamba_head_dim": sizes["size"],
        "n_groups": sizes["groups"],
        "ssm_state_size": sizes["state"],
        "conv_kernel": sizes["kernel"],
        "use_conv_bias": bool(layers_with(file, "ssm_conv1d.bias")),
    }
    return values | (nemotron_experts(fields) if "moe" in kinds.values() else {})


def nemotron_experts(fields: Fields) -> Values:
    """The experts of Nemotron 3, perhaps with inputs and outputs of another size than the model's."""
    return experts(fields, "n_routed_experts") | {
        "n_shared_experts": fields.whole("expert_shared_count", 1),
        "moe_intermediate_size": fields.whole("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": fields.whole("expert_shared_feed_forward_length"),
        "moe_latent_size": fields.get("moe_latent_size", int),
        "n_group": fields.whole("expert_group_count", 1),
        "topk_group": fields.whole("expert_group_used_count", 1),
        "norm_topk_prob": bool(fields.get("expert_weights_norm", bool, True)),
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0) or 1.0,
    }


def jamba(file: GgufFile) -> Values:
    """Jamba, where every n-th layer attends and the others are Mamba, and every n-th has experts."""
    fields = Fields(file)
    values = rms(fields) | {
        "model_type": "jamba",
        "mamba_d_state": fields.whole("ssm.state_size"),
        "mamba_d_conv": fields.whole("ssm.conv_kernel"),
        "mamba_expand": fields.whole("ssm.inner_size") // fields.whole("embedding_length"),
        "mamba_dt_rank": fields.whole("ssm.time_step_rank"),
        "mamba_conv_bias": bool(layers_with(file, "ssm_conv1d.bias")),
        "num_experts": 1,
        "num_experts_per_tok": fields.whole("expert_used_count", 1),
    }
    names = {"attn": layers_with(file, "attn_q.weight"), "expert": layers_with(file, "ffn_gate_inp.weight")}
    if names["expert"]:
        values["num_experts"] = fields.whole("expert_count")
    else:
        names.pop("expert")
    for name, layers in names.items():
        period, offset = every_nth(fields, layers, name)
        values |= {f"{name}_layer_period": period, f"{name}_layer_offset": offset}
    return values


def every_nth(fields: Fields, layers: Sequence[int], name: str) -> tuple[int, int]:
    """The period and the first of layers that come at equal distances.

    Raises:
        GgufError: there are none, or distances differ.
    """
    count = num_layers(fields)
    period = layers[1] - layers[0] if len(layers) > 1 else count
    if not layers or layers[0] >= period or list(layers) != list(range(layers[0], count, period)):
        raise GgufError(f"{fields.path}: {name} layers {list(layers)} of {count} are at no equal distances")
    return period, layers[0]
