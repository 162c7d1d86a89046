"""AWQ and GPTQ: each layout, read and dequantised, is the matrix that was packed; damaged files are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pagewire.kernels.data.integers import Integers
from pagewire.workers.checkpoint.formats.registry import format_of
from pagewire.workers.errors import LoadError
from tests.workers.checkpoint.formats import rounding
from tests.workers.checkpoint.formats.reading import NAME, assert_exact, assert_near, matrix, read, scheme
from tests.workers.checkpoint.formats.rounding import rounded


def awq_config(**fields: Any) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "gemm",
    } | fields


def gptq_config(**fields: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True} | fields


@pytest.mark.parametrize("group", [-1, 32, 64, 128])
@pytest.mark.parametrize("version", ["gemm", "gemv"])
def test_awq(version: str, group: int) -> None:
    original = rounded(matrix(), 4, group, symmetric=False)
    packer = rounding.awq_gemm if version == "gemm" else rounding.awq_gemv
    weight = read(format_of(awq_config(version=version, group_size=group)), packer(original))
    assert_exact(weight, original)
    assert scheme(weight).bits == 4 and scheme(weight).group == (None if group == -1 else group)


def test_awq_word_by_word() -> None:
    """Output j of eight lies in the nibble that the order 0 2 4 6 1 3 5 7 gives it; worked out by hand."""
    words = torch.full((32, 1), 0x75316420, dtype=torch.int32)
    tensors = {"qweight": words, "qzeros": torch.tensor([[0x11111111]], dtype=torch.int32)}
    tensors["scales"] = torch.full((1, 8), 0.5, dtype=torch.float16)
    weight = read(format_of(awq_config(group_size=32)), tensors)
    assert weight.dense()[:, 0].tolist() == [-0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0]


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [-1, 32, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq(bits: int, group: int, symmetric: bool, layout: str) -> None:
    original = rounded(matrix(), bits, group, symmetric)
    config = gptq_config(bits=bits, group_size=group, sym=symmetric, checkpoint_format=layout)
    weight = read(format_of(config), rounding.gptq(original, 2 if layout == "gptq_v2" else 1))
    assert_exact(weight, original)
    assert scheme(weight).bits == max(bits, 4) and len(weight.parts) == (2 if symmetric else 3)


def test_names_of_kernels_are_names_of_the_format() -> None:
    original = rounded(matrix(), 4, 128)
    form = format_of(gptq_config(quant_method="gptq_marlin"))
    assert_exact(read(form, rounding.gptq(original)), original)
    original = rounded(matrix(), 4, 128, symmetric=False)
    assert_exact(
        read(format_of(awq_config(quant_method="awq_marlin")), rounding.awq_gemm(original)), original
    )


def test_gptq_word_by_word() -> None:
    """Three words of 3-bit integers, the column 0 1 2 ... 7 0 1 ...: worked out by hand, bit by bit."""
    bits = "".join(format(value % 8, "03b")[::-1] for value in range(32))
    words = [int(bits[start : start + 32][::-1], 2) for start in (0, 32, 64)]
    assert [hex(word) for word in words] == ["0x88fac688", "0xc688fac6", "0xfac688fa"]
    qweight = torch.tensor(words).to(torch.int32)[:, None].repeat(1, 32)
    zeros = torch.zeros(1, 3, dtype=torch.int32)
    tensors = {"qweight": qweight, "qzeros": zeros, "scales": torch.ones(1, 32, dtype=torch.float16)}
    weight = read(format_of(gptq_config(bits=3, group_size=-1, sym=False)), tensors)
    assert weight.dense()[5].tolist() == [float(value % 8 - 1) for value in range(32)]


def test_a_zero_of_0_has_borrowed_from_the_next() -> None:
    original = rounded(matrix(8, 32), 4, 32, symmetric=False)
    original.zeros = torch.tensor([0, 8, 0, 0, 15, 1, 0, 3])[:, None]
    tensors = rounding.gptq(original)
    assert_exact(read(format_of(gptq_config(group_size=32, sym=False)), tensors), original)


def test_symmetric_zeros_are_known_whichever_way_they_are_stored() -> None:
    original = rounded(matrix(), 4, 128)
    form = format_of(gptq_config())
    assert_exact(read(form, rounding.gptq(original, version=2)), original)
    original.zeros[3, 1] = 5
    with pytest.raises(LoadError, match=r"q_proj\.qzeros are not all 8"):
        read(form, rounding.gptq(original))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_reordered_columns_are_held_in_8_bits(bits: int) -> None:
    index = torch.randperm(256, generator=torch.Generator().manual_seed(1)) // 64
    original = rounded(matrix(), bits, 64, False, index=index)
    form = format_of(gptq_config(bits=bits, group_size=64, desc_act=True, sym=False))
    weight = read(form, rounding.gptq(original))
    assert scheme(weight) == Integers(8, 32, 128)
    assert_near(weight, original)


@pytest.mark.parametrize("index", [None, torch.zeros(256, dtype=torch.int32)])
def test_groups_that_are_not_named_follow_each_other(index: Tensor | None) -> None:
    original = rounded(matrix(), 4, 64)
    tensors = {name: part for name, part in rounding.gptq(original).items() if name != "g_idx"}
    if index is not None:
        tensors["g_idx"] = index
    assert_exact(read(format_of(gptq_config(group_size=64)), tensors), original)


@pytest.mark.parametrize(("group", "held"), [(256, 128), (96, 32), (48, 16)])
def test_groups_of_other_sizes_are_split(group: int, held: int) -> None:
    original = rounded(matrix(columns=3 * 256), 4, group, symmetric=False)
    weight = read(format_of(gptq_config(group_size=group, sym=False)), rounding.gptq(original))
    assert_exact(weight, original)
    assert scheme(weight).group == held


def test_the_last_group_may_be_short() -> None:
    original = rounded(matrix(columns=192), 4, 128)
    weight = read(format_of(gptq_config()), rounding.gptq(original))
    assert_exact(weight, original)
    assert scheme(weight).group == 64


def test_groups_that_cannot_be_split_are_held_in_8_bits() -> None:
    original = rounded(matrix(columns=256), 4, 8)
    weight = read(format_of(gptq_config(group_size=8)), rounding.gptq(original))
    assert scheme(weight) == Integers(8, 32, 128)
    assert_near(weight, original)


@pytest.mark.parametrize("group", [-1, 64, 128])
@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_marlin(kind: str, group: int) -> None:
    original = rounded(matrix(128, 256), 4, group)
    words, scales = rounding.marlin(original)
    if kind == "gptq":
        form, tensors = (
            format_of(gptq_config(group_size=group, is_marlin_format=True)),
            {"B": words, "s": scales},
        )
    else:
        form = format_of(awq_config(version="marlin", group_size=group, zero_point=False))
        tensors = {"qweight": words, "scales": scales}
    assert_exact(read(form, tensors), original)


def test_modules_of_other_settings() -> None:
    dynamic = {
        r"+:.*\.q_proj": {"bits": 8, "group_size": 32},
        r"-:.*\.k_proj": {},
        r".*\.v_proj": {"sym": False},
    }
    form = format_of(gptq_config(dynamic=dynamic))
    eight = rounded(matrix(), 8, 32)
    assert_exact(form.weight("layers.0.q_proj", rounding.gptq(eight), torch.float32), eight)
    four = rounded(matrix(), 4, 128)
    assert_exact(form.weight("layers.0.o_proj", rounding.gptq(four), torch.float32), four)
    uneven = rounded(matrix(), 4, 128, symmetric=False)
    assert_exact(form.weight("layers.0.v_proj", rounding.gptq(uneven), torch.float32), uneven)
    form.check(["layers.0.k_proj.weight", "lm_head.qweight", "lm_head.qzeros", "lm_head.scales"])
    with pytest.raises(LoadError, match=r"k_proj is quantised, although"):
        form.check(f"layers.0.k_proj.{part}" for part in ("qweight", "qzeros", "scales"))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (awq_config(bits=8), "AWQ of 8 bits"),
        (awq_config(version="gemv_fast"), "'gemv_fast' is not served; gemm"),
        (awq_config(version="llm-awq"), "'llm-awq' is not served"),
        (awq_config(zero_point=False), "only with zero_point=True"),
        (awq_config(group_size=0), "groups of 0"),
        (awq_config(bits="four"), "bits must be an integer"),
        (gptq_config(bits=5), "GPTQ of 5 bits"),
        (gptq_config(checkpoint_format="bitblas"), "'bitblas' is not served; gptq, gptq_v2"),
        (gptq_config(checkpoint_format="marlin", bits=8), "only with 4 bits"),
        (gptq_config(pack_dtype="int16"), "pack_dtype='int16'"),
        (gptq_config(group_size=-5), "groups of -5"),
        (gptq_config(sym="yes"), "sym must be true or false"),
        (gptq_config(dynamic={"+:(": {"bits": 8}}), "no regular expression"),
        (gptq_config(dynamic={"x": {"bits": 7}}), "GPTQ of 7 bits"),
        (gptq_config(dynamic=["x"]), "dynamic must be an object"),
        ({"quant_method": "quip"}, "'quip' are not served; those of aqlm, auto-round, awq"),
        ({}, "None are not served"),
    ],
)
def test_what_is_not_served_is_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(LoadError, match=words):
        format_of(config)


def test_checkpoints_with_other_tensors_are_refused() -> None:
    awq, gptq = format_of(awq_config()), format_of(gptq_config())
    with pytest.raises(LoadError, match=r"act\.scales multiplies activations"):
        awq.check([f"{NAME}.qweight", f"{NAME}.qzeros", f"{NAME}.scales", "layers.0.mlp.act.scales"])
    with pytest.raises(LoadError, match="q_proj has qweight, scales, but no qzeros"):
        gptq.check([f"{NAME}.qweight", f"{NAME}.scales"])
    with pytest.raises(LoadError, match="marlin_24"):
        gptq.check([f"{NAME}.B_24", f"{NAME}.B_meta", f"{NAME}.s"])


DAMAGES: dict[str, Any] = {
    "scales": [
        lambda scales: scales.index_fill(0, torch.tensor(1), float("nan")),
        lambda scales: scales.index_fill(1, torch.tensor(0), float("inf")),
        lambda scales: torch.zeros_like(scales),
        lambda scales: scales[:-1],
        lambda scales: scales.int(),
        lambda scales: scales.flatten(),
    ],
    "qweight": [lambda words: words[:-1], lambda words: words.short(), lambda words: words[:, :-1]],
    "qzeros": [lambda zeros: zeros[:, :-1], lambda zeros: zeros.float(), lambda zeros: None],
}
INDEX_DAMAGES: list[Any] = [
    lambda index: index + 1,
    lambda index: index - 1,
    lambda index: index[:-1],
    lambda index: index.float(),
    lambda index: index.reshape(2, -1),
]


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_damaged_tensors_are_refused_by_name(method: str) -> None:
    original = rounded(matrix(), 4, 128, symmetric=False)
    if method == "awq":
        form, tensors, damages = format_of(awq_config()), rounding.awq_gemm(original), DAMAGES
    else:
        form, tensors = format_of(gptq_config(sym=False)), rounding.gptq(original)
        damages = DAMAGES | {"g_idx": INDEX_DAMAGES}
    assert_exact(form.weight(NAME, tensors, torch.float32), original)
    for suffix, damage in [(suffix, damage) for suffix, several in damages.items() for damage in several]:
        broken = tensors | {suffix: damage(tensors[suffix])}
        with pytest.raises(LoadError, match=rf"{NAME}( |\.)"):
            form.weight(
                NAME, {name: part for name, part in broken.items() if part is not None}, torch.float32
            )


def test_a_scale_of_0_is_no_damage_where_weights_are_0() -> None:
    dense = matrix()
    dense[5, 128:] = 0
    original = rounded(dense, 4, 128, symmetric=False)
    original.scales[5, 1] = 0
    assert_exact(read(format_of(awq_config()), rounding.awq_gemm(original)), original)
