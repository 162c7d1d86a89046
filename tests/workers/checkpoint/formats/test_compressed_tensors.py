"""compressed-tensors: each layout, dequantised, is the matrix that was packed; damaged files are refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewire.kernels.data.integers import Integers
from pagewire.workers.checkpoint.formats.format import described
from pagewire.workers.checkpoint.formats.registry import format_of
from pagewire.workers.errors import LoadError
from tests.workers.checkpoint.formats import rounding
from tests.workers.checkpoint.formats.reading import NAME, assert_exact, assert_near, matrix, read, scheme
from tests.workers.checkpoint.formats.rounding import rounded, rounded_floats


def group_of(targets: list[str] | None = None, format: str | None = None, **weights: Any) -> dict[str, Any]:
    """One of `config_groups`."""
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"} | weights
    return {"targets": targets or ["Linear"], "weights": weights, "format": format}


def config_of(*groups: dict[str, Any], format: str = "pack-quantized", **fields: Any) -> dict[str, Any]:
    named = {f"group_{index}": group for index, group in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": named} | fields


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("strategy", "group"), [("channel", -1), ("group", 32), ("group", 128), ("tensor", -1)]
)
@pytest.mark.parametrize("bits", range(1, 9))
def test_packed(bits: int, strategy: str, group: int, symmetric: bool, dtype: torch.dtype) -> None:
    if strategy == "tensor":  # as a matrix of one row whose rows are then cut
        whole = rounded(matrix().reshape(1, -1), bits, -1, symmetric, dtype)
        original = rounding.Rounded(
            bits, whole.codes.reshape(64, 256), whole.scales, whole.zeros, torch.zeros(256).long()
        )
        tensors = rounding.compressed(original) | {"weight_scale": whole.scales.reshape(1)}
        if not symmetric:
            tensors["weight_zero_point"] = (whole.zeros - 2 ** (bits - 1)).to(torch.int8).reshape(1)
    else:
        original = rounded(matrix(), bits, group, symmetric, dtype)
        tensors = rounding.compressed(original, symmetric)
    size = {"group_size": group} if strategy == "group" else {}
    weight = read(
        format_of(config_of(group_of(num_bits=bits, strategy=strategy, symmetric=symmetric, **size))), tensors
    )
    assert_exact(weight, original)
    assert scheme(weight).bits == (4 if bits <= 4 else 6 if bits <= 6 else 8)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("strategy", "group"), [("channel", -1), ("group", 64)])
def test_plain_integers(strategy: str, group: int, symmetric: bool, bits: int) -> None:
    original = rounded(matrix(), bits, group, symmetric)
    size = {"group_size": group} if strategy == "group" else {}
    settings = group_of(num_bits=bits, strategy=strategy, symmetric=symmetric, **size)
    tensors = rounding.signed(original, symmetric)
    for format in ("int-quantized", "naive-quantized"):
        assert_exact(read(format_of(config_of(settings, format=format)), tensors), original)


def test_symmetric_integers_may_have_zeros_of_0() -> None:
    original = rounded(matrix(), 8, -1)
    tensors = rounding.signed(original, symmetric=False)
    form = format_of(config_of(group_of(), format="int-quantized"))
    assert_exact(read(form, tensors), original)
    tensors["weight_zero_point"][3] = 1
    with pytest.raises(LoadError, match=r"q_proj\.weight_zero_point is not 0"):
        read(form, tensors)


def test_blocks_of_integers() -> None:
    blocks = rounded(matrix(2, 256), 8, 128)
    values = torch.randint(-128, 128, (200, 256), dtype=torch.int8)
    form = format_of(
        config_of(group_of(strategy="block", block_structure=[128, 128]), format="int-quantized")
    )
    weight = read(form, {"weight": values, "weight_scale": blocks.scales})
    scales = blocks.scales.double().repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)
    assert torch.equal(weight.dense().double(), values.double() * scales)


@pytest.mark.parametrize(
    ("bits", "inputs", "rounds_rows"),
    [
        (8, {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}, True),
        (8, {"num_bits": 8, "type": "float"}, False),
        (8, None, False),
        (4, {"num_bits": 8, "type": "int"}, False),
    ],
)
def test_activations_of_8_bits(bits: int, inputs: dict[str, Any] | None, rounds_rows: bool) -> None:
    """Rows of products are rounded where weights have 8 bits, too, of the same kind."""
    group = group_of(num_bits=bits) | {"input_activations": inputs}
    original = rounded(matrix(), bits, -1)
    weight = read(format_of(config_of(group, format="int-quantized")), rounding.signed(original))
    assert isinstance(weight.scheme, Integers) and weight.scheme.rounds_rows == rounds_rows
    assert_exact(weight, original)


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
def test_floats_of_8_bits(strategy: str) -> None:
    shape = {"tensor": (1,), "channel": (64, 1), "block": (2, 2)}[strategy]
    values = (matrix() * 30).to(torch.float8_e4m3fn)
    scales = torch.rand(shape) + 0.5
    blocks = {"block_structure": [32, 128]} if strategy == "block" else {}
    group = group_of(type="float", strategy=strategy, **blocks)
    weight = read(
        format_of(config_of(group, format="float-quantized")), {"weight": values, "weight_scale": scales}
    )
    by_number = scales.repeat_interleave(32, 0).repeat_interleave(128, 1) if strategy == "block" else scales
    dense = values.float() * by_number
    assert (weight.dense() - dense).norm() / dense.norm() < 0.01


@pytest.mark.parametrize("group", [16, 32])
def test_floats_of_4_bits(group: int) -> None:
    original = rounded_floats(matrix(), group)
    tensors = {"weight_packed": original.packed(), "weight_scale": original.scales}
    settings = {"num_bits": 4, "type": "float", "group_size": group, "strategy": "group"}
    if group == 16:
        tensors |= {"weight_global_scale": 1 / original.factor, "input_global_scale": torch.ones(1)}
        settings["strategy"] = "tensor_group"
    form = format_of(
        config_of(group_of(**settings), format=f"{'nv' if group == 16 else 'mx'}fp4-pack-quantized")
    )
    assert torch.equal(read(form, tensors).dense(), original.dense())
    for suffix, wrong in (
        ("weight_scale", original.scales[:, 1:]),
        ("weight_packed", original.packed()[:-1]),
    ):
        with pytest.raises(ValueError, match=r"scales \(.*\) do not fit a matrix"):
            form.stored(NAME, described(tensors | {suffix: wrong}))
    if group == 16:
        del tensors["weight_global_scale"]
        with pytest.raises(ValueError, match="the factor of its scales is missing"):
            form.weight(NAME, tensors, torch.float32)


def test_reordered_columns_are_held_in_8_bits() -> None:
    index = torch.randperm(256, generator=torch.Generator().manual_seed(1)) // 64
    original = rounded(matrix(), 4, 64, False, index=index)
    form = format_of(
        config_of(group_of(num_bits=4, strategy="group", group_size=64, symmetric=False, actorder="group"))
    )
    tensors = rounding.compressed(original, False) | {"weight_g_idx": index.int()}
    assert_near(read(form, tensors), original)
    with pytest.raises(LoadError, match=r"q_proj\.weight_g_idx holds groups from 1 to 4, of 4"):
        read(form, tensors | {"weight_g_idx": index.int() + 1})
    adjacent = rounded(matrix(), 4, 64, False)
    tensors = rounding.compressed(adjacent, False) | {
        "weight_g_idx": torch.full((256,), -1, dtype=torch.int32)
    }
    assert_exact(read(form, tensors), adjacent)


def test_rows_need_not_fill_their_words() -> None:
    original = rounded(matrix(16, 96), 3, 48)
    form = format_of(config_of(group_of(num_bits=3, strategy="group", group_size=48)))
    assert_exact(read(form, rounding.compressed(original)), original)
    original = rounded(matrix(16, 20), 4, 20)
    form = format_of(config_of(group_of(num_bits=4, strategy="group", group_size=20)))
    assert_exact(read(form, rounding.compressed(original)), original)


def test_each_module_has_the_settings_of_its_group() -> None:
    groups = (
        group_of(["Linear"], num_bits=4, strategy="group", group_size=32),
        group_of([r"re:.*\.down_proj$"], num_bits=8, format="int-quantized"),
        group_of(["model.layers.1.mlp.down_proj"], num_bits=2, strategy="group", group_size=128),
    )
    form = format_of(config_of(*groups, format="mixed-precision", ignore=["lm_head", "re:.*gate$"]))
    four, eight, two = rounded(matrix(), 4, 32), rounded(matrix(), 8), rounded(matrix(), 2, 128)
    assert_exact(read(form, rounding.compressed(four)), four)
    assert_exact(read(form, rounding.signed(eight), "model.layers.0.mlp.down_proj"), eight)
    assert_exact(read(form, rounding.compressed(two), "model.layers.1.mlp.down_proj"), two)
    form.check(["lm_head.weight", "model.norm.weight", "model.layers.0.gate.weight"])
    for name in ("lm_head", "model.layers.0.gate"):
        with pytest.raises(LoadError, match=f"{name} is quantised, although"):
            form.check([f"{name}.weight_packed", f"{name}.weight_scale"])


def test_a_module_that_is_not_quantised_stays_as_it_is() -> None:
    form = format_of(config_of(group_of(), kv_cache_scheme={"num_bits": 8, "type": "float"}))
    dense = matrix()
    weight = read(form, {"weight": dense, "output_scale": torch.ones(1)}, "model.layers.0.self_attn.k_proj")
    assert weight.scheme.name == "dense" and torch.equal(weight.dense(), dense)


def test_scales_of_activations_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pagewire.worker")
    static = group_of() | {"input_activations": {"num_bits": 8, "dynamic": False}}
    original = rounded(matrix(), 8)
    form = format_of(config_of(static, format="int-quantized", kv_cache_scheme={"num_bits": 8}))
    assert "static scales are not used" in caplog.text and "kv_cache_scheme is not used" in caplog.text
    assert_exact(read(form, rounding.signed(original) | {"input_scale": torch.ones(1)}), original)
    caplog.clear()
    format_of(config_of(group_of() | {"input_activations": {"num_bits": 8, "dynamic": True}}))
    assert not caplog.text
    format_of(config_of(group_of() | {"input_activations": {"num_bits": 4, "dynamic": "local"}}))
    assert "static scales are not used" in caplog.text


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            config_of(group_of(), format="marlin-24"),
            "'marlin-24' of compressed-tensors is not served; dense, int-q",
        ),
        (
            config_of(group_of(format="mxfp6-pack-quantized")),
            r"config_groups\['group_0'\]: the format 'mxfp6-pack",
        ),
        (
            config_of(group_of(), sparsity_config={"format": "sparse-24-bitmask"}),
            "'sparse-24-bitmask' is not served",
        ),
        (config_of(group_of(), transform_config={"config_groups": {}}), "transform_config is not served"),
        (config_of(group_of(num_bits=6, type="float")), "'float' with 6 bits"),
        (config_of(group_of(num_bits=16)), "'int' with 16 bits"),
        (config_of(group_of(strategy="tensor_group", group_size=16)), "'tensor_group' is served only for"),
        (config_of(group_of(strategy="group")), "groups of 0 columns"),
        (config_of(group_of(strategy="block", block_structure=[128])), "block_structure must be two"),
        (config_of(group_of(type="float", symmetric=False)), "floats with zeros"),
        (config_of(group_of(["re:("])), "no regular expression"),
        (config_of(group_of(), ignore="lm_head"), "ignore must be a list"),
        ({"quant_method": "compressed-tensors", "config_groups": {"W8A8": ["Linear"]}}, "must be an object"),
    ],
)
def test_what_is_not_served_is_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(LoadError, match=words):
        format_of(config)


def test_a_module_without_a_group_is_refused() -> None:
    names = [f"{NAME}.weight_packed", f"{NAME}.weight_scale"]
    with pytest.raises(LoadError, match="q_proj is quantised, and in none of config_groups"):
        format_of(config_of(group_of([r"re:.*k_proj"]))).check(names)
    with pytest.raises(LoadError, match="may be of several of config_groups"):
        format_of(config_of(group_of(), group_of(["Embedding"], num_bits=4))).check(names)
    with pytest.raises(LoadError, match="q_proj has weight_packed, but no"):
        format_of(config_of(group_of())).check(names[:1])


@pytest.mark.timeout(30)
def test_a_pattern_that_takes_for_ever_is_refused() -> None:
    names = [f"{'a' * 60}.weight_packed", f"{'a' * 60}.weight_scale"]
    with pytest.raises(LoadError, match=r"quantization_config: to match .* takes too long"):
        format_of(config_of(group_of(["re:(.|..)*[A-Z]"]))).check(names)


def as_float(values: Tensor) -> Tensor:
    return values.float()


def test_damaged_tensors_are_refused_by_name() -> None:
    original = rounded(matrix(), 4, 64, symmetric=False)
    form = format_of(config_of(group_of(num_bits=4, strategy="group", group_size=64, symmetric=False)))
    tensors = rounding.compressed(original, symmetric=False)
    damages: dict[str, list[Any]] = {
        "weight_packed": [lambda words: words[:, :-1], lambda words: words[:-1], as_float, Tensor.flatten],
        "weight_scale": [
            lambda scales: scales[:, :-1],
            lambda scales: scales * float("nan"),
            torch.zeros_like,
            Tensor.int,
        ],
        "weight_zero_point": [
            lambda zeros: zeros[:-1],
            as_float,
            lambda zeros: None,
            lambda zeros: zeros.to(torch.int8),
        ],
        "weight_shape": [lambda size: size - 1, lambda size: size[:1]],
    }
    assert_exact(read(form, tensors), original)
    for suffix, damage in [(suffix, damage) for suffix, several in damages.items() for damage in several]:
        broken = tensors | {suffix: damage(tensors[suffix])}
        with pytest.raises(LoadError, match=rf"{NAME}\."):
            form.weight(
                NAME, {name: part for name, part in broken.items() if part is not None}, torch.float32
            )
    eight = format_of(config_of(group_of(num_bits=4), format="int-quantized"))
    with pytest.raises(
        LoadError, match=r"q_proj\.weight holds integers from -128 to 127, which are no 4 bits"
    ):
        read(
            eight,
            rounding.signed(rounded(matrix() * 1e4, 8, dtype=torch.float32))
            | {"weight": torch.arange(-128, 128).to(torch.int8).repeat(64, 1)},
        )
    with pytest.raises(
        LoadError, match=r"q_proj\.weight is of torch.int8, and quantization_config says float"
    ):
        read(format_of(config_of(group_of(type="float"))), rounding.signed(rounded(matrix(), 8)))
