"""Attention to later keys, emulated, against the reference: what encoders run on a GPU."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagewire.kernels.cuda import attention
from pagewire.kernels.cuda.compile import OLDEST
from pagewire.kernels.cuda.launch import HOPPER
from pagewire.kernels.cuda.layout import exchange_chunks
from pagewire.kernels.data.paging import WHOLE, Cache, LogitTerms
from tests.kernels.batches import Paged, Shape
from tests.kernels.cuda.emulate import ORDERS, EmulatedLauncher
from tests.kernels.cuda.test_attention import BF16, E4M3, FP16, batch_of, check, launchers, run

RADIUS = 256  # of distances that have a bias
LENGTHS = (1, 130, 17, 64)  # tokens: of less than a step of keys, and of several tiles of rows


def biases(num_heads: int) -> Tensor:
    """A bias for each head and distance, all different."""
    return torch.randn(num_heads, 2 * RADIUS, generator=torch.Generator().manual_seed(num_heads))


def prompts(lengths: tuple[int, ...], shape: Shape, dtype: torch.dtype, seed: int = 0) -> Paged:
    return batch_of([(0, length) for length in lengths], shape, dtype, seed=seed)


@pytest.mark.parametrize("capability", [OLDEST, HOPPER], ids=str)
@pytest.mark.parametrize(("dtype", "head_dim"), [(BF16, 32), (FP16, 64), (FP16, 80), (BF16, 128)], ids=str)
def test_variants(dtype: torch.dtype, head_dim: int, capability: tuple[int, int]) -> None:
    """All keys, windows to both sides, biases by distance; and everything that logits may have besides."""
    shape = Shape(2, 2, head_dim, head_dim)
    launcher = EmulatedLauncher(order=ORDERS[2], capability=capability)
    paged = prompts(LENGTHS, shape, dtype)
    sinks = torch.tensor([1.0, -1.0])
    for terms in (
        LogitTerms(future=WHOLE),
        LogitTerms(future=7, window=8),
        LogitTerms(future=WHOLE, relative_bias=biases(2)),
        LogitTerms(
            future=90, window=20, softcap=5.0, sinks=sinks, alibi=sinks.exp() / 99, relative_bias=biases(2)
        ),
    ):
        check(launcher, paged, terms, dtype)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Paged, LogitTerms, torch.dtype]:
    """Whole prompts and chunks of them, some with nothing new, in pages of every size."""
    kv_heads, group = draw(st.sampled_from([(4, 1), (2, 3), (1, 7)]))
    spans = []
    for _ in range(draw(st.integers(1, 3))):
        end = draw(st.integers(0, 140))
        spans.append((draw(st.just(0) | st.integers(0, end)), end))
    terms = LogitTerms(
        future=draw(st.just(WHOLE) | st.integers(1, 100)),
        window=draw(st.none() | st.integers(1, 100)),
        chunk=draw(st.none() | st.integers(1, 100)),
        relative_bias=draw(st.sampled_from([None, biases(kv_heads * group)])),
    )
    shape = Shape(kv_heads * group, kv_heads, 64, 64, draw(st.sampled_from(attention.BLOCK_SIZES)))
    return batch_of(spans, shape, FP16, draw(st.integers(0, 3)), draw(st.integers(0, 1000))), terms, FP16


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(launchers, batches())
def test_batches(launcher: EmulatedLauncher, batch: tuple[Paged, LogitTerms, torch.dtype]) -> None:
    check(launcher, *batch)


@pytest.mark.parametrize(
    "terms", [LogitTerms(future=WHOLE), LogitTerms(future=7, window=8)], ids=["all", "window"]
)
def test_bits_are_those_of_a_prompt_alone(terms: LogitTerms) -> None:
    """Whatever the number of multiprocessors, by which causal attention decides where to split its sums."""
    shape = Shape(4, 2, 64, 64)
    crowd = run(EmulatedLauncher(), prompts(LENGTHS, shape, FP16), terms, FP16)
    for i, part in enumerate(crowd.split(list(LENGTHS))):
        alone = prompts(LENGTHS[i : i + 1], shape, FP16, seed=i)
        assert torch.equal(run(EmulatedLauncher(multiprocessors=9), alone, terms, FP16), part)


def test_only_one_kernel_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short prompts do not go to decode, which sees no later keys."""
    launched: list[str] = []
    monkeypatch.setattr(EmulatedLauncher, "launch", lambda self, variant, *_: launched.append(variant.name))
    launcher, shape = EmulatedLauncher(capability=OLDEST), Shape(2, 2, 64, 64)
    for lengths in ((1,), (1, 1, 1), (40, 1)):
        paged = prompts(lengths, shape, FP16)
        cache = Cache(exchange_chunks(paged.plain.k), exchange_chunks(paged.plain.v))
        workspace, terms = attention.Workspace.allocate(4, "cpu"), LogitTerms.two_sided()
        attention.paged_attention(launcher, workspace, paged.q, cache, paged.batch, 1.0, terms)
    assert launched == 3 * ["prefill_attention<fp16, fp16, 64, 2, 64, 64, true>"]


def test_refusals() -> None:
    """Before a launch, by name, with what can be done."""
    large, paged = Shape(2, 2, 160, 160), prompts((5,), Shape(2, 2, 64, 64), FP16)
    launcher, whole = EmulatedLauncher(), LogitTerms(future=WHOLE)
    with pytest.raises(
        ValueError, match=r"no kernel for heads of 160.*32, 64, .*128.*CPUs serve it.*float32"
    ):
        run(launcher, prompts((5,), large, FP16), whole, FP16)
    with pytest.raises(ValueError, match=r"no kernel for heads of 64 and keys of torch.float8_e4m3fn"):
        run(launcher, paged, whole, E4M3)
    bad: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "future -1", {"future": -1}),
        (TypeError, "must be float32", {"relative_bias": biases(2).half()}),
        (ValueError, r"\[heads, 2 R\]", {"relative_bias": biases(2)[:, 1:]}),
        (ValueError, "biases of 3 heads", {"relative_bias": biases(3)}),
        (ValueError, "distances up to 32 for .* 5 keys", {"relative_bias": biases(2)[:, :64].contiguous()}),
    ]
    for error, message, changed in bad:
        with pytest.raises(error, match=message):
            run(launcher, paged, dataclasses.replace(whole, **changed), FP16)
