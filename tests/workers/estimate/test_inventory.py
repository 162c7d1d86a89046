"""Matrices by the headers of checkpoints: plain ones, and those of each quantised format."""

from __future__ import annotations

from typing import Any

import pytest

from pagewire.kernels.cpu.panels import NumberFormat
from pagewire.kernels.cuda.limits import LATENTS
from pagewire.workers.checkpoint.gguf.blocks import BLOCK_TYPES
from pagewire.workers.checkpoint.headers import TensorHeader
from pagewire.workers.estimate.dimensions import Dimensions
from pagewire.workers.estimate.inventory import Matrix, Part, matrices, part_of

SIZES = {"F32": 4, "I32": 4, "BF16": 2, "F16": 2, "U8": 1, "I8": 1, "F8_E4M3": 1, "I64": 8}
Q = "model.layers.0.self_attn.q_proj"


def header(name: str, dtype: str, *shape: int, content: bytes = b"") -> TensorHeader:
    size = SIZES[dtype]
    for side in shape:
        size *= side
    return TensorHeader(name, shape, dtype, size, lambda: content)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.embed_tokens.weight", Part.EMBEDDING),
        ("transformer.wte.weight", Part.EMBEDDING),
        ("lm_head.weight", Part.OUTPUT),
        (f"{Q}.bias", Part.ATTENTION),
        ("model.layers.0.self_attn.q_norm.weight", Part.NORMS),
        ("transformer.h.0.ln_1.weight", Part.NORMS),
        ("model.layers.0.mlp.gate_proj.weight", Part.FEED_FORWARD),
        ("model.layers.0.mlp.experts.3.gate_proj.weight", Part.EXPERTS),
        ("model.layers.0.moe.gate_proj.weight", Part.EXPERTS),
        ("model.layers.0.moe.gate.weight", Part.FEED_FORWARD),
        ("model.layers.0.mlp.shared_experts.gate_proj.weight", Part.FEED_FORWARD),
        ("something", Part.OTHER),
        ("norm", Part.OTHER),
        ("lm_head.norm.weight", Part.OUTPUT),
        ("ln" * 3000 + ".x", Part.OTHER),  # a pattern may take time with the third power of this
    ],
)
def test_names_tell_parts(name: str, part: Part) -> None:
    assert part_of(name) is part


@pytest.mark.parametrize(
    ("settings", "elements", "scales"),
    [  # 4 layers of 2 heads of 16, and 2 of heads of 32: 64 or 128 numbers for each token and layer
        ({"global_head_dim": 32}, 4 * 64 + 2 * 128, 6 * 4),
        ({"per_layer_config": {"02": {"head_dim": 32}, "05": {"head_dim": 32}}}, 4 * 64 + 2 * 128, 6 * 4),
        ({"global_head_dim": 32, "num_kv_shared_layers": 3}, 2 * 64 + 128, 3 * 4),
        (
            {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
            4 * 64 + 2 * 64,
            4 * 4 + 2 * 2,
        ),
    ],
)
def test_layers_have_keys_and_values_of_their_own(
    settings: dict[str, Any], elements: int, scales: int
) -> None:
    text = {"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    found = Dimensions.of({"text_config": {**text, "layer_types": kinds, **settings}}, ())
    assert (found.kv_elements, found.kv_scales, found.rotary_elements) == (elements, scales, 2 * (16 + 32))


def test_a_latent_is_keys_and_values_of_all_heads() -> None:
    """DeepSeek V3 keeps 576 numbers of a token in each of 61 layers; its heads have 128 * (192 + 128)."""
    sizes = {"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128}
    latent = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    found = Dimensions.of(sizes | latent, ())
    assert (found.kv_elements, found.kv_scales, found.rotary_elements) == (61 * 576, 61, 2 * 64)
    assert Dimensions.of(sizes | latent, (), latents=LATENTS) == found
    others = latent | {"qk_rope_head_dim": 32}  # for which a GPU has no kernel: values are as long as keys
    expanded = Dimensions.of(sizes | others, (), latents=LATENTS)
    assert (expanded.kv_elements, expanded.rotary_elements) == (61 * 128 * 2 * 160, 2 * 32)


def test_plain_tensors_are_vectors_matrices_and_stacks() -> None:
    found = list(
        matrices(
            [
                header(f"{Q}.weight", "BF16", 8, 4),
                header(f"{Q}.bias", "BF16", 8),
                header("model.layers.0.mlp.experts.down_proj", "F32", 5, 8, 4),
            ],
            {},
        )
    )
    assert [(m.part, m.count, m.rows, m.columns, m.is_vector, m.stored.bits, m.num_bytes) for m in found] == [
        (Part.ATTENTION, 1, 8, 4, False, 16, 64),
        (Part.ATTENTION, 1, 8, 1, True, 16, 16),
        (Part.EXPERTS, 5, 8, 4, False, 32, 640),
    ]


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
GPTQ = {"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": True}
FP8, BNB = {"quant_method": "fp8"}, {"quant_method": "bitsandbytes"}
STATE = b'{"blocksize": 64, "shape": [64, 256]}'


def packed(**weights: Any) -> dict[str, Any]:
    groups = {"0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


@pytest.mark.parametrize(
    ("quantization", "tensors", "shape", "stored"),
    [
        (
            AWQ,
            {"qweight": ("I32", 256, 8), "qzeros": ("I32", 2, 8), "scales": ("F16", 2, 64)},
            (1, 64, 256),
            NumberFormat(4, 128, True, 4),
        ),
        (
            GPTQ,
            {
                "qweight": ("I32", 64, 64),
                "qzeros": ("I32", 8, 16),
                "scales": ("F16", 8, 64),
                "g_idx": ("I32", 256),
            },
            (1, 64, 256),
            NumberFormat(8, 32),
        ),
        (
            packed(num_bits=4, group_size=64),
            {"weight_packed": ("I32", 64, 32), "weight_scale": ("BF16", 64, 4), "weight_shape": ("I64", 2)},
            (1, 64, 256),
            NumberFormat(4, 64),
        ),
        (
            packed(num_bits=8, strategy="channel"),
            {"weight": ("I8", 64, 256), "weight_scale": ("F32", 64, 1)},
            (1, 64, 256),
            NumberFormat(8, scale_bytes=4),
        ),
        (
            FP8,
            {"weight": ("F8_E4M3", 64, 256), "weight_scale_inv": ("F32", 1, 2)},
            (1, 64, 256),
            NumberFormat(8, 32),
        ),
        (
            {"quant_method": "modelopt"},
            {"weight": ("U8", 64, 128), "weight_scale": ("F8_E4M3", 64, 16), "weight_scale_2": ("F32",)},
            (1, 64, 256),
            NumberFormat(4, 16, scale_bytes=4),
        ),
        (
            BNB,
            {
                "weight": ("U8", 8192, 1),
                "weight.absmax": ("F32", 256),
                "weight.quant_state.bitsandbytes__nf4": ("U8", len(STATE)),
            },
            (1, 64, 256),
            NumberFormat(4, 64),
        ),
        (
            BNB,
            {"weight": ("I8", 64, 256), "SCB": ("F32", 64), "weight_format": ("U8",)},
            (1, 64, 256),
            NumberFormat(8, scale_bytes=4),
        ),
    ],
    ids=lambda value: value["quant_method"] if isinstance(value, dict) and "quant_method" in value else "",
)
def test_quantised_tensors_make_one_matrix(
    quantization: dict[str, Any],
    tensors: dict[str, tuple[Any, ...]],
    shape: tuple[int, ...],
    stored: NumberFormat,
) -> None:
    headers = [header(f"{Q}.{suffix}", *described, content=STATE) for suffix, described in tensors.items()]
    (found,) = matrices(headers, {"quantization_config": quantization})
    num_bytes = sum(tensor.num_bytes for tensor in headers)
    expected = Matrix(f"{Q}.weight", Part.ATTENTION, *shape[1:], stored, num_bytes, count=shape[0])
    assert found == expected


def test_blocks_of_experts_make_a_stack() -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    headers = [header(f"{name}_blocks", "U8", 4, 96, 2, 16), header(f"{name}_scales", "U8", 4, 96, 2)]
    (found,) = matrices(headers, {"quantization_config": {"quant_method": "mxfp4"}})
    assert (found.part, found.count, found.rows, found.columns) == (Part.EXPERTS, 4, 96, 64)
    assert found.stored == NumberFormat(4, 32)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_blocks_of_gguf_are_held_as_their_reader_says(name: str) -> None:
    scheme = BLOCK_TYPES[name].scheme
    (found,) = matrices([TensorHeader(f"{Q}.weight", (64, 256), name, 1000)], {})
    assert (found.stored.bits, found.stored.group) == (scheme.bits, scheme.group)
    assert (found.rows, found.columns, found.num_bytes, found.part) == (64, 256, 1000, Part.ATTENTION)


def test_modules_that_were_left_out_stay_plain() -> None:
    (found,) = matrices([header("lm_head.weight", "BF16", 8, 4)], {"quantization_config": AWQ})
    assert found.stored.is_float and found.part is Part.OUTPUT
