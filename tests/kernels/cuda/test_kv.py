"""The KV write, fused with the norm and the rotation of heads, on the emulated device."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagewire.kernels.cuda.kv import FP8, write_kv
from pagewire.kernels.cuda.layout import exchange_chunks
from pagewire.kernels.cuda.norms import DTYPES
from pagewire.kernels.data.layer import Norm
from pagewire.kernels.data.paging import UNSCALED, Cache, KVScales, token_view
from pagewire.kernels.reference.kernels import reference
from tests.kernels.cuda.emulate import ORDERS, Edit, EmulatedLauncher, EmulationError, guarded

SIZES = (32, 64, 80, 96, 112, 128, 160, 256)
BLOCKS = 5


@dataclass(frozen=True)
class Case:
    """The shapes and dtypes of a write, and how its numbers are made."""

    tokens: int = 6
    heads: int = 4
    kv_heads: int = 2
    size: int = 80
    v_size: int = 80
    block_size: int = 16
    rotated: int | None = None
    normed: bool = False
    offset: float = 0.0
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype = torch.bfloat16
    queries: bool = True
    scale: float = 1.0
    scales: KVScales = UNSCALED
    seed: int = 0


cases = st.builds(
    Case,
    tokens=st.integers(1, 9),
    heads=st.sampled_from([2, 4, 8]),
    kv_heads=st.sampled_from([1, 2]),
    size=st.sampled_from(SIZES),
    v_size=st.sampled_from(SIZES),
    block_size=st.sampled_from([16, 32, 64]),
    rotated=st.sampled_from([None, 16, 32]),
    normed=st.booleans(),
    offset=st.sampled_from([0.0, 1.0]),
    queries=st.booleans(),
    scale=st.sampled_from([1.0, 300.0]),
    seed=st.integers(0, 2**31),
)


def check(launcher: EmulatedLauncher, case: Case) -> None:
    """The written rows are right; all other rows of the cache held NaN before and hold it after the write."""
    generator = torch.Generator().manual_seed(case.seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).mul(case.scale).to(case.dtype)

    width = case.heads * case.size + case.kv_heads * (case.size + case.v_size)
    row = guarded(numbers(case.tokens, width))
    q, k, v = row.split([case.heads * case.size, case.kv_heads * case.size, case.kv_heads * case.v_size], 1)
    q, k = q.unflatten(1, (-1, case.size)), k.unflatten(1, (-1, case.size))
    v = v.unflatten(1, (-1, case.v_size))
    slots = torch.randperm(BLOCKS * case.block_size, generator=generator)[: case.tokens]
    slots[torch.rand(case.tokens, generator=generator) < 0.3] = -1
    slots = guarded(slots)
    norms = None
    if case.normed:
        norms = tuple(Norm(numbers(case.size), 1e-6, case.offset) for _ in "qk")
    cos = sin = None
    if case.rotated is not None:
        angles = torch.rand(case.tokens, case.rotated, generator=generator) * 6
        cos, sin = guarded(angles.cos().to(case.dtype)), guarded(angles.sin().to(case.dtype))
    caches = [
        guarded(torch.full((BLOCKS, case.kv_heads, case.block_size, size * case.cache_dtype.itemsize), 255))
        for size in (case.size, case.v_size)
    ]
    k_cache, v_cache = (guarded(c.to(torch.uint8)).view(case.cache_dtype) for c in caches)

    expected_q, expected_k = q.clone(), k.clone()
    if norms is not None:
        expected_q, expected_k = (
            reference.rms_norm(x, norm.weight, 1e-6, offset=case.offset)
            for x, norm in zip((expected_q, expected_k), norms, strict=True)
        )
    if cos is not None and sin is not None:
        reference.rotary(expected_q, expected_k, cos, sin)
    before = row.clone()
    angles = None if cos is None or sin is None else (cos, sin)
    cache = Cache(k_cache, v_cache, case.scales)
    write_kv(launcher, q if case.queries else None, k, v, cache, slots, angles, norms)

    assert torch.equal(row[:, case.heads * case.size :], before[:, case.heads * case.size :])
    compare(q, expected_q if case.queries else before[:, : case.heads * case.size].view(q.shape), case.normed)
    for stored, values, by in ((k_cache, expected_k, case.scales.k), (v_cache, v, case.scales.v)):
        written = torch.zeros(BLOCKS, case.block_size, dtype=torch.bool)
        valid_slots = slots[slots >= 0]
        written.view(-1)[valid_slots] = True
        rows = token_view(exchange_chunks(stored))
        assert bool((rows.view(torch.uint8)[~written] == 255).all())
        actual = rows[valid_slots // case.block_size, valid_slots % case.block_size]
        expected = saturated(values[slots >= 0], case.cache_dtype, by)
        compare(actual, expected, case.normed and stored is k_cache)


def saturated(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    if dtype not in FP8:
        return x
    largest = torch.finfo(dtype).max
    return (x.float() * (1 / scale)).clamp(-largest, largest).to(dtype)


def compare(actual: Tensor, expected: Tensor, normed: bool) -> None:
    """Equal bits; after a norm (another order of sums) equal up to one last place of the largest element."""
    if not normed:
        assert torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
        return
    last_place = {torch.float8_e5m2: 2**-2, torch.float8_e4m3fn: 2**-3, torch.float16: 2**-9}
    tolerance = last_place.get(actual.dtype, 2**-6)
    largest = expected.float().abs().amax(-1, keepdim=True) if expected.numel() else torch.zeros(())
    assert bool(((actual.float() - expected.float()).abs() <= tolerance * largest).all())


@settings(max_examples=40, deadline=None)
@given(cases, st.sampled_from(list(DTYPES)), st.sampled_from([None, *FP8]), st.sampled_from(ORDERS))
def test_it_equals_the_reference(
    case: Case, dtype: torch.dtype, cache_dtype: torch.dtype | None, order: tuple[int, int]
) -> None:
    check(
        EmulatedLauncher(order),
        Case(**{**vars_of(case), "dtype": dtype, "cache_dtype": cache_dtype or dtype}),
    )


def vars_of(case: Case) -> dict[str, object]:
    return {name: getattr(case, name) for name in Case.__dataclass_fields__}


def test_rotation_of_a_whole_head(launcher: EmulatedLauncher) -> None:
    check(launcher, Case(size=256, v_size=32, rotated=256, normed=True))


@pytest.mark.parametrize("cache_dtype", FP8, ids=str)
def test_scales(launcher: EmulatedLauncher, cache_dtype: torch.dtype) -> None:
    check(launcher, Case(scale=300.0, cache_dtype=cache_dtype, rotated=16, scales=KVScales(3.7, 0.02)))


def test_no_tokens_and_only_padding() -> None:
    cache = torch.zeros(1, 1, 16, 32).half()
    heads = torch.zeros(0, 1, 32).half()
    none = torch.zeros(0, dtype=torch.int64)
    write_kv(EmulatedLauncher(), heads, heads, heads, Cache(cache, cache.clone()), none)
    check(EmulatedLauncher(), Case(tokens=1, seed=11, rotated=16))


def test_a_nan_stays_a_nan() -> None:
    cache = torch.zeros(1, 1, 16, 32).to(torch.float8_e4m3fn)
    k = torch.full((1, 1, 32), torch.nan).bfloat16()
    write_kv(EmulatedLauncher(), None, k, k, Cache(cache, cache.clone()), torch.tensor([3]))
    rows = exchange_chunks(cache).float()
    assert rows[0, 0, 3].isnan().all() and not rows[0, 0, 4].isnan().any()


def test_the_emulation_detects_a_slot_beyond_the_cache() -> None:
    cache, k = guarded(torch.zeros(1, 1, 16, 128).half()), torch.ones(1, 1, 128).half()
    with pytest.raises(EmulationError, match="no memory"):
        write_kv(EmulatedLauncher(), None, k, k, Cache(cache, cache), torch.tensor([16]))


def write_changed(**changes: Tensor) -> None:
    """A write with other tensors in place of those that fit."""
    fitting = {name: torch.zeros(2, 1, 32).half() for name in ("q", "k", "v")}
    fitting |= {name: torch.zeros(1, 1, 16, 32).half() for name in ("k_cache", "v_cache")}
    q, k, v, k_cache, v_cache, slots, cos, sin = {
        **fitting,
        "slots": torch.zeros(2, dtype=torch.int64),
        "cos": torch.zeros(2, 16).half(),
        "sin": torch.zeros(2, 16).half(),
        **changes,
    }.values()
    write_kv(EmulatedLauncher(), q, k, v, Cache(k_cache, v_cache), slots, (cos, sin))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"k": torch.zeros(2, 1, 32)}, TypeError),
        ({"q": torch.zeros(2, 1, 32).bfloat16()}, TypeError),
        ({"k_cache": torch.zeros(1, 1, 16, 32)}, TypeError),
        ({"v_cache": torch.zeros(1, 1, 16, 32).to(torch.float8_e5m2)}, TypeError),
        ({"slots": torch.zeros(2, dtype=torch.int32)}, TypeError),
        ({"slots": torch.zeros(3, dtype=torch.int64)}, ValueError),
        ({"k": torch.zeros(2, 2, 32).half()}, ValueError),
        ({"q": torch.zeros(3, 1, 32).half()}, ValueError),
        ({"cos": torch.zeros(2, 32).half()}, ValueError),
        ({"cos": torch.zeros(2, 48).half(), "sin": torch.zeros(2, 48).half()}, ValueError),
        ({"cos": torch.zeros(2, 24).half(), "sin": torch.zeros(2, 24).half()}, ValueError),
        ({"v": torch.zeros(2, 1, 64).half()[..., ::2]}, ValueError),
        ({"v": torch.zeros(65).half()[1:].view(2, 1, 32)}, ValueError),
        ({"k_cache": torch.zeros(513).half()[1:].view(1, 1, 16, 32)}, ValueError),
        (
            {"k": torch.zeros(2, 1, 264).half(), "k_cache": torch.zeros(1, 1, 16, 264).half(), "q": None},
            ValueError,
        ),
        (
            {"k": torch.zeros(2, 1, 36).half(), "k_cache": torch.zeros(1, 1, 16, 36).half(), "q": None},
            ValueError,
        ),
    ],
)
def test_unsupported_arguments_are_refused(changes: dict[str, Tensor], error: type) -> None:
    with pytest.raises(error):
        write_changed(**changes)


FAULTS = [
    Edit("kv.cu", " && (is_query || slot >= 0)", ""),
    Edit("kv.cu", " && (is_query || slot >= 0)", " && slot >= 0"),
    Edit("kv.cu", "const bool active = in_range && ", "const bool active = "),
    Edit("kv.cu", "chunk < size / 8 && ", ""),
    Edit("kv.cu", "chunk < half ? -1.0f : 1.0f", "1.0f"),
    Edit("kv.cu", "!is_value && chunk < 2 * half", "!is_value"),
    Edit("kv.cu", "!is_value && chunk < 2 * half", "chunk < 2 * half"),
    Edit("kv.cu", "chunk < half ? lane + half", "lane < half ? lane + half"),
    Edit("kv.cu", "is_query ? p.q_weight : p.k_weight", "p.q_weight"),
    Edit("kv.cu", "(active && !is_value) {", "(active) {"),
    Edit("kv.cu", "* p.num_kv_heads + kv_head) * p.block_size", "* p.num_kv_heads) * p.block_size"),
    Edit("kv.cu", "swizzle(chunks, row, chunk) *", "chunk *"),
    Edit("kv.cu", "swizzle(chunks, row, chunk / 2) *", "chunk / 2 *"),
    Edit("kv.cu", "* CHUNK_BYTES + chunk % 2 * 8", "* CHUNK_BYTES"),
    Edit("kv.cu", "int(slot % p.block_size)", "int(slot % 16)"),
    Edit("kv.cu", "rounded<T>(a.x * c.x)", "a.x * c.x"),
    Edit("kv.cu", "size = is_value ? p.v_size : p.size", "size = p.size"),
    Edit("kv.cu", "bits = p.lanes / 2", "bits = 16"),
    Edit("kv.cu", "squares / float(size) + p.eps", "squares / float(size)"),
    Edit("layout.cuh", "row / (8 / p)", "row"),
    Edit("ptx.cuh", "result < LARGEST ? result : LARGEST", "result"),
    Edit("ptx.cuh", "- 1 + (magnitude >> CUT & 1);", ";"),
]


@pytest.mark.planted_faults
@pytest.mark.parametrize("edit", FAULTS, ids=lambda edit: edit.old.strip()[:40])
def test_faults_are_caught(catch: Callable[..., None], edit: Edit) -> None:
    def several(launcher: EmulatedLauncher) -> None:
        check(launcher, Case(tokens=9, heads=3, block_size=32, rotated=64, normed=True, scale=1e-3, seed=2))
        check(launcher, Case(tokens=9, heads=3, block_size=32, size=96, v_size=64, rotated=96, seed=3))
        e4m3 = Case(tokens=9, v_size=64, cache_dtype=torch.float8_e4m3fn, scale=300.0, rotated=32, seed=4)
        check(launcher, e4m3)

    if edit is FAULTS[0]:
        several(EmulatedLauncher())
    catch(several, edit)
