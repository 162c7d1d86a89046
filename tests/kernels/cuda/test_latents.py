"""Attention to latents, and the write of latents, emulated, against the reference."""

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagewire.kernels.cuda import attention, latents
from pagewire.kernels.cuda.compile import OLDEST
from pagewire.kernels.cuda.launch import HOPPER
from pagewire.kernels.cuda.layout import exchange_chunks
from pagewire.kernels.data.paging import CAUSAL, WHOLE, Cache, LogitTerms, token_view
from pagewire.kernels.reference.kernels import reference
from tests.kernels.batches import TOLERANCE, Paged, Shape
from tests.kernels.cuda.emulate import ORDERS, EmulatedLauncher, guarded
from tests.kernels.cuda.test_attention import BF16, FP16, batch_of

SMALL = (8, 9)
"""The capability of a device with 99 KB of shared memory for a block."""
DEVICES = [OLDEST, SMALL, HOPPER]
LONGEST = 700


def shape_of(heads: int, size: int = 288, block_size: int = 16) -> Shape:
    return Shape(heads, 1, size, latents.LATENTS[size], block_size, values_in_keys=True)


def run(launcher: EmulatedLauncher, paged: Paged, terms: LogitTerms = CAUSAL) -> Tensor:
    """The kernels' output for a batch. All memory that they have not written holds NaN."""
    workspace = attention.Workspace.allocate(launcher.multiprocessors, "cpu")
    workspace.outputs.fill_(torch.nan)
    workspace.sums.fill_(torch.nan)
    tokens, heads, size = paged.q.shape
    cache = Cache.of_keys(exchange_chunks(paged.plain.k), latents.LATENTS[size])
    guarded_out = torch.full((tokens + 128, heads, latents.LATENTS[size]), torch.nan, dtype=paged.q.dtype)
    out = guarded_out[64:-64]
    latents.attend(launcher, workspace, paged.q, cache, paged.batch, size**-0.5, terms, out)
    assert guarded_out[:64].isnan().all() and guarded_out[-64:].isnan().all(), "written beyond the end"
    return out


def expect(paged: Paged, terms: LogitTerms = CAUSAL) -> Tensor:
    """The reference's output in float64."""
    size = paged.q.shape[2]
    cache = Cache.of_keys(paged.plain.k.double(), latents.LATENTS[size])
    return reference.paged_attention(paged.q.double(), cache, paged.batch, size**-0.5, terms)


def check(launcher: EmulatedLauncher, paged: Paged, terms: LogitTerms = CAUSAL) -> None:
    out = run(launcher, paged, terms)
    torch.testing.assert_close(out.double(), expect(paged, terms), atol=TOLERANCE[out.dtype], rtol=0)


SPANS = {
    "decode": [(0, 1), (40, 41), (0, 0), (LONGEST - 1, LONGEST)],
    "drafts": [(0, 4), (60, 64), (LONGEST - 4, LONGEST)],
    "prompts": [(0, 20), (0, 0), (299, 300), (130, 150)],
}


@pytest.mark.parametrize("capability", DEVICES, ids=str)
@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize(
    ("dtype", "size", "heads"), [(BF16, 576, 16), (FP16, 576, 20), (BF16, 288, 5), (FP16, 288, 40)], ids=str
)
def test_variants(dtype: torch.dtype, size: int, heads: int, spans: str, capability: tuple[int, int]) -> None:
    """Every tiling, with keys that are split and not; numbers of heads that fill tiles and do not."""
    launcher = EmulatedLauncher(order=ORDERS[2], capability=capability, multiprocessors=20)
    paged = batch_of(SPANS[spans], shape_of(heads, size), dtype, padding=2)
    check(launcher, paged)
    check(launcher, paged, LogitTerms(chunk=90))
    check(launcher, paged, LogitTerms(window=50, sinks=torch.linspace(-2, 5, heads)))


def chosen_keys(paged: Paged, count: int) -> Tensor:
    """Ascending keys int32 [T, count] of each token; those after its own, also of none, come last."""
    generator, rows = torch.Generator().manual_seed(count), []
    for length, queries in zip(paged.batch.seq_lens, paged.batch.query_start_loc.diff(), strict=True):
        for position in range(length - queries, length):
            seen = torch.randperm(position + 1, generator=generator)[:count].sort().values
            rows.append(torch.cat([seen, position + 1 + torch.arange(count - len(seen))]))
    padding = torch.full((len(paged.q) - len(rows), count), 2**30)
    return torch.cat([torch.stack(rows), padding]).int()


@pytest.mark.parametrize("capability", DEVICES, ids=str)
@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize(
    ("dtype", "size", "heads"), [(BF16, 576, 16), (FP16, 576, 20), (BF16, 288, 5), (FP16, 288, 70)], ids=str
)
def test_chosen_keys(
    dtype: torch.dtype, size: int, heads: int, spans: str, capability: tuple[int, int]
) -> None:
    """Every tiling; lists that are split, that end within a step of keys, and that hold all that a token sees."""
    launcher = EmulatedLauncher(order=ORDERS[2], capability=capability, multiprocessors=20)
    paged = batch_of(SPANS[spans], shape_of(heads, size), dtype, padding=2)
    check(launcher, paged, LogitTerms(chosen=chosen_keys(paged, 21)))
    check(
        launcher,
        paged,
        LogitTerms(chosen=chosen_keys(paged, 300), sinks=torch.linspace(-2, 5, heads).to(dtype)),
    )


def test_lists_of_fewer_keys_than_a_token_could_see() -> None:
    """A list may hold keys after its token's own although it does not hold all those before."""
    paged = batch_of([(90, 100), (0, 3)], shape_of(5), FP16)
    keys = torch.tensor([0, 3, 17, 40, 89, 95, 98, 99, 150, 2000])
    lists = keys.repeat(13, 1).int()
    for count in range(1, len(keys) + 1):
        check(EmulatedLauncher(multiprocessors=2), paged, LogitTerms(chosen=lists[:, :count].contiguous()))


def test_what_is_chosen_in_any_order_of_blocks_is_read_from_the_own_request() -> None:
    """All keys chosen are all keys seen, to the bit where both are divided into the same parts."""
    paged = batch_of([(0, 1), (40, 41), (199, 200)], shape_of(16, block_size=32), BF16)
    launcher = EmulatedLauncher(multiprocessors=1)
    everything = torch.arange(200).int().repeat(3, 1)
    assert torch.equal(run(launcher, paged, LogitTerms(chosen=everything)), run(launcher, paged))


@st.composite
def batches(draw: st.DrawFn) -> tuple[Paged, LogitTerms]:
    """Chunks of prompts, drafts and single tokens together, in pages of every size."""
    spans = []
    for _ in range(draw(st.integers(1, 4))):
        queries = draw(st.integers(0, 40) | st.just(1))
        start = draw(st.integers(0, LONGEST - queries) | st.just(0))
        spans.append((start, start + queries))
    shape = shape_of(draw(st.sampled_from([1, 7, 16])), 288, draw(st.sampled_from(attention.BLOCK_SIZES)))
    paged = batch_of(spans, shape, FP16, draw(st.integers(0, 3)), draw(st.integers(0, 1000)))
    if len(paged.q) and draw(st.booleans()):
        return paged, LogitTerms(chosen=chosen_keys(paged, draw(st.integers(1, LONGEST))))
    sizes = st.none() | st.integers(1, LONGEST)
    return paged, LogitTerms(window=draw(sizes), chunk=draw(sizes))


launchers = st.builds(
    EmulatedLauncher,
    order=st.sampled_from(ORDERS),
    multiprocessors=st.integers(1, 30),
    capability=st.sampled_from(DEVICES),
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(launchers, batches())
def test_batches(launcher: EmulatedLauncher, batch: tuple[Paged, LogitTerms]) -> None:
    check(launcher, *batch)


@pytest.mark.parametrize("block_size", attention.BLOCK_SIZES)
@pytest.mark.parametrize(("dtype", "size"), [(BF16, 576), (FP16, 288)], ids=str)
def test_written_rows(launcher: EmulatedLauncher, dtype: torch.dtype, size: int, block_size: int) -> None:
    """Rows with a slot are written, from memory that others surround; all other rows of the cache stay."""
    generator = torch.Generator().manual_seed(size)
    wide = guarded(torch.randn(9, size + 16, generator=generator).to(dtype))
    rows = wide[:, None, 8:-8]
    slots = torch.randperm(3 * block_size, generator=generator)[:9]
    slots[::4] = -1
    pages = torch.full((3, 1, block_size, size), torch.nan, dtype=dtype)
    expected = pages.clone()
    latents.write(launcher, rows, Cache.of_keys(pages, latents.LATENTS[size]), guarded(slots))
    stored = slots[slots >= 0]
    token_view(expected)[stored // block_size, stored % block_size] = rows[slots >= 0]
    torch.testing.assert_close(exchange_chunks(pages), expected, rtol=0, atol=0, equal_nan=True)


def test_the_output_of_an_empty_batch_is_padding() -> None:
    paged = batch_of([(0, 1)], shape_of(4), padding=3)
    none = torch.zeros(0, dtype=torch.int32)
    batch = dataclasses.replace(
        paged.batch,
        query_start_loc=torch.zeros(1, dtype=torch.int32),
        seq_lens=none,
        block_table=none[:, None],
    )
    assert not run(EmulatedLauncher(), dataclasses.replace(paged, batch=batch)).any()


@pytest.mark.parametrize("capability", DEVICES, ids=str)
@pytest.mark.parametrize("size", sorted(latents.LATENTS))
def test_blocks_fit_into_shared_memory(size: int, capability: tuple[int, int]) -> None:
    """On a device with little of it the kernel for few rows computes many, too."""
    tiling = latents.many(capability, BF16, size)
    assert (tiling.rows == 16) == (capability == SMALL and size == 576)
    most = {OLDEST: 163 << 10, SMALL: 99 << 10, HOPPER: 227 << 10}[capability]
    for each in (latents.FEW, tiling):
        assert latents.instance(BF16, size, each).shared_bytes <= most


def test_parts_fit_into_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests there are, of whatever length."""
    splits = []
    monkeypatch.setattr(
        latents, "launch_instance", lambda _, instance, grid, fields: launched.append((instance, grid))
    )
    launcher = EmulatedLauncher(multiprocessors=132)
    workspace = attention.Workspace.allocate(132, "meta")
    for heads, requests, queries in [(16, 1, 1), (128, 1, 1), (16, 40, 1), (128, 9, 4), (128, 3, 200)]:
        launched: list[tuple[attention.Instance, tuple[int, ...]]] = []
        paged = batch_of([(0, queries)] * requests, shape_of(heads))
        batch = dataclasses.replace(paged.batch, max_seq_len=100_000)
        cache = Cache.of_keys(paged.plain.k, 256)
        latents.attend(launcher, workspace, paged.q, cache, batch, 1.0)
        (attending, (tiles, parts)), *merging = launched
        assert len(merging) == (parts > 1)
        assert parts == 1 or tiles * parts * attending.rows * 256 <= workspace.outputs.numel()
        assert parts == 1 or tiles * parts * attending.rows <= workspace.sums[..., 0].numel()
        splits.append(parts)
    assert splits[0] > 200 and splits[1] > 50 and splits[-1] == 1


def test_refusals() -> None:
    """What no kernel supports is refused by name, before a launch."""
    paged = batch_of([(4, 5)], shape_of(4))
    k = paged.plain.k
    cache = Cache.of_keys(k, 256)
    launcher = EmulatedLauncher()
    workspace = attention.Workspace.allocate(launcher.multiprocessors, "cpu")
    good = {"q": paged.q, "cache": cache, "batch": paged.batch, "scale": 1.0}
    chosen = torch.zeros(2, 4, dtype=torch.int32)
    bad: list[tuple[type[Exception], str, dict[str, object]]] = [
        (TypeError, "queries of torch.float32", {"q": paged.q.float()}),
        (TypeError, "latents of torch.float8", {"cache": Cache.of_keys(k.to(torch.float8_e4m3fn), 256)}),
        (ValueError, "values of 128", {"cache": Cache.of_keys(k, 128)}),
        (ValueError, r"no kernel for K \(\d+, 2, ", {"cache": Cache.of_keys(k.repeat(1, 2, 1, 1), 256)}),
        (ValueError, "no kernel for q", {"q": paged.q[..., :256]}),
        (ValueError, "windows or chunks of keys that", {"terms": LogitTerms(window=3, chosen=chosen)}),
        (ValueError, "windows or chunks of keys that", {"terms": LogitTerms(chunk=3, chosen=chosen)}),
        (
            ValueError,
            r"chosen keys of 1 tokens are torch.int32 \(2, 4\)",
            {"terms": LogitTerms(chosen=chosen)},
        ),
        (ValueError, "chosen keys of 1 tokens", {"terms": LogitTerms(chosen=chosen[:1].long())}),
        (ValueError, "chosen keys of 1 tokens", {"terms": LogitTerms(chosen=chosen[:1, ::2])}),
        (ValueError, "what changes logits", {"terms": LogitTerms(softcap=5.0)}),
        (ValueError, "what changes logits", {"terms": LogitTerms(future=WHOLE)}),
        (ValueError, "what changes logits", {"terms": LogitTerms(alibi=torch.zeros(4))}),
        (ValueError, r"sinks and slopes must be \[4\]", {"terms": LogitTerms(sinks=torch.zeros(5))}),
        (ValueError, "above 0", {"terms": LogitTerms(window=0)}),
        (ValueError, "above 0", {"terms": LogitTerms(chunk=0)}),
        (ValueError, "above 0", {"scale": 0.0}),
        (ValueError, "as long as values", {"out": torch.empty(1, 4, 288, dtype=BF16)}),
        (ValueError, "strides", {"q": torch.empty(1, 4, 576, dtype=BF16)[..., ::2]}),
    ]
    for error, message, changed in bad:
        with pytest.raises(error, match=message):
            latents.attend(launcher, workspace, **{**good, **changed})  # type: ignore[arg-type]
    rows, slots = torch.zeros(2, 1, 288, dtype=BF16), torch.zeros(2, dtype=torch.int64)
    for error, message, latent, kv_slots in [
        (TypeError, "no kernel writes torch.float32", rows.float(), slots),
        (TypeError, "slots of torch.int32", rows, slots.int()),
        (ValueError, "shapes disagree", rows[..., :280], slots),
        (ValueError, "shapes disagree", rows, slots[:1]),
        (ValueError, "16 bytes apart", torch.zeros(2, 1, 292, dtype=BF16)[..., :288], slots),
    ]:
        with pytest.raises(error, match=message):
            latents.write(launcher, latent, cache, kv_slots)
