"""Experts on an emulated GPU: the bits of a product for each expert, in any batch, whatever the choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pagewire.kernels.cuda.experts import CudaExperts, place, why_not
from pagewire.kernels.cuda.kernels import CudaKernels
from pagewire.kernels.cuda.source import Variant
from pagewire.kernels.data.integers import Integers
from pagewire.kernels.data.layer import Activation, Experts
from pagewire.kernels.data.weight import Linear, UnpackedLinear, Weight, dense_weight
from pagewire.workers.device.waits import WaitFinder
from tests.kernels.cuda.emulate import ORDERS, Edit, EmulatedLauncher, guarded
from tests.kernels.cuda.linear.test_linear import BF16, FP16, FP32, TABLE, make_floats, make_weight

HIDDEN, INNER = 96, 64
Make = Callable[[int, int, torch.dtype], Weight]
KINDS: dict[str, Make] = {
    "dense": lambda n, k, dtype: dense_weight(
        torch.randn(n, k, generator=torch.Generator().manual_seed(n)).to(dtype) / k**0.5
    ),
    "int4": lambda n, k, dtype: make_weight(Integers(4, 32, 8), n, k, dtype, FP16, False),
    "int4, offsets": lambda n, k, dtype: make_weight(Integers(4, 16, 0), n, k, dtype, BF16, True),
    "table": lambda n, k, dtype: make_weight(Integers(4, 32, 130, TABLE), n, k, dtype, FP16, False),
    "int8": lambda n, k, dtype: make_weight(Integers(8, None, 128), n, k, dtype, FP32, False),
    "e4m3": lambda n, k, dtype: make_floats(None, n, k, dtype),
    "e4m3, groups": lambda n, k, dtype: make_floats(32, n, k, dtype),
}


def make_experts(kernels: CudaKernels, kind: str, count: int, dtype: torch.dtype = BF16) -> Experts:
    """Experts whose weights differ, as do their biases."""

    def linears(n: int, k: int) -> list[Linear]:
        weight, result = KINDS[kind](n, k, dtype), []
        for number in range(count):
            own = weight.take(torch.arange(n).roll(number))
            if kind == "dense":
                own = dense_weight(guarded(own.dense().clone()))
            result.append(kernels.pack(own, torch.full((n,), number / 8).to(dtype)))
        return result

    return Experts(linears(2 * INNER, HIDDEN), linears(HIDDEN, INNER), Activation.SILU)


def grouped(kernels: CudaKernels, experts: Experts) -> CudaExperts:
    """The experts as their kernels compute them."""
    return CudaExperts(kernels.launcher, experts, kernels.activate_and_mul)


def make_rows(
    num_tokens: int, count: int, chosen: int, dtype: torch.dtype = BF16
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, each one's experts, and their weights. The last expert has no rows where there are others."""
    generator = torch.Generator().manual_seed(num_tokens + count)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype) / 4
    logits = torch.randn(num_tokens, count, generator=generator)
    if chosen < count:
        logits[:, -1] = -torch.inf
    weights, ids = logits.softmax(-1).topk(chosen)
    return x, ids, weights


def one_each(kernels: CudaKernels, experts: Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The sum by a product for each expert's rows. PyTorch multiplies dense ones, in another order of sums."""

    def product(linear: Linear, row: Tensor) -> Tensor:
        return linear(row[None])[0]

    assert experts.activation is not None
    out = torch.zeros(x.shape)
    for token, chosen in enumerate(ids):
        for choice in chosen.argsort(stable=True):
            up = product(experts.up[chosen[choice]], x[token])
            rows = kernels.activate_and_mul(up[None], experts.activation)[0]
            out[token] += weights[token, choice] * product(experts.down[chosen[choice]], rows).float()
    return out.to(x.dtype)


def check(kernels: CudaKernels, kind: str, experts: Experts, inputs: Sequence[Tensor]) -> Tensor:
    """The result of the kernels, which is that of a product for each expert."""
    products = grouped(kernels, experts)
    x, ids, weights = inputs
    with WaitFinder():  # type: ignore[no-untyped-call]
        found = products(guarded(x), guarded(ids), guarded(weights))
    expected = one_each(kernels, experts, x, ids, weights)
    if kind == "dense":
        torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6)
    else:
        assert torch.equal(found, expected)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_of_a_product_for_each_expert(launcher: EmulatedLauncher, kind: str) -> None:
    """By tiles of 16 rows, and of 64. Each row has its bits alone, too."""
    kernels = CudaKernels(launcher, "cpu")
    experts = make_experts(kernels, kind, 4)
    crowd = None
    for num_tokens in (90, 1, 17):
        x, ids, weights = (part[:num_tokens] for part in make_rows(90, 4, 2))
        found = check(kernels, kind, experts, (x, ids, weights))
        crowd = found if crowd is None else crowd
        assert torch.equal(found, crowd[:num_tokens])


@pytest.mark.parametrize(("count", "chosen"), [(4, 1), (4, 4), (5, 3), (16, 8), (128, 8)])
@pytest.mark.parametrize("kind", ["dense", "int4"])
def test_numbers_of_experts(kind: str, count: int, chosen: int) -> None:
    kernels = CudaKernels(EmulatedLauncher(ORDERS[1]), "cpu")
    experts = make_experts(kernels, kind, count, FP16)
    for num_tokens in (1, 5, 40):
        check(kernels, kind, experts, make_rows(num_tokens, count, chosen, FP16))


def test_all_rows_of_one_expert_and_the_same_expert_twice() -> None:
    kernels = CudaKernels(EmulatedLauncher(), "cpu")
    experts = make_experts(kernels, "int8", 4)
    x, ids, weights = make_rows(70, 4, 2)
    check(kernels, "int8", experts, (x, torch.full_like(ids, 2), weights))


def test_an_id_of_no_expert_adds_nothing() -> None:
    kernels = CudaKernels(EmulatedLauncher(), "cpu")
    products = grouped(kernels, make_experts(kernels, "int4", 4))
    x, ids, weights = make_rows(9, 4, 2)
    wrong, without = ids.clone(), weights.clone()
    wrong[0, 0], wrong[3, 1], wrong[5] = -1, 4, 1 << 40
    without[0, 0] = without[3, 1] = 0
    without[5] = 0
    found = products(x, wrong, weights)
    assert torch.equal(found, products(x, ids, without)) and not found[5].any()
    assert not products(x, torch.full_like(ids, 9), weights).any()


def test_the_number_of_launches_does_not_depend_on_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    launched, launch = list[str](), EmulatedLauncher.launch

    def count(self: EmulatedLauncher, variant: Variant, *others: Any) -> None:
        launched.append(variant.name.partition("<")[0])
        launch(self, variant, *others)

    monkeypatch.setattr(EmulatedLauncher, "launch", count)
    kernels = CudaKernels(EmulatedLauncher(), "cpu")
    products = grouped(kernels, make_experts(kernels, "int4", 4))
    for num_tokens in (1, 90):
        products(*make_rows(num_tokens, 4, 2))
    few, many = launched[:5], launched[5:]
    assert few == ["place_rows", "experts_few", "gate", "experts_few", "add_experts"]
    assert many == [name.replace("few", "many") for name in few]


@pytest.mark.parametrize("tile_rows", [16, 64])
def test_places(launcher: EmulatedLauncher, tile_rows: int) -> None:
    """In order of the expert, and then of the choice; a tile of one expert's rows for each of them."""
    for num_tokens, count, chosen in ((1, 4, 1), (1, 128, 8), (300, 3, 2), (77, 300, 5), (1000, 8, 3)):
        ids = make_rows(num_tokens, count, chosen)[1]
        placed = place(launcher, guarded(ids), count, tile_rows)
        order = ids.flatten().argsort(stable=True)
        assert torch.equal(placed.sources.long(), order // chosen)
        assert torch.equal(placed.places[order].long(), torch.arange(len(order)))
        tiles = placed.tiles[placed.tiles[:, 0] >= 0]
        rows = [row for _, first, last in tiles.tolist() for row in range(first, last)]
        assert rows == [*range(len(order))] and len(placed.tiles) <= len(order)
        for expert, first, last in tiles.tolist():
            assert 0 < last - first <= tile_rows and (ids.flatten()[order[first:last]] == expert).all()


def test_what_has_no_kernel() -> None:
    kernels = CudaKernels(EmulatedLauncher(), "cpu")
    dense, packed = make_experts(kernels, "dense", 4), make_experts(kernels, "int4", 4)
    mixed = Experts([*dense.up[:2], *packed.up[2:]], dense.down, Activation.SILU)
    assert "differ in the form" in str(why_not(mixed))
    narrow = [kernels.pack(dense_weight(torch.randn(64, 40).to(BF16)))]
    assert "64 x 40 are no multiples" in str(why_not(Experts(narrow, narrow, Activation.SILU)))
    transposed = dense_weight(torch.randn(32, 64).to(BF16).T)
    packed_rows = [kernels.pack(transposed)]
    assert why_not(Experts(packed_rows, packed_rows, Activation.SILU)) is None
    strided = [UnpackedLinear(functional.linear, transposed, None)]
    assert "not contiguous" in str(why_not(Experts(strided, strided, Activation.SILU)))
    whole = [kernels.pack(dense_weight(torch.randn(64, 64)))]
    assert "not torch.float32" in str(why_not(Experts(whole, whole, Activation.SILU)))
    assert "no such activation" in str(why_not(Experts(dense.up, dense.down, None)))
    assert "take gates" in str(why_not(Experts(dense.down, dense.up, Activation.RELU_SQUARED, gated=False)))
    with pytest.raises(ValueError, match="no kernel for these experts"):
        CudaExperts(EmulatedLauncher(), mixed, kernels.activate_and_mul)
    products, (x, ids, weights) = grouped(kernels, dense), make_rows(3, 4, 2)
    assert products(x[:0], ids[:0], weights[:0]).shape == (0, HIDDEN)
    for arguments in ((x, ids.int(), weights), (x, ids[:2], weights), (x, ids, weights[:, :1])):
        with pytest.raises(ValueError, match="for x"):
            products(*arguments)


SOURCE = "experts.cu"
FAULTS = [
    (SOURCE, "counts[i] = 0;\n", "counts[i] = 1;\n"),
    (SOURCE, "row += of_warps[i];", "row += of_warps[0];"),
    (SOURCE, "((1u << lane) - 1)", "((2u << lane) - 1)"),
    (SOURCE, "        row += __popc(same);\n", ""),
    (SOURCE, "            p.places[choice] = -1;", "            p.places[choice] = 0;"),
    (SOURCE, "if (i >= expert) continue;", "if (i > expert) continue;"),
    (SOURCE, "min(first + p.tile_rows, last)", "first + p.tile_rows"),
    (SOURCE, "p.tiles[3 * i] = -1;", "p.tiles[3 * i] = 0;"),
    (SOURCE, "id < p.num_experts ?", "id <= p.num_experts ?"),
    (SOURCE, "choice / p.num_chosen", "choice"),
    (SOURCE, "4 * max(tile[0], 0)", "4 * blockIdx.y"),
    (SOURCE, "tile[0] < 0 ? 0 : tile[2]", "tile[0] < 0 ? 0 : tile[1] + 16"),
    (SOURCE, "if (place < 0) continue;", ""),
    (SOURCE, "order[before] = i;", "order[i] = i;"),
    (SOURCE, "    __syncthreads();\n    for (int chunk", "    for (int chunk"),
    (SOURCE, "__fmul_rn(weight, pair.y)", "pair.y"),
    ("linear.cuh", "sources ? sources[row] : row", "row"),
    ("linear.cuh", "8 * j + lane % 8, lane / 8", "8 * j + lane % 8, lane / 8 ^ 1"),
    ("linear.cuh", "words[j][2 * half], b[1]", "words[j][half], b[1]"),
    ("linear.cuh", "(row * p.steps + step) * ROW_BYTES", "(row * p.steps) * ROW_BYTES"),
]


def check_all(launcher: EmulatedLauncher) -> None:
    """What the faults would change. All that is written lies in front of inaccessible memory."""
    empty = torch.empty
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *shape, **options: guarded(empty(*shape, **options)))
        check_results(launcher)


def check_results(launcher: EmulatedLauncher) -> None:
    kernels = CudaKernels(launcher, "cpu")
    experts = make_experts(kernels, "dense", 5)
    for num_tokens, chosen in ((90, 3), (3, 2)):
        x, ids, weights = make_rows(num_tokens, 5, chosen)
        products = grouped(kernels, experts)
        order = ids.flatten().argsort(stable=True)
        placed = place(launcher, ids, 5, 16)
        assert torch.equal(placed.places[order].long(), torch.arange(len(order)))
        assert not (placed.tiles[:, 0] == 0).sum() > 1 + (ids == 0).sum() // 16
        exact = one_each(kernels, experts, x, ids, weights)
        found = products(x, ids, weights)
        torch.testing.assert_close(found, exact, rtol=2**-6, atol=2**-6)
        alone = products(x[1:2], ids[1:2], weights[1:2])
        assert torch.equal(alone[0], found[1])
        assert torch.equal(products(x, ids.flip(1), weights.flip(1)), found)
        assert torch.equal(
            products(x, ids.where(ids != 0, 5), weights), products(x, ids, weights.where(ids != 0, 0))
        )
        broken = weights.where(ids != 1, torch.nan)
        assert products(x, ids.where(ids != 1, -1), broken).isfinite().all()
        first, last = ids[:, :2].sort(1).values.unbind(1)  # of one expert twice nothing is left, if in order
        twice = products(
            x,
            torch.stack([first, last, first], 1),
            torch.tensor([[2.0**20, 1, -(2.0**20)]]).expand(len(x), 3),
        )
        assert torch.equal(twice, products(x, last[:, None], torch.ones(len(x), 1)))


@pytest.mark.planted_faults
@pytest.mark.parametrize(("file", "old", "new"), FAULTS, ids=lambda value: str(value).strip()[:40])
def test_faults_are_caught(catch: Callable[..., None], file: str, old: str, new: str) -> None:
    for order in ORDERS:
        check_all(EmulatedLauncher(order))
    catch(check_all, Edit(file, old, new))
