"""Weights quantised while they are loaded: which matrices, how exactly, and how they are held."""

from __future__ import annotations

import pytest
import torch

from pagewire.ipc import quantization as names
from pagewire.kernels.cpu import kernels as cpu_kernels
from pagewire.kernels.data.integers import Integers, quantise, relative_error
from pagewire.kernels.data.weight import DENSE, Weight, dense_weight
from pagewire.workers.checkpoint.formats.online import ONLINE, online
from pagewire.workers.errors import LoadError

LINEAR, OUTPUT, EMBEDDING = "model.layers.3.mlp.down_proj", "lm_head", "model.embed_tokens"
EXPERT, SHARED = "model.layers.3.mlp.experts.gate_up_proj", "model.layers.3.mlp.shared_experts.up_proj"
INT8 = Integers(8, 32, 128)


def random_weight(columns: int = 128, seed: int = 0) -> Weight:
    matrix = torch.randn(16, columns, generator=torch.Generator().manual_seed(seed)) * 0.02
    return dense_weight(matrix.bfloat16())


def form(quantization: str, name: str, columns: int = 128) -> tuple[int, int | None] | None:
    """Bits and group of a matrix; None if it is left as it is."""
    scheme = online(quantization)(name, random_weight(columns)).scheme
    return (scheme.bits, scheme.group) if isinstance(scheme, Integers) else None


def test_which_matrices_have_how_many_bits() -> None:
    for name in (LINEAR, OUTPUT, EMBEDDING, EXPERT, SHARED):
        outside = name in (OUTPUT, EMBEDDING)
        assert form("int8", name) == form("fp8", name) == (8, 32)
        assert form("int6", name) == (6, 32)
        assert form("int4", name) == ((6, 32) if outside else (4, 32))
        assert form("int4_int8", name) == ((8, 32) if outside else (4, 32))
        assert form("bitsandbytes", name) == ((8, 32) if outside else (4, 64))
        assert form("experts_int8", name) == ((8, 32) if name == EXPERT else None)


def test_columns_that_are_no_multiple_of_a_group() -> None:
    assert form("bitsandbytes", LINEAR, 96) == (4, 32)
    for quantization in ONLINE:
        assert form(quantization, EXPERT, 80) == (8, 16)
        assert form(quantization, EXPERT, 100) == (8, None)


def test_what_chooses_experts_stays_exact() -> None:
    for quantization in ONLINE:
        for name in (
            "model.layers.0.mlp.gate",
            "model.layers.0.mlp.router",
            "layers.1.mlp.shared_expert_gate",
        ):
            assert form(quantization, name) is None


def test_a_quantised_weight_stays_as_it_is() -> None:
    weight = quantise(random_weight(), Integers(4, 128, 8))
    assert all(online(quantization)(EXPERT, weight) is weight for quantization in ONLINE)


@pytest.mark.parametrize(
    ("quantization", "least", "most"),
    [
        ("int8", 0.001, 0.006),
        ("fp8", 0.02, 0.03),
        ("int6", 0.005, 0.03),
        ("int4", 0.05, 0.09),
        ("bitsandbytes", 0.05, 0.1),
    ],
)
def test_what_quantising_costs(quantization: str, least: float, most: float) -> None:
    weight = random_weight()
    quantised = online(quantization)(LINEAR, weight)
    assert least < relative_error(quantised, weight) < most
    assert quantised.dtype == weight.dtype and quantised.shape == weight.shape


def test_fp8_rounds_to_8_bit_floats_first() -> None:
    weight = random_weight()
    dense = weight.dense().float()
    scales = dense.abs().amax(1, keepdim=True) / 448
    rounded = dense_weight((dense / scales).to(torch.float8_e4m3fn).float() * scales)
    assert relative_error(online("fp8")(LINEAR, weight), rounded) < 0.006


@pytest.mark.parametrize("quantization", ONLINE)
def test_the_bits_are_those_of_plain_torch(quantization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the kernels of this machine: codes, scales and offsets of every matrix."""
    for name in (LINEAR, OUTPUT, EXPERT):
        for columns in (128, 80, 100):
            weight = random_weight(columns, seed=columns)
            with monkeypatch.context() as patch:
                patch.setattr(cpu_kernels, "load", lambda: None)
                expected = online(quantization)(name, weight)
            found = online(quantization)(name, weight)
            assert found.scheme == expected.scheme
            assert all(map(torch.equal, found.parts, expected.parts))


def test_rows_of_zeros_stay_zeros() -> None:
    for quantization in ONLINE:
        assert online(quantization)(LINEAR, dense_weight(torch.zeros(2, 64))).dense().eq(0).all()


def test_an_unknown_name_is_refused() -> None:
    assert tuple(ONLINE) == names.ONLINE
    with pytest.raises(
        LoadError, match="quantization='awq' cannot be done while plain numbers are loaded: fp8"
    ):
        online("awq")
    assert online("experts_int8")(LINEAR, random_weight()).scheme is DENSE
