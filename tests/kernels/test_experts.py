"""Products of all experts of a layer at once: to the bit those of each expert, whatever stands beside a token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from pagewire.kernels.adapted import Adapted
from pagewire.kernels.cpu.experts import CompiledExperts
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.cpu.tensors import DTYPES
from pagewire.kernels.data.deltas import AdapterRows, AdapterWeights, Delta, panels
from pagewire.kernels.data.integers import Integers, integer_weight, quantise
from pagewire.kernels.data.layer import OF_EACH, Activation, Experts
from pagewire.kernels.data.weight import Linear, Weight
from pagewire.kernels.experts import GroupedExperts, one_by_one
from pagewire.kernels.linear import dense_weight, pack
from pagewire.kernels.ops import add_gated
from pagewire.kernels.reference.kernels import reference

CPU = torch.device("cpu")
HIDDEN, WIDTH, NUM_EXPERTS = 128, 96, 6
TABLE = (0, 255, 127, 128, 3, 90, 17, 254, 200, 1, 64, 129, 33, 250, 99, 180)
SCHEMES = {
    "dense": None,
    "int8": Integers(8, 32, 128),
    "int8 rows": Integers(8, None, 128),
    "int4": Integers(4, 32, 8),
    "int4 offsets": Integers(4, 32, 0),
    "table": Integers(4, 32, 128, TABLE),
}


def random_weights(
    dtype: torch.dtype, scheme: Integers | None, seed: int = 0, *, gated: bool = True
) -> tuple[list[Weight], list[Weight]]:
    """The matrices of each expert: gate and up, or up alone, and down."""
    generator = torch.Generator().manual_seed(seed)

    def weight(n: int, k: int) -> Weight:
        if scheme is not None and scheme.table is not None:
            codes = torch.randint(0, 256, (n, k // 2), generator=generator, dtype=torch.uint8)
            scales = torch.rand(n, k // 32, generator=generator) / 64 / k**0.5
            return integer_weight(scheme, codes, scales, None, dtype)
        dense = dense_weight((torch.randn(n, k, generator=generator) / k**0.5).to(dtype))
        return dense if scheme is None else quantise(dense, scheme)

    return (
        [weight((1 + gated) * WIDTH, HIDDEN) for _ in range(NUM_EXPERTS)],
        [weight(HIDDEN, WIDTH) for _ in range(NUM_EXPERTS)],
    )


def make_experts(
    dtype: torch.dtype,
    scheme: Integers | None = None,
    activation: Activation | None = Activation.SILU,
    *,
    gated: bool = True,
) -> GroupedExperts:
    """Random experts with biases; one without an activation of the kernels squares its gates."""
    up, down = random_weights(dtype, scheme, gated=gated)
    experts = Experts(
        [pack(weight, torch.full((weight.shape[0],), 0.25)) for weight in up],
        [pack(weight, torch.full((HIDDEN,), -0.5)) for weight in down],
        activation,
        gated=gated,
    )
    return GroupedExperts(experts, CPU, lambda x: x[:, :WIDTH].square() * x[:, WIDTH:])


def make_rows(num_tokens: int, dtype: torch.dtype, num_chosen: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of different magnitudes, and each one's experts and weights; the last expert has no rows."""
    generator = torch.Generator().manual_seed(1)
    x = (
        torch.randn(num_tokens, HIDDEN, generator=generator)
        * torch.rand(num_tokens, 1, generator=generator)
        * 4
    )
    logits = torch.randn(num_tokens, NUM_EXPERTS, generator=generator)
    logits[:, 2] += 2
    logits[:, -1] = -torch.inf
    weights, ids = logits.softmax(-1).topk(num_chosen)
    return x.to(dtype), ids, weights


@pytest.fixture
def threads() -> Iterator[None]:
    """Restores the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.usefixtures("served_kernels")
def test_one_call_has_the_bits_of_a_call_for_each_expert(scheme: str, dtype: torch.dtype) -> None:
    for activation in (*Activation, None):
        experts = make_experts(dtype, SCHEMES[scheme], activation)
        assert isinstance(experts.compiled, CompiledExperts) == (activation is not None)
        for num_tokens in (1, 2, 70):
            x, ids, weights = make_rows(num_tokens, dtype)
            found = experts(x, ids, weights)
            assert torch.equal(found, experts.one_by_one(x, ids, weights)), (activation, num_tokens)
            assert found.isfinite().all() and found.float().std() > 0.01


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", ["dense", "int8"])
@pytest.mark.usefixtures("served_kernels")
def test_experts_without_gates(scheme: str, dtype: torch.dtype) -> None:
    x, ids, weights = make_rows(40, dtype)
    for activation in OF_EACH:
        experts = make_experts(dtype, SCHEMES[scheme], activation, gated=False)
        assert isinstance(experts.compiled, CompiledExperts)
        found = experts(x, ids, weights)
        assert torch.equal(found, experts.one_by_one(x, ids, weights)), activation
        up, down = experts.experts.up, experts.experts.down
        inner = [reference.activate_each(linear(x), activation) for linear in up]
        each = torch.stack([linear(rows) for linear, rows in zip(down, inner, strict=True)]).float()
        expected = sum(weights[:, [c]] * each[ids[:, c], torch.arange(40)] for c in range(2))
        torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "dense"])
def test_products_have_the_bits_of_the_reference(kernels: CpuKernels, scheme: str) -> None:
    """So they are the same for every instruction set, and for tiles."""
    dtype = torch.bfloat16
    matrices = random_weights(dtype, SCHEMES[scheme])
    packed, plain = (
        [[module.pack(weight) for weight in weights] for weights in matrices]
        for module in (kernels, reference)
    )
    counts = [1, 0, 40, 3, 20, 0]
    for own, linears in zip(packed, plain, strict=True):
        product, size = kernels.grouped(own), own[0].in_features
        assert product is not None
        rows = torch.randn(sum(counts), size, generator=torch.Generator().manual_seed(2)).to(dtype)
        assert torch.equal(product(rows, counts), one_by_one(linears)(rows, counts))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", ["dense", "int8", "int4"])
@pytest.mark.usefixtures("served_kernels", "threads")
def test_a_row_has_the_same_bits_alone_and_among_others(scheme: str, dtype: torch.dtype) -> None:
    experts = make_experts(dtype, SCHEMES[scheme])
    x, ids, weights = make_rows(64, dtype, 3)
    whole = experts(x, ids, weights)
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        for row in (0, 17, 63):
            alone = (x[row : row + 1], ids[row : row + 1], weights[row : row + 1])
            assert torch.equal(experts(*alone)[0], whole[row])
            # Results are added in order of the experts, not of their weights.
            assert torch.equal(experts(alone[0], alone[1].flip(1), alone[2].flip(1))[0], whole[row])
        picked = torch.tensor([5, 5, 60, 1, 33])
        assert torch.equal(experts(x[picked], ids[picked], weights[picked]), whole[picked])


FIRST = 2  # the number of the first expert's first product
SHAPES = ((7, 5), (9, 3), *[(2 * WIDTH, HIDDEN)] * NUM_EXPERTS, *[(HIDDEN, WIDTH)] * NUM_EXPERTS, (11, 4))
OF_ROWS = [2, -1, 0, 1, 1, 2, 0]  # adapters, -1: none


def make_adapters(dtype: torch.dtype) -> list[AdapterWeights]:
    """Adapters of several ranks, of halves of the first products, and of some experts only."""
    generator = torch.Generator().manual_seed(4)

    def delta(rank: int, n: int, k: int, first: int = 0) -> Delta:
        a, b = torch.randn(rank, k, generator=generator), torch.randn(n, rank, generator=generator) / 4
        return Delta((a / k**0.5).to(dtype), panels(b.to(dtype)), first, n, 0.5)

    def up(expert: int, rank: int) -> list[Delta]:
        if rank == 5:
            return [delta(rank, WIDTH, HIDDEN), delta(3, WIDTH, HIDDEN, WIDTH)]
        return [delta(rank, 2 * WIDTH, HIDDEN)] if expert % 2 or rank == 1 else []

    return [
        AdapterWeights(
            [
                *([], []),
                *(up(expert, rank) for expert in range(NUM_EXPERTS)),
                *([delta(rank, HIDDEN, WIDTH)] for _ in range(NUM_EXPERTS)),
                [],
            ],
            SHAPES,
            dtype,
        )
        for rank in (1, 5, 18)
    ]


def adapter_rows(adapters: list[AdapterWeights], of_rows: list[int]) -> AdapterRows | None:
    used = sorted(set(of_rows) - {-1})
    if not used:
        return None
    groups = [[row for row, adapter in enumerate(of_rows) if adapter == index] for index in used]
    starts = torch.tensor([0, *map(len, groups)]).cumsum(0)
    rows = torch.tensor([row for group in groups for row in group])
    return AdapterRows(rows, starts, [adapters[index] for index in used], len(of_rows))


def adapted(
    experts: GroupedExperts, first: int = FIRST
) -> tuple[GroupedExperts, Callable[[AdapterRows | None], None]]:
    """The same experts with numbers from `first` on, and a function that sets the running rows."""
    running: list[AdapterRows | None] = [None]

    def numbered(linears: Sequence[Linear], number: int) -> list[Linear]:
        return [Adapted(linear, i, lambda: running[0]) for i, linear in enumerate(linears, number)]

    held = experts.experts
    up, down = numbered(held.up, first), numbered(held.down, first + NUM_EXPERTS)
    changed = GroupedExperts(dataclasses.replace(held, up=up, down=down), CPU, experts.between, experts.after)
    return changed, lambda rows: running.__setitem__(0, rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("served_kernels", "threads")
def test_adapters_on_experts_in_one_call_and_expert_by_expert(dtype: torch.dtype) -> None:
    """To the same bits, which do not depend on the other rows and their adapters."""
    (experts, run), (other, run_other) = (
        adapted(make_experts(dtype)),
        adapted(make_experts(dtype, activation=None)),
    )
    adapters, of_rows = make_adapters(dtype), (OF_ROWS * 6)[:40]
    x, ids, weights = make_rows(len(of_rows), dtype, 3)
    rows = adapter_rows(adapters, of_rows)
    plain = experts(x, ids, weights)
    run(rows)
    run_other(rows)
    found = experts(x, ids, weights)
    assert torch.equal(found, experts.one_by_one(x, ids, weights))
    assert torch.equal(other(x, ids, weights), other.one_by_one(x, ids, weights))
    for row, adapter in enumerate(of_rows):
        assert torch.equal(found[row], plain[row]) == (adapter < 0)
    for row in range(7):
        torch.set_num_threads(1 + row % 3)
        alone = (x[row : row + 1], ids[row : row + 1], weights[row : row + 1])
        run(adapter_rows(adapters, [of_rows[row]]))
        assert torch.equal(experts(*alone)[0], found[row])


@pytest.mark.usefixtures("served_kernels")
def test_adapted_experts_are_those_with_other_weights() -> None:
    up, down = random_weights(torch.float32, None)
    adapters = make_adapters(torch.float32)
    x, ids, weights = make_rows(6, torch.float32)
    plain, run = adapted(make_experts(torch.float32))
    for index, adapter in enumerate(adapters):
        changed: list[Tensor] = []
        for matrix, deltas in zip([*up, *down], adapter.products[FIRST:], strict=False):
            dense = matrix.dense().clone()
            for delta in deltas:
                dense[delta.first : delta.first + delta.num_out] += delta.scale * delta.second @ delta.a
            changed.append(dense)
        biases = [torch.full((2 * WIDTH,), 0.25), torch.full((HIDDEN,), -0.5)]
        linears = [
            pack(dense_weight(matrix), biases[number >= NUM_EXPERTS]) for number, matrix in enumerate(changed)
        ]
        merged = GroupedExperts(Experts(linears[:NUM_EXPERTS], linears[NUM_EXPERTS:], Activation.SILU), CPU)
        run(adapter_rows(adapters, [index] * 6))
        found = plain(x, ids, weights)
        torch.testing.assert_close(found, merged(x, ids, weights), rtol=1e-4, atol=1e-4)
    for num_rows, first in ((5, FIRST), (6, FIRST + 1)):
        wrong, run = adapted(make_experts(torch.float32), first)
        run(adapter_rows(adapters, [0] * num_rows))
        with pytest.raises(ValueError, match=r"adapters of another model"):
            wrong(x, ids, weights)
    held = plain.experts
    with pytest.raises(ValueError, match="follow one another"):
        GroupedExperts(dataclasses.replace(held, up=held.up[::-1]), CPU)


@pytest.mark.usefixtures("served_kernels")
def test_it_is_the_weighted_sum_of_experts() -> None:
    up, down = random_weights(torch.float32, None)
    experts = make_experts(torch.float32)
    x, ids, weights = make_rows(20, torch.float32)
    expected = torch.zeros(20, HIDDEN, dtype=torch.float64)
    for token, (chosen, shares) in enumerate(zip(ids, weights, strict=True)):
        for expert, share in zip(chosen, shares, strict=True):
            gate, plain = (up[expert].dense().double() @ x[token].double() + 0.25).chunk(2)
            gated = torch.nn.functional.silu(gate) * plain
            expected[token] += share * (down[expert].dense().double() @ gated - 0.5)
    assert (experts(x, ids, weights) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.usefixtures("served_kernels")
def test_experts_of_different_schemes() -> None:
    every = [make_experts(torch.bfloat16, SCHEMES[name]).experts for name in ("dense", "int8", "int4")]
    up, down = ([getattr(every[i % 3], name)[i] for i in range(NUM_EXPERTS)] for name in ("up", "down"))
    experts = GroupedExperts(Experts(up, down, Activation.SILU), CPU)
    assert experts.compiled is not None
    x, ids, weights = make_rows(30, torch.bfloat16)
    assert torch.equal(experts(x, ids, weights), experts.one_by_one(x, ids, weights))


def test_without_compiled_kernels_experts_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewire.kernels.cpu.kernels.load", lambda: None)
    experts = make_experts(torch.float32)
    assert experts.compiled is None
    x, ids, weights = make_rows(12, torch.float32)
    whole = experts(x, ids, weights)
    assert torch.equal(experts(x[3:4], ids[3:4], weights[3:4])[0], whole[3])
    assert experts(x[:0], ids[:0], weights[:0]).shape == (0, HIDDEN)
    with pytest.raises(ValueError, match="none of 6 experts"):
        experts(x, ids + 5, weights)


def test_what_does_not_fit_is_refused(best_kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewire.kernels.cpu.kernels.load", lambda: best_kernels)
    experts = make_experts(torch.float32)
    assert experts.compiled is not None
    x, ids, weights = make_rows(3, torch.float32)
    assert experts(x[:0], ids[:0], weights[:0]).shape == (0, HIDDEN)
    for wrong in (-1, NUM_EXPERTS):
        with pytest.raises(ValueError, match="none of 6 experts"):
            experts(x, torch.full_like(ids, wrong), weights)
    for arguments in ((x, ids.int(), weights), (x, ids[:2], weights), (x, ids, weights[:, :1])):
        with pytest.raises(ValueError, match="for x"):
            experts(*arguments)
    with pytest.raises(ValueError, match="rows of 128"):
        experts(x.bfloat16(), ids, weights)
    held = experts.experts
    product = best_kernels.grouped(held.up)
    assert product is not None
    for counts in ([3], [4, 0, 0, 0, 0, 0], [4, -1, 0, 0, 0, 0]):
        with pytest.raises(ValueError, match="3 rows"):
            product(x, counts)
    with pytest.raises(ValueError, match="experts differ"):
        best_kernels.experts(Experts([*held.up[:5], held.down[0]], held.down, Activation.SILU))
    with pytest.raises(ValueError, match="wide"):
        best_kernels.experts(Experts(held.down, held.up, Activation.SILU))
    with pytest.raises(ValueError, match="wide"):
        best_kernels.experts(Experts(held.up, held.down, Activation.SILU, gated=False))
    plain = make_experts(torch.float32, gated=False).experts
    with pytest.raises(ValueError, match=r"with Activation\.CLAMPED_SWIGLU"):
        best_kernels.experts(dataclasses.replace(plain, activation=Activation.CLAMPED_SWIGLU))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("served_kernels")
def test_weights_of_what_experts_take(dtype: torch.dtype) -> None:
    plain = make_experts(dtype)
    experts = GroupedExperts(dataclasses.replace(plain.experts, weighs_inputs=True), CPU)
    assert experts.compiled is not None
    for num_chosen in (1, 2):
        x, ids, weights = make_rows(40, dtype, num_chosen)
        found = experts(x, ids, weights)
        assert torch.equal(found, experts.one_by_one(x, ids, weights))
        if num_chosen == 1:
            weighed = (x.float() * weights).to(dtype)
            assert torch.equal(found, plain(weighed, ids, torch.ones_like(weights)))
            assert not torch.equal(found, plain(x, ids, weights))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("served_kernels")
def test_adding_a_shared_expert(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    out, x = (torch.randn(400, 100, generator=generator).to(dtype) for _ in range(2))
    gate = (3 * torch.randn(400, 1, generator=generator)).to(dtype)
    found, expected = out.clone(), out.clone()
    add_gated(found, x, gate)
    reference.add_gated(expected, x, gate)
    rtol = {torch.float32: 1e-5, torch.float16: 2**-9}.get(dtype, 2**-6)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol)
    alone = out[7:8].clone()
    add_gated(alone, x[7:8], gate[7:8])
    assert torch.equal(alone[0], found[7])
    with pytest.raises(ValueError, match="gates"):
        add_gated(found, x, gate[:5])
