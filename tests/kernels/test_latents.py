"""Attention to latents: one call, kernel by kernel, and by expanded keys and values in plain torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewire.kernels.adapted import Adapted
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.cpu.tensors import DTYPES
from pagewire.kernels.data.deltas import AdapterRows, AdapterWeights, Delta, panels
from pagewire.kernels.data.kv_codes import EIGHT_BITS, row_width
from pagewire.kernels.data.latents import LatentHeads
from pagewire.kernels.data.layer import Angles, Indexer, Latents, Layer
from pagewire.kernels.data.paging import AttentionBatch, Cache
from pagewire.kernels.linear import Linear, dense_weight, pack
from pagewire.kernels.stack import Stack, by_halves
from tests.kernels.test_decoder import BLOCKS, HEADS, HIDDEN, make_caches, make_stack, make_step
from tests.kernels.test_layer_forms import layer_norm, norm, of_dtype

NOPE, ROPE, RANK, VALUE, QUERY_RANK = 12, 8, 20, 10, 24
INDEX_HEADS, INDEX_SIZE, NUM_CHOSEN = 5, 12, 6
KEY = RANK + ROPE
SCALE = (NOPE + ROPE) ** -0.5
FORMS: dict[str, dict[str, Any]] = {
    "own queries": {},
    "queries at once": {"own_queries": False},
    "interleaved": {"interleaved": True},
    "not turned": {"angles": None},
}
INDEXED = {"indexed": {"indexed": True}, "indexed by neighbours": {"indexed": True, "interleaved": True}}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


@dataclasses.dataclass
class Weights:
    """The matrices of a layer's attention, and its norms."""

    first: Tensor
    queries: Tensor | None
    heads: Tensor
    out: Tensor

    @classmethod
    def of(cls, seed: int, own_queries: bool) -> Weights:
        """Random ones. heads: [H, nope + Dv, rank]."""
        begin = QUERY_RANK if own_queries else HEADS * (NOPE + ROPE)
        return cls(
            random(begin + KEY, HIDDEN, seed=seed),
            random(HEADS * (NOPE + ROPE), QUERY_RANK, seed=seed + 1) if own_queries else None,
            random(HEADS, NOPE + VALUE, RANK, seed=seed + 2),
            random(HIDDEN, HEADS * VALUE, seed=seed + 3),
        )


NORMS = norm(QUERY_RANK), norm(RANK)


INDEX_NORM = layer_norm(INDEX_SIZE)


def latent_stack(
    dtype: torch.dtype,
    own_queries: bool = True,
    interleaved: bool = False,
    angles: int | None = 0,
    indexed: bool = False,
) -> Stack:
    """Two layers. indexed: the first one has an indexer, and the second one follows it."""

    def linear(matrix: Tensor) -> Linear:
        return pack(dense_weight(matrix.to(dtype)))

    def layer(plain: Layer, weights: Weights) -> Layer:
        heads = LatentHeads(
            [linear(head[:NOPE].T.contiguous()) for head in weights.heads],
            [linear(head[NOPE:]) for head in weights.heads],
        )
        query_norm, latent_norm = of_dtype(NORMS, dtype)
        queries = None if weights.queries is None else linear(weights.queries)
        return dataclasses.replace(
            plain,
            qkv=linear(weights.first),
            out=linear(weights.out),
            latents=Latents(
                query_norm if own_queries else None,
                queries,
                latent_norm,
                heads,
                indexer=indexer(interleaved) if indexed and plain is first else None,
                follows=indexed and plain is not first,
            ),
            num_kv_heads=1,
            head_dim=KEY,
            scale=SCALE,
            interleaved=interleaved,
            angles=angles,
        )

    def indexer(interleaved: bool) -> Indexer:
        return Indexer(
            keys=linear(random(INDEX_SIZE, HIDDEN, seed=31)),
            norm=of_dtype(INDEX_NORM, dtype),
            queries=linear(random(INDEX_HEADS * INDEX_SIZE, QUERY_RANK, seed=32)),
            weights=linear(random(INDEX_HEADS, HIDDEN, seed=33)),
            num_chosen=NUM_CHOSEN,
            interleaved=interleaved,
        )

    plain = make_stack(dtype)
    first = plain.layers[0]
    layers = [layer(each, Weights.of(10 * i, own_queries)) for i, each in enumerate(plain.layers)]
    return Stack(plain.input_norm, layers)


def latent_caches(
    dtype: torch.dtype, count: int = 2, index_dtype: torch.dtype = torch.float32
) -> list[Cache]:
    """One for each layer, all with keys of an indexer."""
    keys = [torch.zeros(BLOCKS, 1, 8, row_width(KEY, dtype), dtype=dtype) for _ in range(count)]
    return [
        dataclasses.replace(
            Cache.of_keys(k, RANK), index=torch.zeros(BLOCKS, 8, INDEX_SIZE, dtype=index_dtype)
        )
        for k in keys
    ]


def latent_step(dtype: torch.dtype) -> tuple[Tensor, Angles, AttentionBatch]:
    """See `make_step`."""
    states, (cos, sin), batch = make_step(dtype)
    return states, (cos[:, :ROPE].contiguous(), sin[:, :ROPE].contiguous()), batch


def check_one_call(
    stack: Stack, dtype: torch.dtype, cache_dtype: torch.dtype, plain: Collection[int] = ()
) -> Tensor:
    """Run a stack both ways, to the same bits; returns the result. plain: the layers that have no latents."""
    compiled = stack.compiled
    assert compiled is not None
    found, wanted = [], []
    for results in (found, wanted):
        states, angles, batch = latent_step(dtype)
        caches = latent_caches(cache_dtype, index_dtype=dtype)
        for number in plain:
            caches[number] = make_caches(cache_dtype)[number]
        memory = [x for cache in caches for x in cache.memory]
        results += [stack(states, batch, caches, [angles]), states, *memory]
        stack.compiled = None
    stack.compiled = compiled
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert found[0].isfinite().all() and found[0].std() > 0.1 and found[2].any()
    return found[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS | INDEXED)
@pytest.mark.usefixtures("served_kernels")
def test_one_call_is_all_the_kernels(form: str, dtype: torch.dtype) -> None:
    check_one_call(latent_stack(dtype, **(FORMS | INDEXED)[form]), dtype, dtype)


@pytest.mark.usefixtures("served_kernels")
def test_an_indexer_hides_keys() -> None:
    """From the first token on that has more keys before it than the indexer chooses."""
    indexed, whole = (
        check_one_call(latent_stack(torch.float32, indexed=each), torch.float32, torch.float32)
        for each in (True, False)
    )
    assert torch.equal(indexed[:NUM_CHOSEN], whole[:NUM_CHOSEN]) and torch.equal(indexed[20], whole[20])
    assert not (indexed[NUM_CHOSEN:20] == whole[NUM_CHOSEN:20]).all(1).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("served_kernels")
def test_one_call_over_a_cache_of_8_bits(dtype: torch.dtype) -> None:
    check_one_call(latent_stack(dtype), dtype, EIGHT_BITS)


@pytest.mark.usefixtures("served_kernels")
def test_a_row_has_the_bits_that_it_has_alone() -> None:
    """The last token of the longer prompt, behind all others, and after them in a step of its own."""
    stack = latent_stack(torch.bfloat16)
    states, (cos, sin), batch = latent_step(torch.bfloat16)
    whole = stack(states.clone(), batch, latent_caches(torch.bfloat16), [(cos, sin)])
    caches = latent_caches(torch.bfloat16)
    lengths = torch.tensor([19], dtype=torch.int32)
    first = dataclasses.replace(
        batch,
        query_start_loc=torch.tensor([0, 19], dtype=torch.int32),
        seq_lens=lengths,
        block_table=batch.block_table[:1],
        slot_mapping=batch.slot_mapping[:19],
    )
    stack(states[:19].clone(), first, caches, [(cos[:19], sin[:19])])
    last = dataclasses.replace(
        first,
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=lengths + 1,
        slot_mapping=batch.slot_mapping[19:20],
        max_query_len=1,
    )
    alone = stack(states[19:20].clone(), last, caches, [(cos[19:20], sin[19:20])])
    assert torch.equal(alone[0], whole[19])


def expanded(weights: Weights, x: Tensor, angles: Angles | None, interleaved: bool) -> Tensor:
    """The attention half of a prompt x [T, H] by keys and values of all heads."""
    num_tokens = len(x)
    given, latent, rotated = (x @ weights.first.T).split([len(weights.first) - KEY, RANK, ROPE], 1)
    query_norm, latent_norm = NORMS

    def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight

    if weights.queries is not None:
        given = normed(given, query_norm.weight, query_norm.eps) @ weights.queries.T
    queries = given.view(num_tokens, HEADS, NOPE + ROPE)
    latent = normed(latent, latent_norm.weight, latent_norm.eps)

    def turned(heads: Tensor) -> Tensor:
        if angles is None:
            return heads
        heads = by_halves(heads, ROPE) if interleaved else heads
        first, second = heads.chunk(2, -1)
        cos, sin = (table[:, None] for table in angles)
        return heads * cos + torch.cat([-second, first], -1) * sin

    both = torch.einsum("tr,hnr->thn", latent, weights.heads)
    shared = turned(rotated[:, None]).expand(-1, HEADS, -1)
    keys, values = torch.cat([both[..., :NOPE], shared], -1), both[..., NOPE:]
    queries = torch.cat([queries[..., :NOPE], turned(queries[..., NOPE:])], -1)
    logits = torch.einsum("qhn,khn->hqk", queries, keys) * SCALE
    later = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    shares = logits.masked_fill(later, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khn->qhn", shares, values).flatten(1) @ weights.out.T


@pytest.mark.parametrize("form", FORMS)
def test_it_is_attention_to_expanded_keys_and_values(form: str) -> None:
    """The states behind the first layer's attention, which a layer without a feed-forward half gives."""
    fields = FORMS[form]
    stack = latent_stack(torch.float32, **fields)
    layer = dataclasses.replace(stack.layers[0], up=None, down=None, feed_forward=Nothing())
    single = Stack(stack.input_norm, [layer])
    states, angles, batch = latent_step(torch.float32)
    begin = states.clone()
    single(states, batch, latent_caches(torch.float32, 1), [angles])
    assert stack.input_norm is not None
    weight, eps = stack.input_norm.weight, stack.input_norm.eps
    x = begin[:20] * (begin[:20].pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight
    own = None if fields.get("angles", 0) is None else (angles[0][:20], angles[1][:20])
    weights = Weights.of(0, fields.get("own_queries", True))
    wanted = begin[:20] + expanded(weights, x, own, fields.get("interleaved", False))
    torch.testing.assert_close(states[:20], wanted, rtol=1e-4, atol=1e-4)


class Nothing:
    """A feed-forward half that gives 0."""

    num_bytes = 0

    def __call__(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


def adapted_stack(dtype: torch.dtype, heads: bool) -> Stack:
    """With an adapter of every linear layer in some rows, and of the heads' matrices if wanted."""
    stack = latent_stack(dtype)
    linears: list[Adapted] = []

    def adapted(_: str, linear: Linear) -> Linear:
        linears.append(Adapted(linear, len(linears), lambda: rows))
        return linears[-1]

    layers = [layer.replaced(adapted) for layer in stack.layers]
    shapes = tuple((linear.out_features, linear.in_features) for linear in linears)

    def delta(n: int, k: int) -> Delta:
        a, b = random(4, k, seed=1), random(n, 4, seed=2)
        return Delta(a.to(dtype), panels(b.to(dtype)), 0, n, 0.5)

    products = [
        [] if isinstance(linear.linear, LatentHeads) and not heads else [delta(*shape)]
        for linear, shape in zip(linears, shapes, strict=True)
    ]
    adapter = AdapterWeights(products, shapes, dtype)
    rows = AdapterRows(torch.tensor([0, 1, 2, 5, 20]), torch.tensor([0, 5]), [adapter], 22)
    return Stack(stack.input_norm, layers)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("served_kernels")
def test_adapters_of_all_but_the_heads_are_compiled(dtype: torch.dtype) -> None:
    changed = check_one_call(adapted_stack(dtype, heads=False), dtype, dtype)
    plain = check_one_call(latent_stack(dtype), dtype, dtype)
    assert not torch.equal(changed[0], plain[0]) and torch.equal(changed[21], plain[21])


@pytest.mark.usefixtures("served_kernels")
def test_adapters_of_the_heads_run_kernel_by_kernel() -> None:
    stack = adapted_stack(torch.float32, heads=True)
    assert stack.compiled is not None
    stack.compiled = refuse
    states, angles, batch = latent_step(torch.float32)
    changed = stack(states, batch, latent_caches(torch.float32), [angles])
    others = check_one_call(adapted_stack(torch.float32, heads=False), torch.float32, torch.float32)
    assert not torch.equal(changed[:3], others[:3])
    assert torch.equal(changed[21], others[21])


@pytest.mark.usefixtures("served_kernels")
def test_layers_of_two_forms_are_one_call() -> None:
    stack, plain = latent_stack(torch.float32), make_stack(torch.float32)
    first, _ = stack.layers
    others = plain.layers[1], latent_stack(torch.float32, own_queries=False).layers[1]
    for other, numbers in zip(others, ((1,), ()), strict=True):
        mixed = Stack(stack.input_norm, [first, other])
        check_one_call(mixed, torch.float32, torch.float32, numbers)


def test_heads_of_which_one_lacks_its_values_are_refused(served_kernels: CpuKernels) -> None:
    stack = latent_stack(torch.float32)
    _, second = stack.layers
    assert second.latents is not None
    few = dataclasses.replace(second.latents, heads=few_heads(second.latents.heads))
    with pytest.raises(ValueError, match="as many heads"):
        served_kernels.stack(stack.input_norm, [dataclasses.replace(second, latents=few)], norm_first=True)


def refuse(*_: object) -> Tensor:
    raise AssertionError("the one call was made")


def few_heads(heads: Linear) -> LatentHeads:
    assert isinstance(heads, LatentHeads)
    return LatentHeads(heads.keys[1:], heads.values)
