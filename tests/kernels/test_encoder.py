"""A stack of an encoder's layers: one compiled call, and kernel by kernel, to the same bits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewire.kernels.cpu import stack as compiled_stack
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.cpu.tensors import DTYPES
from pagewire.kernels.data.integers import Integers, quantise
from pagewire.kernels.data.layer import Activation, Layer, LayerNorm, Norm
from pagewire.kernels.data.paging import AttentionBatch, Cache, LogitTerms
from pagewire.kernels.linear import Linear, dense_weight, pack
from pagewire.kernels.stack import Stack
from tests.kernels.batches import allocate_kv

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, PAGE = 48, 4, 2, 16, 72, 16
LENGTHS = (20, 1, 33, 5, 17)
RADIUS = 256  # of distances that have a bias
OPTIONS: list[dict[str, Any]] = [
    {},
    {"activation": Activation.GELU_TANH, "bias": False},
    {"activation": Activation.SILU, "gated": True, "rotary": True},
    {"gated": True, "quantised": True, "rotary": True},
    {"norm_first": True, "bias": False, "gated": True, "windowed": True, "rotary": True},
    {"norm_first": True, "input_norm": True, "quantised": True},
    {"norm_first": True, "input_norm": True, "activation": Activation.GELU_QUICK},
    {"relative": True},
]


def make_stack(
    dtype: torch.dtype,
    activation: Activation = Activation.GELU,
    gated: bool = False,
    bias: bool = True,
    quantised: bool = False,
    rotary: bool = False,
    windowed: bool = False,
    relative: bool = False,
    **form: bool,
) -> Stack:
    """Two random layers; with `quantised` some matrices of the first are quantised.

    windowed: the first sees the keys within 7 of a query, and has angles of its own. form: `norm_first`, and
    whether the first layer begins with an `input_norm`.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    def linear(rows: int, columns: int, scheme: Integers | None = None) -> Linear:
        matrix = dense_weight(random(rows, columns))
        return pack(matrix if scheme is None else quantise(matrix, scheme), random(rows) if bias else None)

    def norm() -> LayerNorm:
        return LayerNorm(1 + random(HIDDEN), random(HIDDEN) if bias else None, 1e-6)

    distances = random(HEADS, 2 * RADIUS).float() * RADIUS**0.5

    def layer(scheme: Integers | None, window: int | None = None) -> Layer:
        return Layer(
            qkv=linear((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, scheme),
            out=linear(HIDDEN, HEADS * HEAD_DIM),
            attention_norm=norm(),
            up=linear(INTERMEDIATE * (2 if gated else 1), HIDDEN),
            down=linear(HIDDEN, INTERMEDIATE, scheme),
            output_norm=norm(),
            activation=activation,
            gated=gated,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            scale=HEAD_DIM**-0.5,
            angles=int(window is None) if rotary else None,
            terms=LogitTerms.two_sided(window, distances if relative else None),
        )

    layers = [layer(Integers(8, None, 128) if quantised else None, 8 if windowed else None), layer(None)]
    input_norm = norm() if form.pop("input_norm", False) else None
    return Stack(input_norm, layers, **{"norm_first": False, **form})


def make_step(dtype: torch.dtype) -> tuple[Tensor, AttentionBatch, list[tuple[Tensor, Tensor]]]:
    """States, batch, and two tables of angles of prompts of `LENGTHS` tokens, each in pages of its own."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor(LENGTHS)
    pages = -(-lengths // PAGE)
    firsts = pages.cumsum(0) - pages
    slots = [int(first) * PAGE + torch.arange(n) for first, n in zip(firsts, LENGTHS, strict=True)]
    table = (firsts[:, None] + torch.arange(3)).clamp(max=int(pages.sum()) - 1)
    batch = AttentionBatch(
        query_start_loc=torch.tensor([0, *LENGTHS]).cumsum(0).int(),
        seq_lens=lengths.int(),
        block_table=table.int(),
        slot_mapping=torch.cat(slots),
        max_query_len=max(LENGTHS),
        max_seq_len=max(LENGTHS),
    )
    tables = torch.rand(2, sum(LENGTHS), HEAD_DIM // 2, generator=generator).repeat(1, 1, 2)
    x = torch.randn(sum(LENGTHS), HIDDEN, generator=generator).to(dtype)
    return x, batch, [(angles.cos().to(dtype), angles.sin().to(dtype)) for angles in tables]


def make_caches(dtype: torch.dtype) -> list[Cache]:
    """One for both layers."""
    return 2 * [allocate_kv(sum(-(-n // PAGE) for n in LENGTHS), KV_HEADS, PAGE, HEAD_DIM, HEAD_DIM, dtype)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "plain")
@pytest.mark.usefixtures("served_kernels")
def test_one_call_is_all_the_kernels(
    dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the prompts are grouped; and it computes what plain PyTorch does in float64."""
    stack = make_stack(dtype, **options)
    assert stack.compiled is not None
    x, batch, angles = make_step(dtype)
    whole = stack(x.clone(), batch, make_caches(dtype), angles)
    monkeypatch.setattr(compiled_stack, "GROUP_TOKENS", 1)
    assert torch.equal(stack(x.clone(), batch, make_caches(dtype), angles), whole)
    stack.compiled = None
    assert torch.equal(stack(x.clone(), batch, make_caches(dtype), angles), whole)
    assert whole.isfinite().all() and whole.float().std() > 0.1
    if dtype == torch.float32 and "quantised" not in options:
        x, batch, angles = make_step(torch.float64)
        exact = make_stack(torch.float64, **options)
        assert exact.compiled is None
        expected = exact(x, batch, make_caches(torch.float64), angles)
        torch.testing.assert_close(whole.double(), expected, atol=2e-5, rtol=0)


def test_layers_that_have_no_one_call_run_kernel_by_kernel(served_kernels: CpuKernels) -> None:
    """A linear layer of another kind, an RMS norm that comes last."""
    first, second = make_stack(torch.float32).layers
    last = dataclasses.replace(second, output_norm=Norm(torch.ones(HIDDEN), 1e-6, 0.0))
    assert served_kernels.stack(None, [first, last], norm_first=False) is None
    other = dataclasses.replace(second, down=lambda x: x)
    assert served_kernels.stack(None, [first, other], norm_first=False) is None


@pytest.mark.usefixtures("served_kernels")
def test_what_does_not_fit_is_refused() -> None:
    stack = make_stack(torch.float32, rotary=True, relative=True)
    x, batch, angles = make_step(torch.float32)
    (cos, sin), other = angles
    caches = make_caches(torch.float32)
    with pytest.raises(ValueError, match="states"):
        stack(x[:, :-1].contiguous(), batch, caches, angles)
    with pytest.raises(ValueError, match="caches"):
        stack(x, batch, make_caches(torch.bfloat16), angles)
    with pytest.raises(ValueError, match="cos"):
        stack(x, batch, caches, [(cos[:5], sin[:5]), other])
    with pytest.raises(ValueError, match="angles of"):
        stack(x, batch, caches, [(cos.double(), sin.double()), other])
    with pytest.raises(ValueError, match="1 tables of angles for layers that use 2"):
        stack(x, batch, caches, angles[:1])
    few, wrong = (LogitTerms.two_sided(None, torch.zeros(size)) for size in ((HEADS, 64), (3, 512)))
    layers = [dataclasses.replace(layer, terms=few) for layer in stack.layers]
    with pytest.raises(ValueError, match="fit"):  # of fewer distances than a KV tile has
        Stack(None, layers, norm_first=False)(x, batch, caches, angles)
    with pytest.raises(ValueError, match="relative_bias for each of 4 heads"):
        Stack(None, [dataclasses.replace(layer, terms=wrong) for layer in layers], norm_first=False)
    with pytest.raises(ValueError, match="layers that begin with a norm"):
        Stack(layers[0].output_norm, layers, norm_first=False)
    for name, value in (
        ("slot_mapping", batch.slot_mapping[:-1]),
        ("slot_mapping", batch.slot_mapping + 1000),
        ("seq_lens", batch.seq_lens + 1000),
        ("block_table", batch.block_table + 9),
        ("query_start_loc", batch.query_start_loc - 1),
        ("query_start_loc", batch.query_start_loc.flip(0).contiguous()),
    ):
        with pytest.raises(ValueError, match="fit"):
            stack(x, dataclasses.replace(batch, **{name: value}), caches, angles)
