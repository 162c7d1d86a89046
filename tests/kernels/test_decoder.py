"""A stack of layers: one compiled call, and kernel by kernel, to the same bits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from pagewire.kernels.adapted import Adapted
from pagewire.kernels.cpu.all_reduce import AllReduce
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.cpu.tensors import DTYPES
from pagewire.kernels.data.deltas import AdapterRows, AdapterWeights, Delta, panels
from pagewire.kernels.data.integers import Integers, quantise
from pagewire.kernels.data.kv_codes import CODES
from pagewire.kernels.data.layer import Activation, Angles, Experts, Layer, Mixture, Norm, Router
from pagewire.kernels.data.paging import AttentionBatch, Cache, LogitTerms
from pagewire.kernels.data.reduced import Sum
from pagewire.kernels.data.routing import Routing
from pagewire.kernels.linear import Linear, dense_weight, pack
from pagewire.kernels.stack import Stack
from tests.kernels.batches import allocate_kv

MIXED = {"qkv": Integers(4, 16, 0), "up": Integers(6, 16, 32), "down": Integers(8, None, 128)}
WIDTH = 32  # of an expert
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, BLOCKS = 48, 4, 2, 16, 72, 6


def make_stack(
    dtype: torch.dtype,
    activation: Activation = Activation.SILU,
    bias: bool = False,
    head_norms: bool = False,
    window: int | None = None,
    terms: bool = False,
    quantised: bool = False,
    experts: bool = False,
) -> Stack:
    """Two random layers.

    With `terms` logits have a softcap, sinks and slopes. With `quantised` some matrices of the first are quantised,
    each otherwise. With `experts` the first has experts and a shared one, the second has experts only.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    def norm(size: int) -> Norm:
        return Norm(1 + random(size), 1e-5, 0.0)

    per_head = torch.linspace(-1, 3, HEADS), torch.logspace(-3, -1, HEADS)

    def mixture(is_shared: bool) -> Mixture:
        scheme = Integers(8, 16, 0) if quantised else None
        sizes = {"up": (2 * WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
        linears = {name: [linear(random(*size), scheme) for _ in range(5)] for name, size in sizes.items()}
        routing = Routing(1 + is_shared, is_shared, dtype if is_shared else torch.float32)
        router = Router(linear(4 * random(5, HIDDEN)), routing)
        gate = linear(random(1, HIDDEN)) if is_shared else None
        return Mixture(router, Experts(linears["up"], linears["down"], activation), gate)

    def linear(matrix: Tensor, scheme: Integers | None = None) -> Linear:
        weight = dense_weight(matrix) if scheme is None else quantise(dense_weight(matrix), scheme)
        return pack(weight, random(len(matrix)) if bias else None)

    def layer(schemes: dict[str, Integers], is_last: bool) -> Layer:
        sizes = {
            "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
            "out": (HIDDEN, HEADS * HEAD_DIM),
            "up": (2 * INTERMEDIATE, HIDDEN),
            "down": (HIDDEN, INTERMEDIATE),
        }
        linears = {name: linear(random(*size), schemes.get(name)) for name, size in sizes.items()}
        is_dense = not (experts and is_last)
        return Layer(
            qkv=linears["qkv"],
            out=linears["out"],
            up=linears["up"] if is_dense else None,
            down=linears["down"] if is_dense else None,
            mixture=mixture(not is_last) if experts else None,
            head_norms=(norm(HEAD_DIM), norm(HEAD_DIM)) if head_norms else None,
            attention_norm=norm(HIDDEN),
            output_norm=norm(HIDDEN),
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            scale=HEAD_DIM**-0.5,
            terms=LogitTerms(window, 0, 5.0, *per_head) if terms else LogitTerms(window),
            activation=activation,
        )

    return Stack(norm(HIDDEN), [layer(MIXED if quantised else {}, False), layer({}, True)])


def make_step(dtype: torch.dtype) -> tuple[Tensor, Angles, AttentionBatch]:
    """States, angles and batch of a request's first 20 tokens, another's single one, and one row of padding."""
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(22, HIDDEN, generator=generator).to(dtype)
    angles = torch.rand(22, HEAD_DIM // 2, generator=generator).repeat(1, 2)
    batch = AttentionBatch(
        query_start_loc=torch.tensor([0, 20, 21], dtype=torch.int32),
        seq_lens=torch.tensor([20, 3], dtype=torch.int32),
        block_table=torch.tensor([[2, 0, 4], [5, 0, 0]], dtype=torch.int32),
        slot_mapping=torch.tensor([*range(16, 24), *range(8), *range(32, 36), 42, -1]),
        max_query_len=20,
        max_seq_len=20,
    )
    return states, (angles.cos().to(dtype), angles.sin().to(dtype)), batch


def make_caches(dtype: torch.dtype) -> list[Cache]:
    """One for each of two layers."""
    return [allocate_kv(BLOCKS, KV_HEADS, 8, HEAD_DIM, HEAD_DIM, dtype) for _ in range(2)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        *({}, {"bias": True}, {"head_norms": True}, {"window": 5}, {"activation": Activation.GELU_TANH}),
        *(
            {"quantised": True, "bias": True},
            {"experts": True},
            {"experts": True, "quantised": True, "bias": True},
            {"window": 5, "terms": True},
        ),
    ],
    ids=lambda options: " ".join(options) or "plain",
)
@pytest.mark.usefixtures("served_kernels")
def test_one_call_is_all_the_kernels(dtype: torch.dtype, options: dict[str, object]) -> None:
    check_one_call(dtype, dtype, options)


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("served_kernels")
def test_one_call_over_keys_and_values_in_codes(dtype: torch.dtype, codes: torch.dtype) -> None:
    check_one_call(dtype, codes, {"window": 5})


def with_adapters(stack: Stack, dtype: torch.dtype) -> Stack:
    """The stack with an adapter of every linear layer in some rows, and another one in two."""
    linears: list[Adapted] = []

    def adapted(_: str, linear: Linear) -> Linear:
        linears.append(Adapted(linear, len(linears), lambda: rows))
        return linears[-1]

    layers = [layer.replaced(adapted) for layer in stack.layers]
    shapes = tuple((linear.out_features, linear.in_features) for linear in linears)
    generator = torch.Generator().manual_seed(2)

    def delta(rank: int, n: int, k: int) -> Delta:
        a, b = torch.randn(rank, k, generator=generator), torch.randn(n, rank, generator=generator)
        return Delta((a / k**0.5).to(dtype), panels(b.to(dtype)), 0, n, 0.25)

    adapters = [AdapterWeights([[delta(rank, *shape)] for shape in shapes], shapes, dtype) for rank in (3, 8)]
    rows = AdapterRows(torch.tensor([0, 1, 2, 5, 20, 7, 19]), torch.tensor([0, 5, 7]), adapters, 22)
    return Stack(stack.input_norm, layers)


def check_one_call(dtype: torch.dtype, cache_dtype: torch.dtype, options: dict[str, object]) -> None:
    stack = make_stack(dtype, **options)  # type: ignore[arg-type]
    if options.get("experts"):
        stack = with_adapters(stack, dtype)
    assert stack.compiled is not None
    found, wanted = [], []
    for results in (found, wanted):
        states, angles, batch = make_step(dtype)
        caches = make_caches(cache_dtype)
        normed = stack(states, batch, caches, [angles])
        results += [normed, states, *(x for cache in caches for x in (cache.k, cache.v))]
        stack.compiled = None
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert found[0].isfinite().all() and found[0].std() > 0.1 and found[2].any()


@pytest.mark.usefixtures("served_kernels")
def test_a_wider_first_input_and_states_behind_layers_are_those_of_all_the_kernels() -> None:
    stack = make_stack(torch.bfloat16)
    qkv = torch.randn(
        (HEADS + 2 * KV_HEADS) * HEAD_DIM, 2 * HIDDEN, generator=torch.Generator().manual_seed(3)
    )
    first, second = stack.layers
    wide = dataclasses.replace(first, qkv=pack(dense_weight((qkv / 10).bfloat16()), None))
    stack = Stack(None, [wide, second])
    assert stack.compiled is not None
    found, wanted = [], []
    for results in (found, wanted):
        states, angles, batch = make_step(torch.bfloat16)
        x, sums = torch.cat([states, -states.flip(1)], 1), states.clone()
        taps = {number: torch.empty_like(states) for number in (1, 2)}
        normed = stack(sums, batch, make_caches(torch.bfloat16), [angles], x, taps)
        assert torch.equal(taps[2], sums) and not torch.equal(taps[1], sums)
        results += [normed, sums, taps[1]]
        with pytest.raises((ValueError, RuntimeError)):
            stack(states, batch, make_caches(torch.bfloat16), [angles], x[:, 1:].contiguous())
        stack.compiled = None
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert found[0].isfinite().all() and found[0].std() > 0.1


def test_layers_with_products_of_another_kind_run_kernel_by_kernel(served_kernels: CpuKernels) -> None:
    stack = make_stack(torch.float32)
    first, second = stack.layers
    other = dataclasses.replace(second, down=lambda x: x)
    assert served_kernels.stack(stack.input_norm, [first, other], norm_first=True) is None
    with pytest.raises(ValueError, match=r"qkv: a weight \(64, 48\) expected"):
        served_kernels.stack(
            stack.input_norm, [first, dataclasses.replace(second, head_dim=8)], norm_first=True
        )


def test_experts_of_another_dtype_or_activation_run_kernel_by_kernel(served_kernels: CpuKernels) -> None:
    stack, other = (make_stack(dtype, experts=True) for dtype in (torch.float32, torch.bfloat16))
    first, mixture = stack.layers[0], stack.layers[0].mixture
    assert served_kernels.stack(stack.input_norm, [first], norm_first=True) is not None
    assert mixture is not None and other.layers[0].mixture is not None
    for experts in (other.layers[0].mixture.experts, dataclasses.replace(mixture.experts, activation=None)):
        changed = dataclasses.replace(first, mixture=dataclasses.replace(mixture, experts=experts))
        assert served_kernels.stack(stack.input_norm, [changed], norm_first=True) is None
    for number in (0, 6):
        routing = dataclasses.replace(mixture.router.routing, num_chosen=number)
        router = dataclasses.replace(mixture.router, routing=routing)
        changed = dataclasses.replace(first, mixture=dataclasses.replace(mixture, router=router))
        with pytest.raises(ValueError, match="cannot be chosen"):
            served_kernels.stack(stack.input_norm, [changed], norm_first=True)


@pytest.mark.usefixtures("served_kernels")
def test_what_does_not_fit_is_refused() -> None:
    stack = make_stack(torch.float32)
    assert stack.compiled is not None
    states, (cos, sin), batch = make_step(torch.float32)
    caches = make_caches(torch.float32)
    for wrong in (
        caches[:1],
        [caches[0], make_caches(torch.bfloat16)[0]],
        [Cache(caches[0].k[:, :1], caches[0].v)] * 2,
    ):
        with pytest.raises(ValueError, match="caches"):
            stack(states, batch, wrong, [(cos, sin)])
    with pytest.raises(ValueError, match="cos"):
        stack(states, batch, caches, [(cos[:5], sin[:5])])
    with pytest.raises(ValueError, match="states"):
        stack(states[:, :-1].contiguous(), batch, caches, [(cos, sin)])
    with pytest.raises(ValueError, match="angles of"):
        stack(states, batch, caches, [(cos.double(), sin.double())])
    for name, value in (
        ("slot_mapping", batch.slot_mapping[:-1]),
        ("slot_mapping", batch.slot_mapping + 1000),
        ("seq_lens", batch.seq_lens.long()),
        ("seq_lens", batch.seq_lens + 1000),
        ("block_table", batch.block_table + BLOCKS),
        ("query_start_loc", batch.query_start_loc[:-1]),
    ):
        with pytest.raises(ValueError, match="fit"):
            stack(states, dataclasses.replace(batch, **{name: value}), caches, [(cos, sin)])


class EqualRanks:
    """Two ranks that have computed the same: a `Sum`."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Twice x."""
        return 2 * x


class CompiledEqualRanks(EqualRanks):
    """The same in compiled code: a `NativeSum`."""

    def __init__(self) -> None:
        self._other = AllReduce(EqualRanks())
        self.native_all_reduce = self._other.function, self._other.ranks

    def all_reduce(self, x: Tensor) -> Tensor:
        raise AssertionError("Python was called")


class FailingRank:
    """A rank whose group is broken."""

    def all_reduce(self, x: Tensor) -> Tensor:
        raise ConnectionError("a rank is gone")


def over_ranks(ranks: Sum, experts: bool = False) -> Stack:
    """A stack whose layers have their inputs on several ranks."""
    whole = make_stack(torch.bfloat16, quantised=not experts, experts=experts)
    layers = [dataclasses.replace(layer, ranks=ranks) for layer in whole.layers]
    return Stack(whole.input_norm, layers)


class Turned:
    """A half of a layer that computes itself."""

    num_bytes = 7

    def __call__(self, x: Tensor) -> Tensor:
        return x.flip(1) / 2


WITHOUT_ATTENTION = {"qkv": None, "out": None, "mixer": Turned(), "angles": None}
WITHOUT_FEED_FORWARD = {"up": None, "down": None, "feed_forward": Turned()}


@pytest.mark.parametrize("ranks", [None, EqualRanks()], ids=["one rank", "two ranks"])
@pytest.mark.parametrize(
    "changes",
    [
        (WITHOUT_ATTENTION, {}),
        ({}, WITHOUT_ATTENTION),
        (WITHOUT_FEED_FORWARD, WITHOUT_FEED_FORWARD),
        (WITHOUT_ATTENTION | WITHOUT_FEED_FORWARD, WITHOUT_ATTENTION),
    ],
    ids=["first", "second", "feed-forward", "most"],
)
@pytest.mark.usefixtures("served_kernels")
def test_halves_that_compute_themselves(
    changes: tuple[dict[str, object], dict[str, object]], ranks: Sum | None
) -> None:
    """What lies between them is compiled, to the bits of all kernels. They are of all ranks already."""
    whole = make_stack(torch.bfloat16)
    layers = [
        dataclasses.replace(layer, ranks=ranks, **change)  # type: ignore[arg-type]
        for layer, change in zip(whole.layers, changes, strict=True)
    ]
    stack = Stack(whole.input_norm, layers)
    assert stack.compiled is not None
    caches = [
        None if "mixer" in change else cache
        for change, cache in zip(changes, make_caches(torch.bfloat16), strict=True)
    ]
    found, wanted = [], []
    for results in (found, wanted):
        states, angles, batch = make_step(torch.bfloat16)
        taps = {1: torch.empty_like(states)}
        results += [stack(states, batch, caches, [angles], None, taps), states, taps[1]]
        stack.compiled = None
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert found[0].isfinite().all() and found[0].std() > 0.1
    with pytest.raises(ValueError, match="begin with a norm"):
        Stack(None, layers, norm_first=False)
    if caches != [None, None]:
        stack = Stack(whole.input_norm, layers)
        with pytest.raises(ValueError, match="those that attend"):
            stack(states, batch, caches[::-1] if None in caches else [None, None], [angles])


def run(stack: Stack) -> Tensor:
    states, angles, batch = make_step(torch.bfloat16)
    return stack(states, batch, make_caches(torch.bfloat16), [angles])


@pytest.mark.parametrize("experts", [False, True])
def test_one_call_adds_up_over_ranks(experts: bool) -> None:
    stack = over_ranks(EqualRanks(), experts)
    assert stack.compiled is not None
    compiled, native = run(stack), run(over_ranks(CompiledEqualRanks(), experts))
    stack.compiled = None
    layer_by_layer = run(stack)
    assert torch.equal(compiled, layer_by_layer) and torch.equal(native, layer_by_layer)
    assert not torch.equal(compiled, run(make_stack(torch.bfloat16, quantised=not experts, experts=experts)))


def test_an_error_of_a_rank_ends_the_one_call() -> None:
    with pytest.raises(ConnectionError, match="a rank is gone"):
        run(over_ranks(FailingRank()))
