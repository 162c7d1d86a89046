"""What bitsandbytes saves, packed here number by number, and its table by the formula and as published."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pagewire.kernels.data.integers import INT8, Integers
from pagewire.kernels.data.weight import Weight, dense_weight
from pagewire.workers.checkpoint.formats import bitsandbytes
from pagewire.workers.checkpoint.formats.quantised import QuantisedCheckpoint
from pagewire.workers.checkpoint.formats.registry import format_of
from pagewire.workers.checkpoint.formats.tables import integer_table, nf4, nf4_values
from pagewire.workers.checkpoint.source import Checkpoint
from tests.workers.checkpoint.formats.reading import is_told, shape_of

# Dettmers et al. 2023, "QLoRA", appendix E.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)


def fp4(code: int) -> float:
    """A sign, two bits of exponent and one of fraction, over 12; the smallest step is a 16th of a unit."""
    size = ((0.0, 0.0625), (8.0, 12.0), (4.0, 6.0), (2.0, 3.0))[code >> 1 & 3][code & 1] / 12
    return -size if code & 8 else size


FP4 = tuple(fp4(code) for code in range(16))
FORM = bitsandbytes.of({})


def saved(shape: tuple[int, int], block: int, kind: str, nested: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Random codes and scales as a checkpoint holds them, by suffix, and the matrix that they stand for."""
    generator = torch.Generator().manual_seed(1)
    table = NF4 if kind == "nf4" else FP4
    codes = torch.randint(16, (math.prod(shape),), generator=generator).tolist()
    num_blocks = -(-len(codes) // block)
    state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(shape)}
    tensors = {
        "weight": torch.tensor(
            [first << 4 | second for first, second in zip(codes[::2], codes[1::2], strict=True)]
        )
        .to(torch.uint8)
        .reshape(-1, 1),
        "weight.quant_map": torch.tensor(table),
    }
    if nested:
        state |= {"nested_blocksize": 8, "nested_dtype": "float32", "nested_offset": 0.03}
        inner = torch.randint(256, (num_blocks,), generator=generator)
        values = torch.linspace(-1, 1, 256)
        outer = torch.rand(-(-num_blocks // 8), generator=generator) * 0.01
        scales = [float(values[code]) * float(outer[i // 8]) + 0.03 for i, code in enumerate(inner.tolist())]
        tensors |= {
            "weight.absmax": inner.to(torch.uint8),
            "weight.nested_absmax": outer,
            "weight.nested_quant_map": values,
        }
    else:
        tensors["weight.absmax"] = torch.rand(num_blocks, generator=generator) + 0.01
        scales = tensors["weight.absmax"].tolist()
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(
        list(json.dumps(state).encode()), dtype=torch.uint8
    )
    dense = torch.tensor([table[code] * scales[i // block] for i, code in enumerate(codes)])
    return tensors, dense.view(shape)


def error(weight: Weight, dense: Tensor) -> float:
    return float((weight.scheme.dense(weight.parts, torch.float32) - dense).norm() / dense.norm())


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("shape", "block", "group"),
    [((6, 128), 64, 64), ((4, 256), 256, 128), ((6, 96), 64, 32), ((3, 100), 64, None)],
)
def test_blocks_of_4_bits(
    shape: tuple[int, int], block: int, group: int | None, nested: bool, kind: str
) -> None:
    tensors, dense = saved(shape, block, kind, nested)
    assert tensors.keys() <= FORM.suffixes and shape_of(FORM, "a", tensors) == shape
    weight = FORM.weight("a", tensors, torch.bfloat16)
    assert is_told(FORM, tensors, weight)
    assert isinstance(weight.scheme, Integers) and weight.scheme.group == group
    assert weight.scheme.bits == (4 if group else 8)
    assert error(weight, dense) < (0.006 if group else 0.008)


def test_codes_may_be_stored_as_another_dtype() -> None:
    tensors, dense = saved((4, 128), 64, "nf4", nested=False)
    tensors["weight"] = tensors["weight"].flatten().view(torch.bfloat16).reshape(-1, 1)
    assert error(FORM.weight("a", tensors, torch.bfloat16), dense) < 0.006


def test_int8_is_exact() -> None:
    values = torch.arange(-127, 129).clamp(max=127).to(torch.int8).view(4, 64)
    tensors = {"weight": values, "SCB": torch.tensor([1.0, 2.0, 3.0, 4.0]), "weight_format": torch.tensor(0)}
    weight = FORM.weight("a", tensors, torch.float32)
    assert is_told(FORM, tensors, weight)
    assert weight.scheme == INT8 and shape_of(FORM, "a", tensors) == (4, 64)
    assert torch.allclose(weight.dense(), values.float() * tensors["SCB"][:, None] / 127, rtol=1e-6, atol=0)


def test_the_values_of_nf4() -> None:
    assert torch.allclose(nf4_values(), torch.tensor(NF4), rtol=0, atol=2e-7)


def test_a_table_in_integers_is_the_nearest() -> None:
    table, unit = integer_table(torch.tensor(FP4))
    values = [(value - 128) * unit for value in table]
    assert values[2] == pytest.approx(2 / 3) and values[11] == pytest.approx(
        -1.0
    )  # a multiple of 96 holds thirds
    table, unit = integer_table(torch.tensor(NF4))
    assert max(abs((value - 128) * unit - exact) for value, exact in zip(table, NF4, strict=True)) < 0.004
    assert table[7] == 128 and min(table) >= 1 and max(table) <= 255


def test_nf4_takes_the_nearest_value_of_a_block() -> None:
    matrix = torch.randn(4, 128, generator=torch.Generator().manual_seed(0))
    blocks = matrix.view(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    nearest = (blocks[..., None] / scales[..., None] - torch.tensor(NF4)).abs().argmin(-1)
    weight = nf4(dense_weight(matrix, torch.bfloat16))
    assert weight.dtype == torch.bfloat16
    assert error(weight, (torch.tensor(NF4)[nearest] * scales).view(4, 128)) < 0.006
    assert nf4(dense_weight(torch.zeros(2, 96))).dense().eq(0).all()


def test_what_does_not_fit_is_refused() -> None:
    tensors, _ = saved((6, 128), 64, "nf4", nested=False)
    short = tensors | {"weight.absmax": tensors["weight.absmax"][:-1]}
    stateless = {name: tensor for name, tensor in tensors.items() if "state" not in name}
    tiled = {
        "weight": torch.zeros(4, 64, dtype=torch.int8),
        "SCB": torch.ones(4),
        "weight_format": torch.tensor(2),
    }
    for wrong, reason in ((short, "do not make a matrix"), (stateless, "none of"), (tiled, "GPU's tiles")):
        with pytest.raises(ValueError, match=reason):
            FORM.weight("a", wrong, torch.float32)
    state = {"shape": [2, 3, 64], "blocksize": 64}
    stacked = tensors | {
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        )
    }
    with pytest.raises(ValueError, match="only matrices"):
        shape_of(FORM, "a", stacked)


def test_a_checkpoint_names_its_parts_below_the_weight(tmp_path: Path) -> None:
    tensors, dense = saved((6, 128), 64, "nf4", nested=True)
    names = {f"layers.0.q_proj.{suffix}": tensor for suffix, tensor in tensors.items()}
    plain = {"lm_head.weight": torch.ones(2, 2), "layers.0.q_proj.bias": torch.ones(6)}
    save_file(names | plain, tmp_path / "model.safetensors")
    form = format_of({"quant_method": "bitsandbytes", "load_in_4bit": True})
    source = QuantisedCheckpoint(Checkpoint(tmp_path), form)
    assert set(source.names) == {"layers.0.q_proj.weight", *plain}
    assert source.on_meta("layers.0.q_proj.weight").shape == (6, 128)
    assert error(source.weight("layers.0.q_proj.weight", torch.bfloat16), dense) < 0.006
    assert source.read("lm_head.weight").eq(1).all()
