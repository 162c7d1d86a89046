"""Matrices of floats of 8 and 4 bits: PyTorch's own conversion and the definition are the oracles."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pagewire.kernels.cpu.panels import NumberFormat
from pagewire.kernels.data import integers
from pagewire.kernels.data.floats import Floats
from pagewire.kernels.data.integers import Integers
from pagewire.kernels.data.joining import column_slice
from pagewire.kernels.data.weight import Weight
from pagewire.workers.checkpoint.formats import floats, reexpress
from pagewire.workers.checkpoint.formats.format import described
from pagewire.workers.checkpoint.formats.quantised import QuantisedCheckpoint
from pagewire.workers.checkpoint.formats.reexpress import fp8_weight, kept_fp8_weight
from pagewire.workers.checkpoint.formats.registry import format_of
from pagewire.workers.checkpoint.source import Checkpoint
from pagewire.workers.errors import LoadError
from tests.workers.checkpoint.formats.reading import NAME, matrix, read
from tests.workers.checkpoint.formats.rounding import rounded_floats

MOST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
ROWS, COLUMNS = 192, 320
SMALL = slice(128, 192), slice(0, 128)
"""A block of numbers that are much smaller than those beside it."""


def quantised(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Values, scales of blocks, and the matrix that they stand for: block by block, as the definition says."""
    matrix = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) * 0.02
    matrix[SMALL] *= 1e-3
    values, dense = torch.empty(matrix.shape, dtype=dtype), torch.empty_like(matrix)
    scales = torch.empty(-(-ROWS // rows), -(-COLUMNS // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = matrix[place].abs().max() / MOST[dtype]
            values[place] = (matrix[place] / scales[i, j]).to(dtype)
            dense[place] = values[place].float() * scales[i, j]
    return values, scales, dense


def error(weight: Weight, dense: Tensor, *place: slice) -> float:
    """Of a part of the matrix, as a share of its norm."""
    expected = dense[place]
    return float(
        (weight.scheme.dense(weight.parts, torch.float32)[place] - expected).norm() / expected.norm()
    )


@pytest.mark.parametrize("dtype", MOST, ids=str)
@pytest.mark.parametrize("block", [(128, 128), (1, COLUMNS), (ROWS, COLUMNS), (64, 128)], ids=str)
def test_values_times_their_scales(dtype: torch.dtype, block: tuple[int, int]) -> None:
    values, scales, dense = quantised(*block, dtype)
    weight = fp8_weight(values, scales, torch.bfloat16, block)
    assert weight.scheme == Integers(8, 32, 128) and weight.dtype == torch.bfloat16
    assert 0 < error(weight, dense) < 0.006
    if block[0] <= 128:
        assert 0 < error(weight, dense, *SMALL) < 0.006


def test_scales_of_rows_and_of_the_matrix_have_several_shapes() -> None:
    values, by_row, _ = quantised(1, COLUMNS, torch.float8_e4m3fn)
    expected = fp8_weight(values, by_row, torch.float32).dense()
    assert torch.equal(fp8_weight(values, by_row.flatten(), torch.float32).dense(), expected)
    values, whole, _ = quantised(ROWS, COLUMNS, torch.float8_e4m3fn)
    expected = fp8_weight(values, whole, torch.float32).dense()
    for shape in ((), (1,)):
        assert torch.equal(fp8_weight(values, whole.reshape(shape), torch.float32).dense(), expected)


def test_rows_converted_a_few_at_a_time_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    values, scales, _ = quantised(128, 128, torch.float8_e4m3fn)
    expected = fp8_weight(values, scales, torch.float32, (128, 128)).dense()
    monkeypatch.setattr(integers, "BLOCK", 100 * COLUMNS)  # blocks of rows end within a block of scales
    assert torch.equal(fp8_weight(values, scales, torch.float32, (128, 128)).dense(), expected)


def test_columns_that_are_no_multiple_of_a_group_share_a_scale() -> None:
    values = torch.randn(8, 40).to(torch.float8_e4m3fn)
    weight = fp8_weight(values, torch.tensor(0.5), torch.float32)
    assert weight.scheme == Integers(8, None, 128)
    assert error(weight, values.float() / 2) < 0.01


def test_the_formats_of_checkpoints() -> None:
    values, scales, dense = quantised(128, 128, torch.float8_e4m3fn)
    deepseek = floats.of({"quant_method": "fp8", "weight_block_size": [128, 128]})
    tensors = {"weight": values, "weight_scale_inv": scales}
    assert deepseek.stored("a", described(tensors)) == ((ROWS, COLUMNS), NumberFormat(8, 32))
    assert error(deepseek.weight("a", tensors, torch.bfloat16), dense) < 0.006
    values, scales, dense = quantised(ROWS, COLUMNS, torch.float8_e4m3fn)
    static = floats.of({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]})
    tensors = {"weight": values, "weight_scale": scales[0, 0], "input_scale": torch.tensor(0.1)}
    assert error(static.weight("a", tensors, torch.bfloat16), dense) < 0.006
    values, scales, dense = quantised(1, COLUMNS, torch.float8_e4m3fn)
    fbgemm = floats.of({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0})
    tensors = {"weight": values, "weight_scale": scales, "input_scale_ub": torch.tensor([1200.0])}
    assert fbgemm.name == "fbgemm_fp8"
    assert error(fbgemm.weight("a", tensors, torch.bfloat16), dense) < 0.006


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("method", ["modelopt", "quark"])
def test_floats_of_4_bits_are_exact(method: str, group: int) -> None:
    original = rounded_floats(matrix(), group)
    algorithm = "NVFP4" if group == 16 else "MXFP4"
    form = format_of({"quant_method": method, "quant_algo": algorithm, "kv_cache_quant_algo": "FP8"})
    tensors = {"weight": original.packed(), "weight_scale": original.scales}
    if group == 16:
        tensors |= {"weight_scale_2": original.factor, "input_scale": torch.tensor(0.1)}
    weight = read(form, tensors)
    assert torch.equal(weight.dense(), original.dense())
    assert form.stored(NAME, described(tensors))[1] == NumberFormat(4, group, scale_bytes=64 // group)
    assert weight.parts[0].data_ptr() == tensors["weight"].data_ptr()


def test_powers_of_two_scale_8_bit_floats() -> None:
    values = matrix().to(torch.float8_e4m3fn)
    exponents = torch.arange(64 * 8, dtype=torch.int64).reshape(64, 8) % 16 + 118
    dense = values.float() * torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    for scales in (exponents.to(torch.uint8), exponents.to(torch.uint8).view(torch.float8_e8m0fnu)):
        weight = read(format_of({"quant_method": "mxfp8"}), {"weight": values, "weight_scale_inv": scales})
        assert error(weight, dense) < 0.006


def test_blocks_as_modelopt_has_them() -> None:
    values, scales, dense = quantised(64, 64, torch.float8_e4m3fn)
    form = format_of({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"})
    assert error(read(form, {"weight": values, "weight_scale": scales[:, None, :, None]}), dense) < 0.006


def test_what_is_said_is_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reexpress, "_logged", set())
    caplog.set_level(logging.INFO, "pagewire.worker")
    values, scales, _ = quantised(1, COLUMNS, torch.float8_e4m3fn)
    form = floats.of({"quant_method": "fp8", "activation_scheme": "static"})
    for layer in ("a", "b"):
        form.check([f"{layer}.weight", f"{layer}.input_scale"])
        form.weight(layer, {"weight": values, "weight_scale": scales}, torch.float32)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "activations are not needed" in told[0]
    assert "e4m3fn) are held as integers of 8 bits in groups of 32, which changes weights by 0." in told[1]


def test_what_is_not_served_is_refused() -> None:
    for config, reason in (
        ({"quant_method": "fp8", "activation_scheme": "none"}, "'none'"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "'fp4'"),
    ):
        with pytest.raises(ValueError, match=reason):
            floats.of(config)
    form = floats.of({"quant_method": "fp8"})
    for name in ("gate_up_proj_scale_inv", "down_proj_weight_scale_2"):
        with pytest.raises(ValueError, match="experts that lie in one tensor"):
            form.check([f"model.layers.0.mlp.experts.{name}"])
    with pytest.raises(ValueError, match="multiplies activations"):
        form.check([f"{NAME}.pre_quant_scale"])
    for config in (
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int4"}}},
        {
            "quant_method": "quark",
            "layer_quant_config": {"*": {"weight": [{"dtype": "int4"}, {"dtype": "fp8_e4m3"}]}},
        },
    ):
        with pytest.raises(LoadError, match=r"'W4A8_AWQ' is not served|'int4' are not served"):
            format_of(config)
    values, scales, _ = quantised(128, 128, torch.float8_e4m3fn)
    for tensors, reason in (
        ({"weight": values}, "none of weight_scale"),
        ({"weight": values.float(), "weight_scale": scales}, "is none of FP8, MXFP8, NVFP4"),
        ({"weight": values.view(torch.uint8), "weight_scale": scales}, "is none of FP8, MXFP8, NVFP4"),
        ({"weight": values[None], "weight_scale": scales}, "only matrices"),
        ({"weight": values, "weight_scale": scales[:, 0]}, "do not fit"),
        ({"weight": values, "weight_scale": torch.tensor(float("nan"))}, "not finite"),
    ):
        with pytest.raises(ValueError, match=reason):
            form.weight("a", tensors, torch.float32)


@pytest.mark.parametrize(
    ("block", "group"), [((128, 128), 64), ((1, COLUMNS), None), ((ROWS, COLUMNS), None), ((64, 64), 64)]
)
def test_8_bit_floats_are_kept_for_kernels(block: tuple[int, int], group: int | None) -> None:
    """Exactly, and so are the parts of ranks, whose columns may cut a group."""
    values, scales, dense = quantised(*block, torch.float8_e4m3fn)
    weight = kept_fp8_weight(values, scales, torch.float32, block)
    assert weight is not None and weight.scheme == Floats(group)
    assert torch.equal(weight.dense(), dense)
    assert torch.equal(column_slice(weight, 160, 320).dense(), dense[:, 160:])
    assert torch.equal(weight.rows(1, 2).dense(), dense[96:])
    assert torch.equal(weight.take(torch.tensor([150, 3])).dense(), dense[[150, 3]])
    assert torch.equal(Weight.joined([weight, weight.slice(0, 7)]).dense(), torch.cat([dense, dense[:7]]))


def test_what_no_kernel_multiplies_with_is_not_kept() -> None:
    values, scales, _ = quantised(128, 128, torch.float8_e5m2)
    assert kept_fp8_weight(values, scales, torch.bfloat16, (128, 128)) is None
    values, scales, _ = quantised(1, 32, torch.float8_e4m3fn)
    assert kept_fp8_weight(values, scales, torch.bfloat16) is None
    assert kept_fp8_weight(values[:, :40], scales[:, :1], torch.bfloat16) is None


def test_kept_floats_are_numbers() -> None:
    values, scales, _ = quantised(128, 128, torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="not finite"):
        kept_fp8_weight(values, scales * torch.inf, torch.bfloat16, (128, 128))
    values.view(torch.uint8)[3, 5] = 0xFF
    with pytest.raises(ValueError, match="not finite"):
        kept_fp8_weight(values, scales, torch.bfloat16, (128, 128))


def test_scales_that_are_exponents_are_kept_as_numbers() -> None:
    values = matrix().to(torch.float8_e4m3fn)
    exponents = torch.full((len(values), 1), 125, dtype=torch.uint8)
    weight = kept_fp8_weight(values, exponents, torch.float32)
    assert weight is not None and torch.equal(weight.dense(), values.float() / 4)


GROUP = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}, "targets": ["Linear"]}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
TENSOR = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}


def with_inputs(**inputs: object) -> dict[str, Any]:
    """A configuration of compressed-tensors with `input_activations`."""
    return COMPRESSED | {"config_groups": {"group_0": GROUP | {"input_activations": inputs or None}}}


def of_torchao(name: str) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": name, "_data": {}}}}


@pytest.mark.parametrize(
    ("config", "rounds_rows"),
    [
        ({"quant_method": "fp8"}, True),
        ({"quant_method": "fp8", "activation_scheme": "static"}, True),
        ({"quant_method": "fbgemm_fp8"}, True),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, True),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, False),
        ({"quant_method": "modelopt"}, False),
        ({"quant_method": "quark", "global_quant_config": {"weight": TENSOR, "input_tensors": TENSOR}}, True),
        ({"quant_method": "quark", "global_quant_config": {"weight": TENSOR}}, False),
        (with_inputs(num_bits=8, type="float", strategy="token", dynamic=True), True),
        (with_inputs(num_bits=8, type="float", strategy="tensor", dynamic=False), True),
        (with_inputs(num_bits=8, type="int"), False),
        (with_inputs(num_bits=4, type="float"), False),
        (with_inputs(), False),
        (of_torchao("Float8DynamicActivationFloat8WeightConfig"), True),
        (of_torchao("Float8WeightOnlyConfig"), False),
        ({"quant_method": "torchao"}, False),
    ],
    ids=str,
)
def test_checkpoints_are_read_as_the_device_multiplies(
    tmp_path: Path, config: dict[str, Any], rounds_rows: bool
) -> None:
    """As floats, exactly, or as integers; dense matrices as they are. Rows are rounded where activations were."""
    values, scales = matrix().to(torch.float8_e4m3fn), torch.rand(64, 1) + 0.5
    prefix, name = ("_weight_", "qdata") if config["quant_method"] == "torchao" else ("weight", "")
    tensors = {
        f"{NAME}.{prefix}{name}": values,
        f"{NAME}.{prefix.removesuffix('_')}_scale": scales,
        "norm.weight": scales[:, 0].clone(),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    form = format_of(config)
    kept, held = (QuantisedCheckpoint(Checkpoint(tmp_path), form, keeps) for keeps in (True, False))
    weight = kept.weight(f"{NAME}.weight", torch.float32)
    assert weight.scheme == Floats(None, rounds_rows) and torch.equal(weight.dense(), values.float() * scales)
    assert torch.equal(kept.read(f"{NAME}.weight"), weight.dense())
    assert held.weight(f"{NAME}.weight", torch.float32).scheme == Integers(8, 32, 128)
    assert torch.equal(kept.read("norm.weight"), scales[:, 0])


def test_other_numbers_have_their_own_schemes_where_floats_are_kept(tmp_path: Path) -> None:
    original = rounded_floats(matrix(), 16)
    tensors = {"weight": original.packed(), "weight_scale": original.scales, "weight_scale_2": torch.ones(1)}
    save_file({f"{NAME}.{suffix}": part for suffix, part in tensors.items()}, tmp_path / "model.safetensors")
    form = format_of({"quant_method": "modelopt", "quant_algo": "NVFP4"})
    weight = QuantisedCheckpoint(Checkpoint(tmp_path), form, True).weight(f"{NAME}.weight", torch.bfloat16)
    assert isinstance(weight.scheme, Integers) and weight.scheme.bits == 4
