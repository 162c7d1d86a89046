"""Trials of the CUDA kernels: small runs beside PyTorch, which show whether a device computes what it should.

The tests prove the logic of the kernels, by emulation. The compiler, the driver and the chip are proven where they
are: a worker runs these trials when it first starts on a device (`workers/device/first_run.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.cuda import attention, gates, indexing, kv, latents, norms, states
from pagewire.kernels.cuda.product_trials import dense_trial, expert_trials, linear_trials, quantised_trials
from pagewire.kernels.cuda.trial import TOLERANCE, Layout, Trial, batch_invariant, normal, preferring, short
from pagewire.kernels.cuda.variants import Launches
from pagewire.kernels.data.deltas import AdapterRows, AdapterWeights, Delta, panels
from pagewire.kernels.data.layer import Activation, Norm
from pagewire.kernels.data.paging import CAUSAL, UNSCALED, AttentionBatch, Cache, KVScales, LogitTerms
from pagewire.kernels.data.states import StateBatch
from pagewire.kernels.reference.indexing import index_scores
from pagewire.kernels.reference.kernels import Kernels, reference
from pagewire.kernels.reference.states import StateKernels

HEADS, KV_HEADS, BLOCK_SIZE = 8, 2, 16
SCALES = KVScales(0.5, 2.0)


def trials(launches: Launches) -> list[Trial]:
    """A trial of every kernel that a model may launch, as `variants_of` lists them, but for sampling."""
    dtype, head_dim = launches.dtype, launches.head_dim
    if dtype not in norms.DTYPES:
        return [*space_trials(dtype), *convolution_trials(dtype)] if launches.recurrent else []
    result = [*norm_trials(dtype), *gate_trials(dtype)]
    if launches.packed:
        result += linear_trials(dtype)
        result += quantised_trials(dtype, launches.capability)
    if launches.invariant:
        result.append(batch_invariant(dense_trial(dtype)))
    if launches.mixture:
        result += expert_trials(dtype, packed=launches.packed)
    if launches.encodes:
        result += write_trials(dtype, dtype, head_dim)
        if head_dim in attention.TWO_SIDED_HEAD_DIMS:
            for method in attention_methods(launches, dtype):
                result.append(two_sided_trial(method, dtype, head_dim))
        return result
    result.append(adapter_trial(dtype))
    if launches.recurrent:
        result += [*matrix_trials(dtype), *channel_trials(dtype)]
    if head_dim in latents.LATENTS:
        result += latent_trials(dtype, head_dim)
        return (
            [*result, *chosen_trials(dtype, head_dim), *index_trials(dtype)] if launches.indexed else result
        )
    for cache_dtype in dict.fromkeys((dtype, launches.kv_dtype)) if head_dim else ():
        result += write_trials(dtype, cache_dtype, head_dim)
        if head_dim in attention.HEAD_DIMS:
            result += attention_trials(launches, cache_dtype)
    return result


def attention_trials(launches: Launches, cache_dtype: torch.dtype) -> Iterator[Trial]:
    """Causal attention over a cache of a dtype."""
    dtype, head_dim = launches.dtype, launches.head_dim
    if launches.invariant:
        yield batch_invariant(cut_trial(dtype, cache_dtype, head_dim))
    for kind, spans in (("decode", DECODE), ("prefill", PREFILL)):
        for method in attention_methods(launches, cache_dtype)[: 1 if kind == "decode" else None]:
            trial = attention_trial(kind, spans, method, dtype, cache_dtype, head_dim)
            yield batch_invariant(trial) if launches.invariant else trial


def attention_methods(launches: Launches, cache_dtype: torch.dtype) -> list[str]:
    """The methods of trials of prefill attention, as `attend` takes them."""
    kinds = (launches.dtype, cache_dtype, launches.head_dim)
    has_warpgroups = attention.has_warpgroups(launches.capability, *kinds) and not launches.invariant
    return ["paged_attention", *([attention.WARPGROUPS] if has_warpgroups else [])]


def norm_trials(dtype: torch.dtype) -> Iterator[Trial]:
    """Norms of rows of every shape of a launch; a few threads have nothing to do."""

    def alone(kernels: Kernels, layout: Layout, inputs: Sequence[Tensor]) -> Tensor:
        x, _, weight = inputs
        return kernels.rms_norm(x, weight, 1e-6)

    def after_sum(kernels: Kernels, layout: Layout, inputs: Sequence[Tensor]) -> Tensor:
        x, residual, weight = inputs
        normed = kernels.add_rms_norm(x, residual, weight, 1e-6, offset=1.0)
        return torch.cat([normed, residual])

    for threads, chunks in norms.SHAPES:
        size = 8 * threads * chunks - 8
        inputs = [normal(3, size), normal(3, size, seed=1), 1 + normal(size, seed=2) / 8]
        inputs = [x.to(dtype) for x in inputs]
        for method, compute in (("rms_norm", alone), ("add_rms_norm", after_sum)):
            yield Trial(f"{method} of {size}", method, compute, inputs, TOLERANCE[dtype])


def gate_trials(dtype: torch.dtype) -> Iterator[Trial]:
    """Gated activations."""
    for activation in gates.ACTIVATIONS:

        def compute(
            kernels: Kernels, layout: Layout, inputs: Sequence[Tensor], activation: Activation = activation
        ) -> Tensor:
            return kernels.activate_and_mul(inputs[0], activation)

        name = f"{activation.value}_and_mul"
        yield Trial(name, "activate_and_mul", compute, [2 * normal(3, 2 * 136).to(dtype)], TOLERANCE[dtype])


def write_trials(dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int) -> Iterator[Trial]:
    """Keys and values on their way into the cache: as they are, and normed and rotated. One token has no slot."""
    if head_dim > kv.LARGEST_HEAD or head_dim % 16:
        return
    tokens, scales = 21, SCALES if cache_dtype in kv.FP8 else UNSCALED
    pages = (3, KV_HEADS, BLOCK_SIZE, head_dim)
    slots = torch.randperm(3 * BLOCK_SIZE, generator=torch.Generator().manual_seed(0))[:tokens]
    slots[5] = -1
    angles = 6 * normal(tokens, head_dim, seed=1)
    weights = 1 + normal(2, head_dim, seed=2) / 8
    qkv = normal(tokens, HEADS + 2 * KV_HEADS, head_dim)
    inputs = [x.to(dtype) for x in (qkv, angles.cos(), angles.sin(), weights)]

    def compute(fused: bool, kernels: Kernels, layout: Layout, inputs: Sequence[Tensor]) -> Tensor:
        qkv, cos, sin, weights, slots = inputs
        q, k, v = torch.split(qkv, [HEADS, KV_HEADS, KV_HEADS], 1)
        zeros = torch.zeros(2, *pages, device=q.device).to(cache_dtype)
        cache = Cache(zeros[0], zeros[1], scales)
        if fused:
            head_norms = (Norm(weights[0], 1e-6, 0.0), Norm(weights[1], 1e-6, 0.0))
            q = kernels.rotate_and_store(q, k, v, (cos, sin), head_norms, cache, slots)
        else:
            kernels.store_kv(k, v, cache, slots)
        rows = [layout(x).float().flatten(0, 2) for x in (cache.k, cache.v)]
        return torch.cat([q.float().flatten(0, 1), *rows])

    tolerance = max(TOLERANCE[dtype], TOLERANCE[cache_dtype])
    for method in ("store_kv", "rotate_and_store"):
        name = f"{method} in {short(cache_dtype)}, heads of {head_dim}"
        kernel = partial(compute, method == "rotate_and_store")
        yield Trial(name, method, kernel, [*inputs, slots], tolerance)


DECODE = ((0, 1), (36, 37), (599, 600))
PREFILL = ((0, 90), (300, 400), (42, 43))
WHOLE_PROMPTS = ((0, 200), (0, 33))
DRAFTS = ((597, 600),)
"""Positions of the new tokens of each request, (first, end). Some long ones have their keys split."""


def paged_inputs(
    spans: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    head_dim: int,
    heads: int = HEADS,
) -> list[Tensor]:
    """Queries, a cache in rows, and the tensors of an `AttentionBatch`, but for the KV slots.

    head_dim: also the size of latents, of which there is one KV head.
    """
    starts = torch.tensor([0, *(end - first for first, end in spans)]).cumsum(0).int()
    lengths = torch.tensor([end for _, end in spans]).int()
    width = -(-int(lengths.max()) // BLOCK_SIZE)
    table = torch.randperm(len(spans) * width, generator=torch.Generator().manual_seed(0)).int()
    pages = (len(table), 1 if head_dim in latents.LATENTS else KV_HEADS, BLOCK_SIZE, head_dim)
    q = normal(int(starts[-1]), heads, head_dim, seed=1).to(dtype)
    k, v = (normal(*pages, seed=seed).to(dtype).to(cache_dtype) for seed in (2, 3))
    return [q, k, v, starts, lengths, table.view(len(spans), width)]


def attend(
    method: str,
    spans: Sequence[tuple[int, int]],
    terms: Callable[[Sequence[Tensor]], Sequence[LogitTerms]],
    kernels: Kernels,
    layout: Layout,
    inputs: Sequence[Tensor],
) -> Tensor:
    """Attention with each of some terms.

    method: `WARPGROUPS`: with their products; else without. inputs: those of `paged_inputs`, and what `terms` gets.
    """
    kernels = preferring(kernels, method)
    q, k, v, starts, lengths, table, *others = inputs
    slots = torch.full((len(q),), -1, dtype=torch.int64, device=q.device)
    longest = max(end - first for first, end in spans), max(end for _, end in spans)
    batch = AttentionBatch(starts, lengths, table, slots, *longest)
    cache = (
        Cache.of_keys(layout(k), v_size)
        if (v_size := latents.LATENTS.get(k.shape[3]))
        else Cache(layout(k), layout(v), SCALES if k.dtype in kv.FP8 else UNSCALED)
    )
    scale = q.shape[2] ** -0.5
    results = [kernels.paged_attention(q, cache, batch, scale, each) for each in terms(others)]
    return torch.cat(results).flatten(0, 1)


def attention_trial(
    kind: str,
    spans: Sequence[tuple[int, int]],
    method: str,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    head_dim: int,
) -> Trial:
    """Attention of one kind of batch; plain, with all that changes logits, and to chunks of keys."""

    def terms(others: Sequence[Tensor]) -> Sequence[LogitTerms]:
        sinks, slopes = others
        changed = LogitTerms(window=50, softcap=5.0, sinks=sinks, alibi=slopes)
        return CAUSAL, changed, LogitTerms(chunk=70)

    others = [torch.linspace(-1, 3, HEADS), torch.logspace(-3, -1, HEADS)]
    name = f"{kind} attention{_how(method)} over {short(cache_dtype)}, heads of {head_dim}"
    inputs = [*paged_inputs(spans, dtype, cache_dtype, head_dim), *others]
    return Trial(name, method, partial(attend, method, spans, terms), inputs, TOLERANCE[dtype])


def cut_trial(dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int) -> Trial:
    """A chunk of a prompt, and by how much its last token differs if it is alone: not at all."""
    spans, alone = ((560, 600),), ((599, 600),)

    def terms(_: Sequence[Tensor]) -> Sequence[LogitTerms]:
        return (CAUSAL,)

    def compute(kernels: Kernels, layout: Layout, inputs: Sequence[Tensor]) -> Tensor:
        q, *others, starts, lengths, table = inputs
        whole = attend("paged_attention", spans, terms, kernels, layout, inputs)
        last = [q[-1:], *others, starts.clamp(max=1), lengths, table]
        one = attend("paged_attention", alone, terms, kernels, layout, last)
        if kernels is reference:
            return torch.cat([whole, torch.zeros_like(one)])
        return torch.cat([whole, one - whole[-len(one) :]])

    name = f"attention in chunks over {short(cache_dtype)}, heads of {head_dim}"
    inputs = paged_inputs(spans, dtype, cache_dtype, head_dim)
    return Trial(name, "paged_attention", compute, inputs, TOLERANCE[dtype])


def latent_trials(dtype: torch.dtype, size: int) -> Iterator[Trial]:
    """Latents on their way into the cache, and attention to them by few rows and by many, keys split or not."""
    tokens, shape = 21, (3, 1, BLOCK_SIZE, size)
    slots = torch.randperm(3 * BLOCK_SIZE, generator=torch.Generator().manual_seed(0))[:tokens]
    slots[5] = -1

    def write(kernels: Kernels, layout: Layout, inputs: Sequence[Tensor]) -> Tensor:
        rows, slots = inputs
        cache = Cache.of_keys(torch.zeros(shape, dtype=rows.dtype, device=rows.device), latents.LATENTS[size])
        kernels.store_kv(rows, rows[..., : latents.LATENTS[size]], cache, slots)
        return layout(cache.k).flatten(0, 2)

    def terms(others: Sequence[Tensor]) -> Sequence[LogitTerms]:
        return CAUSAL, LogitTerms(window=50, sinks=others[0]), LogitTerms(chunk=70)

    method, tolerance = latents.METHOD, TOLERANCE[dtype]
    inputs = [normal(tokens, 1, size).to(dtype), slots]
    yield Trial(f"a write of latents of {size}", method, write, inputs, tolerance)
    for kind, spans in (("decode", DECODE), ("drafts", DRAFTS), ("prefill", PREFILL)):
        compute = partial(attend, method, spans, terms)
        inputs = [*paged_inputs(spans, dtype, dtype, size), torch.linspace(-1, 3, HEADS)]
        yield Trial(f"{kind} attention to latents of {size}", method, compute, inputs, tolerance)


def chosen_trials(dtype: torch.dtype, size: int) -> Iterator[Trial]:
    """Attention to chosen latents by few rows and by many, keys split or not; some lists exceed their request."""

    def terms(others: Sequence[Tensor]) -> Sequence[LogitTerms]:
        many, few, sinks = others
        return LogitTerms(chosen=many), LogitTerms(chosen=few), LogitTerms(chosen=many, sinks=sinks)

    for kind, spans, heads in (
        ("decode", DECODE, HEADS),
        ("decode", DECODE[-1:], 3 * HEADS),
        ("prefill", PREFILL, HEADS),
    ):
        others = [*(chosen_keys(spans, count) for count in (300, 40)), torch.linspace(-1, 3, heads)]
        inputs = [*paged_inputs(spans, dtype, dtype, size, heads), *others]
        compute = partial(attend, latents.METHOD, spans, terms)
        name = f"{kind} attention of {heads} heads to chosen latents of {size}"
        yield Trial(name, latents.METHOD, compute, inputs, TOLERANCE[dtype])


def chosen_keys(spans: Sequence[tuple[int, int]], count: int) -> Tensor:
    """Keys int32 [T, count] for the tokens of spans, as an indexer chooses them: first those that a token sees."""
    positions = torch.cat([torch.arange(first, end) for first, end in spans])
    keys = torch.arange(max(count, int(positions.max()) + 1))
    order = normal(len(positions), len(keys), seed=4).masked_fill_(keys > positions[:, None], -torch.inf)
    return order.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values.int()


def index_trials(dtype: torch.dtype) -> Iterator[Trial]:
    """The scores of an indexer's keys, for chunks of prompts and single tokens; of keys after a token 0."""

    def compute(kernels: Kernels, layout: Layout, inputs: Sequence[Tensor]) -> Tensor:
        q, keys, starts, lengths, table, weights = inputs
        slots = torch.full((len(q),), -1, dtype=torch.int64, device=q.device)
        batch = AttentionBatch(starts, lengths, table, slots, 100, 400)
        score = kernels.index_scores.get(q.shape[2], index_scores)
        return score(q, weights, 0.1, keys, batch, range(1, len(q))).nan_to_num(neginf=0.0)

    for size in indexing.SIZES:
        q, keys, _, *tensors = paged_inputs(PREFILL, dtype, dtype, size, 3 * HEADS)
        inputs = [q, keys[:, 0].contiguous(), *tensors, normal(*q.shape[:2], seed=4)]
        yield Trial(f"index scores of {size}", indexing.METHOD, compute, inputs, TOLERANCE[torch.float32])


def two_sided_trial(method: str, dtype: torch.dtype, head_dim: int) -> Trial:
    """Whole prompts of an encoder: all keys, a window, and biases by distance."""

    def terms(others: Sequence[Tensor]) -> Sequence[LogitTerms]:
        return LogitTerms.two_sided(), LogitTerms.two_sided(20), LogitTerms.two_sided(None, others[0])

    inputs = [*paged_inputs(WHOLE_PROMPTS, dtype, dtype, head_dim), normal(HEADS, 2 * 256, seed=4)]
    compute = partial(attend, method, WHOLE_PROMPTS, terms)
    name = f"two-sided attention{_how(method)}, heads of {head_dim}"
    return Trial(name, method, compute, inputs, TOLERANCE[dtype])


def _how(method: str) -> str:
    return " of warpgroups" if method == attention.WARPGROUPS else ""


def adapter_trial(dtype: torch.dtype) -> Trial:
    """Two adapters in a product whose last panel is not full; some rows have none."""
    num_out, num_in, ranks = 200, 264, (4, 40)
    of_rows = torch.tensor([1, -1, 0, 1, 1, 0, -1, *[1] * 9])
    rows = torch.cat([(of_rows == adapter).nonzero().flatten() for adapter in (0, 1)])
    starts = torch.tensor([0, *((of_rows == adapter).sum() for adapter in (0, 1))]).cumsum(0)
    inputs = [normal(len(of_rows), num_in), normal(len(of_rows), num_out, seed=1)]
    for seed, rank in enumerate(ranks, 2):
        inputs += [normal(rank, num_in, seed=seed) / num_in**0.5, panels(normal(num_out, rank, seed=-seed))]

    def compute(kernels: Kernels, layout: Layout, inputs: Sequence[Tensor]) -> Tensor:
        x, out, *matrices = inputs
        deltas = [Delta(a, b, 0, num_out, 0.5) for a, b in zip(matrices[::2], matrices[1::2], strict=True)]
        weights = [AdapterWeights([[delta]], ((num_out, num_in),), dtype) for delta in deltas]
        kernels.adapt(x, out, AdapterRows(rows, starts, weights, len(x)), 0)
        return out

    # Tables of adapters come from the host. Recorded steps have theirs before.
    return Trial("adapters", "adapt", compute, [x.to(dtype) for x in inputs], TOLERANCE[dtype], records=False)


def state_trial(
    name: str, run: Callable[..., Tensor], slot: Sequence[int], inputs: Sequence[Tensor], dtype: torch.dtype
) -> Trial:
    """A layer with states [4, *slot] and 9 tokens: a row that continues, and one of two spans."""
    row_starts = torch.tensor([0, 1, 3], dtype=torch.int32)
    spans = torch.tensor([[0, 2, 0, 1], [2, 5, -1, 2], [5, 9, 2, 3]], dtype=torch.int32)

    def compute(kernels: Kernels, layout: Layout, inputs: Sequence[Tensor]) -> Tensor:
        starts, spans, state, *tensors = inputs
        out = run(kernels.states, *tensors, state, StateBatch(starts, spans))
        return torch.cat([out.float().flatten(), state.flatten()])[None]

    whole = [row_starts, spans, normal(4, *slot, seed=9), *inputs]
    return Trial(name, "states", compute, whole, TOLERANCE[dtype])


def matrix_trials(dtype: torch.dtype) -> Iterator[Trial]:
    """Layers with a matrix per head, of every number of rows in registers; some threads have nothing to do."""
    tokens, heads, columns = 9, 2, 40

    def delta_rule(kernels: StateKernels, *arguments: Any) -> Tensor:
        return kernels.gated_delta_rule(*arguments, scale=1.0, norm_eps=1e-6)

    values, steps = normal(tokens, heads, columns).to(dtype), normal(tokens, heads, seed=1).abs()
    for rows in states.MATRIX_ROWS:
        size = states.WARPS * rows - 2
        slot = (heads, size, columns)
        q, k = ((normal(tokens, 1, size, seed=seed) / size**0.5).to(dtype) for seed in (2, 3))
        yield state_trial(f"delta rule of {size}", delta_rule, slot, [q, k, values, -steps, steps], dtype)
    for each in (dtype, torch.float32):
        yield from space_trials(each)


def space_trials(dtype: torch.dtype) -> Iterator[Trial]:
    """State spaces of every number of rows in registers; some threads have nothing to do."""
    tokens, heads, columns = 9, 2, 40

    def state_space(kernels: StateKernels, x: Tensor, dt: Tensor, *others: Any) -> Tensor:
        rates = torch.full((heads,), -0.5, device=x.device)
        b, c, state, batch = others
        return kernels.state_space(x, dt, rates, b, c, -rates, state, batch)

    values, steps = normal(tokens, heads, columns).to(dtype), normal(tokens, heads, seed=1).abs()
    for rows in states.MATRIX_ROWS:
        size = states.WARPS * rows - 2
        b, c = ((normal(tokens, 1, size, seed=seed) / size**0.5).to(dtype) for seed in (2, 3))
        name = f"state space of {size} in {short(dtype)}"
        yield state_trial(name, state_space, (heads, size, columns), [values, steps, b, c], dtype)


def channel_trials(dtype: torch.dtype) -> Iterator[Trial]:
    """Layers whose channels have states of their own, in every size; the last block of channels is not full."""
    tokens, channels = 9, states.THREADS + 8
    x, steps = normal(tokens, channels).to(dtype), normal(tokens, channels, seed=1).abs()

    def scan(kernels: StateKernels, x: Tensor, dt: Tensor, a: Tensor, *others: Any) -> Tensor:
        b, c, state, batch = others
        return kernels.selective_scan(x, dt, a, b, c, dt[0], state, batch)

    def recurrence(kernels: StateKernels, *arguments: Any) -> Tensor:
        return kernels.linear_recurrence(*arguments)

    for size in states.SCAN_ROWS:
        a = -normal(size - 1, channels).abs()
        b, c = ((normal(tokens, size - 1, seed=seed) / size**0.5).to(dtype) for seed in (2, 3))
        yield state_trial(f"scan of {size - 1}", scan, a.shape, [x, steps, a, b, c], dtype)
    yield state_trial("recurrence", recurrence, (channels,), [x, torch.exp(-steps).to(dtype)], dtype)
    for each in (dtype, torch.float32):
        yield from convolution_trials(each)


def convolution_trials(dtype: torch.dtype) -> Iterator[Trial]:
    """Convolutions of every number of taps; the last block of channels is not full."""
    tokens, channels = 9, states.THREADS + 8

    def convolution(kernels: StateKernels, x: Tensor, weight: Tensor, *others: Any) -> Tensor:
        return kernels.causal_conv(x, weight, weight[0], *others, silu=True)

    x = normal(tokens, channels).to(dtype)
    for taps in states.TAPS:
        weight = normal(taps, channels, seed=2).to(dtype)
        name = f"convolution by {taps} in {short(dtype)}"
        yield state_trial(name, convolution, (taps - 1, channels), [x, weight], dtype)
