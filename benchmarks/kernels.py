"""The CUDA kernels on a GPU: right, and how fast beside what the device can do and beside others.

    python -m benchmarks.kernels [--only decode] [--quick] [--check] [--out benchmarks/results]

Each case is compared with float64 on fresh random inputs, then timed: a CUDA graph of many calls over rotating
buffers that together exceed the L2 cache, median of many replays. Floors are measured, not looked up: a large copy
for bytes, a large product for operations. Peers are PyTorch, and FlashInfer where it is installed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pagewire.kernels import reference
from pagewire.kernels.cuda import attention, gates, kv, lora, norms, sampling
from pagewire.kernels.cuda.launch import CudaLauncher, KernelLauncher
from pagewire.kernels.cuda.layout import exchange_chunks
from pagewire.kernels.deltas import AdapterRows, AdapterWeights, Delta, panels
from pagewire.kernels.layer import Activation
from pagewire.kernels.paging import WHOLE, AttentionBatch, token_view

ROTATED_BYTES = 256 << 20
"""Buffers of a case take at least this together: several times any L2 cache."""
BLOCK_SIZE = 16
Run = Callable[[int], object]
"""One call of a kernel, on one set of buffers."""


@dataclass
class Case:
    """One kernel at one size."""

    name: str
    num_bytes: int
    """That must be read or written at least."""
    flops: int
    """That must be done at least."""
    copies: int
    """Sets of buffers."""
    run: Run
    error: Callable[[], float]
    """Of a run on fresh numbers, relative to float64: the norm of the difference by the norm of the truth."""
    tolerance: float
    peers: dict[str, Run] = field(default_factory=dict)


@dataclass(frozen=True)
class Shape:
    """Attention heads, as of Llama-3-8B."""

    heads: int = 32
    kv_heads: int = 8
    size: int = 128


def num_copies(num_bytes: int) -> int:
    """Sets of buffers for a case that touches so many bytes."""
    return max(1, min(64, -(-ROTATED_BYTES // num_bytes)))


def distance(found: Tensor, truth: Tensor) -> float:
    """Relative to the truth."""
    truth = truth.double()
    return float((found.double() - truth).norm() / truth.norm())


def equal_requests(queries: int, length: int, table: Tensor) -> AttentionBatch:
    """A batch of requests with as many new tokens and as many tokens in all. table: int32 [R, pages]."""
    on, requests = table.device, len(table)
    return AttentionBatch(
        torch.arange(0, requests * queries + 1, queries, dtype=torch.int32, device=on),
        torch.full((requests,), length, dtype=torch.int32, device=on),
        table,
        torch.full((requests * queries,), -1, dtype=torch.int64, device=on),
        queries,
        length,
    )


def attention_case(
    launcher: KernelLauncher,
    on: str,
    name: str,
    queries: int,
    contexts: int,
    requests: int,
    kept: torch.dtype,
    shape: Shape,
    whole: bool = False,
) -> Case:
    """Requests with `queries` new tokens each, behind `contexts` tokens in the cache.

    whole: a token sees those behind it, too.
    """
    length = queries + contexts
    pages = -(-length // BLOCK_SIZE)
    cache_bytes = 2 * requests * length * shape.kv_heads * shape.size * kept.itemsize
    io_bytes = 2 * requests * queries * shape.heads * shape.size * 2
    pairs = requests * (queries * contexts + (queries**2 if whole else queries * (queries + 1) // 2))
    copies = num_copies(cache_bytes)
    pool = (copies, requests * pages, shape.kv_heads, BLOCK_SIZE, shape.size)
    k, v = (torch.empty(pool, dtype=torch.bfloat16, device=on).normal_().to(kept) for _ in range(2))
    q = torch.randn(copies, requests * queries, shape.heads, shape.size, device=on).bfloat16()
    table = torch.randperm(requests * pages, device=on).int().view(requests, pages)
    batch = equal_requests(queries, length, table)
    workspace = attention.Workspace.allocate(launcher.multiprocessors, on)
    out, scale, future = torch.empty_like(q[0]), shape.size**-0.5, WHOLE if whole else 0

    def run(i: int) -> Tensor:
        tensors = (q[i], k[i], v[i], batch)
        return attention.paged_attention(launcher, workspace, *tensors, scale, future=future, out=out)

    def error() -> float:
        found, worst = run(0).clone(), 0.0
        for request in {0, requests // 2, requests - 1}:
            row = slice(request * queries, (request + 1) * queries)
            keys, values = (
                exchange_chunks(cache[0, table[request].long()])
                .transpose(0, 1)
                .flatten(1, 2)[:, :length]
                .double()
                for cache in (k, v)
            )
            some = torch.randperm(queries, device=on)[:64]  # float64 of all would take too long
            for head in range(shape.heads):
                of = head * shape.kv_heads // shape.heads
                logits = q[0, row][some, head].double() @ keys[of].T * scale
                hidden = torch.arange(length, device=on) > (contexts + some)[:, None] + future
                truth = torch.softmax(logits.masked_fill(hidden, -torch.inf), 1) @ values[of]
                worst = max(worst, distance(found[row][some, head], truth))
        return worst

    peers: dict[str, Run] = {}
    if kept == torch.bfloat16 and contexts in (0, length - 1) and length % BLOCK_SIZE == 0:
        dense = (copies, requests, shape.kv_heads, length, shape.size)

        def torch_attention(i: int) -> Tensor:
            heads = q[i].view(requests, queries, shape.heads, shape.size).transpose(1, 2)
            return functional.scaled_dot_product_attention(
                *(heads, k.view(dense)[i], v.view(dense)[i]),
                is_causal=contexts == 0 and not whole,
                enable_gqa=True,
            )

        peers["torch"] = torch_attention
    if queries == 1 and kept == torch.bfloat16 and (flashinfer := _flashinfer()) is not None:
        peers["flashinfer"] = _flashinfer_decode(flashinfer, q, k, v, table, length, shape)
    num_bytes, flops = cache_bytes + io_bytes, 4 * pairs * shape.heads * shape.size
    return Case(name, num_bytes, flops, copies, run, error, 2e-2, peers)


def _flashinfer() -> Any:
    try:
        import flashinfer  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return None
    return flashinfer


def _flashinfer_decode(
    flashinfer: Any, q: Tensor, k: Tensor, v: Tensor, table: Tensor, length: int, shape: Shape
) -> Run:
    requests, pages = table.shape
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device=q.device), "HND", use_tensor_cores=True
    )
    wrapper.plan(
        torch.arange(0, requests * pages + 1, pages, dtype=torch.int32, device=q.device),
        table.flatten(),
        torch.full((requests,), (length - 1) % BLOCK_SIZE + 1, dtype=torch.int32, device=q.device),
        *(shape.heads, shape.kv_heads, shape.size, BLOCK_SIZE),
        q_data_type=q.dtype,
        kv_data_type=k.dtype,
    )
    return lambda i: wrapper.run(q[i], (k[i], v[i]))


def decode_cases(launcher: KernelLauncher, on: str, quick: bool, shape: Shape = Shape()) -> Iterator[Case]:
    """One new token per request."""
    sizes = [(b, c) for b in (1, 8, 64, 256) for c in (512, 4096, 32768)]
    if quick:
        sizes = [(8, 32768), (64, 4096)]
    for requests, length in sizes:
        for kept in (torch.bfloat16, torch.float8_e4m3fn):
            if kept != torch.bfloat16 and (requests, length) != (64, 4096):
                continue
            name = f"decode {requests} x {length} {str(kept).removeprefix('torch.')}"
            yield attention_case(launcher, on, name, 1, length - 1, requests, kept, shape)


def prefill_cases(launcher: KernelLauncher, on: str, quick: bool, shape: Shape = Shape()) -> Iterator[Case]:
    """One request's prompt, alone or after a long context."""
    for queries in (2048,) if quick else (512, 2048, 8192):
        for context in (0, 30720):
            name = f"prefill {queries} after {context}"
            yield attention_case(launcher, on, name, queries, context, 1, torch.bfloat16, shape)


def encoder_cases(launcher: KernelLauncher, on: str, quick: bool) -> Iterator[Case]:
    """Whole prompts of an encoder with the heads of BERT-base."""
    for requests, length in ((64, 128),) if quick else ((64, 128), (256, 128), (32, 512), (1, 8192)):
        name = f"encoder {requests} x {length}"
        yield attention_case(
            *(launcher, on, name, length, 0, requests, torch.bfloat16, Shape(12, 12, 64)), whole=True
        )


def write_cases(launcher: KernelLauncher, on: str, quick: bool, shape: Shape = Shape()) -> Iterator[Case]:
    """QKV rows of 64 and 8,192 tokens: rotated, written, also with the norm of heads, also as fp8."""
    for tokens in (64, 8192):
        for kept, normed in ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float8_e4m3fn, False)):
            yield _write_case(launcher, on, tokens, kept, normed, shape)


def _write_case(
    launcher: KernelLauncher, on: str, tokens: int, kept: torch.dtype, normed: bool, shape: Shape
) -> Case:
    read = tokens * (shape.heads + 2 * shape.kv_heads) * shape.size * 2
    written = tokens * shape.size * (2 * shape.heads + 2 * shape.kv_heads * kept.itemsize)
    copies, pages = num_copies(read + written), -(-tokens // BLOCK_SIZE)
    widths = [shape.heads, shape.kv_heads, shape.kv_heads]
    qkv = torch.randn(copies, tokens, sum(widths), shape.size, device=on).bfloat16()
    pool = (copies, pages, shape.kv_heads, BLOCK_SIZE, shape.size)
    k_cache, v_cache = (torch.zeros(pool, device=on).to(kept) for _ in range(2))
    angles = torch.rand(tokens, shape.size, device=on) * 6
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    slots = torch.randperm(pages * BLOCK_SIZE, device=on)[:tokens]
    weight = torch.rand(shape.size, device=on).bfloat16() + 0.5
    head_norms = kv.HeadNorms(weight, weight, 1e-6) if normed else kv.NO_NORMS

    def run(i: int) -> None:
        q, k, v = qkv[i].split(widths, 1)
        kv.write_kv(launcher, q, k, v, k_cache[i], v_cache[i], slots, cos=cos, sin=sin, norms=head_norms)

    def error() -> float:
        q, k, v = (x.double() for x in qkv[0].split(widths, 1))
        if normed:
            q, k = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double() for x in (q, k))
        reference.rotary(q, k, cos.double(), sin.double())
        run(0)
        rows = [
            token_view(exchange_chunks(cache[0]))[slots // BLOCK_SIZE, slots % BLOCK_SIZE]
            for cache in (k_cache, v_cache)
        ]
        worst = max(distance(rows[0].float(), k), distance(rows[1].float(), v))
        return max(worst, distance(qkv[0, :, : shape.heads], q))

    def in_torch(i: int) -> None:
        q, k, v = qkv[i].split(widths, 1)
        if normed:
            q, k = (reference.rms_norm(x, weight, 1e-6) for x in (q, k))
        reference.rotary(q, k, cos, sin)
        for heads, cache in ((k, k_cache), (v, v_cache)):
            token_view(cache[i])[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = heads.to(kept)

    name = f"write_kv {tokens} {str(kept).removeprefix('torch.')}{' normed' if normed else ''}"
    peers: dict[str, Run] = {"torch": in_torch} if kept == torch.bfloat16 else {}
    return Case(name, read + written, 0, copies, run, error, 5e-2 if kept.itemsize == 1 else 1e-2, peers)


def row_cases(launcher: KernelLauncher, on: str, quick: bool, tokens: int = 8192) -> Iterator[Case]:
    """Norms of rows of 4,096, and gates of 14,336."""
    size = 4096
    for rows in (min(64, tokens), tokens):
        copies = num_copies(8 * rows * size)
        x, residual = (torch.randn(copies, rows, size, device=on).bfloat16() for _ in range(2))
        weight = torch.rand(size, device=on).bfloat16() + 0.5
        yield _norm_case(launcher, f"add_rms_norm {rows} x {size}", x, residual, weight)
        yield _gate_case(launcher, rows, torch.randn(copies, rows, 28672, device=on).bfloat16())


def _norm_case(launcher: KernelLauncher, name: str, x: Tensor, residual: Tensor, weight: Tensor) -> Case:
    def error() -> float:
        total = (x[0] + residual[0]).double()
        truth = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()
        return distance(norms.rms_norm(launcher, x[0], weight, 1e-6, residual=residual[0]), truth)

    return Case(
        name,
        8 * x[0].numel(),
        0,
        len(x),
        lambda i: norms.rms_norm(launcher, x[i], weight, 1e-6, residual=residual[i]),
        error,
        1e-2,
        {"torch": lambda i: reference.add_rms_norm(x[i], residual[i], weight, 1e-6)},
    )


def _gate_case(launcher: KernelLauncher, rows: int, x: Tensor) -> Case:
    def error() -> float:
        return distance(
            gates.activate_and_mul(launcher, x[0], Activation.SILU), reference.silu_and_mul(x[0].double())
        )

    return Case(
        f"silu_and_mul {rows} x {x.shape[2] // 2}",
        3 * x[0].numel(),
        0,
        len(x),
        lambda i: gates.activate_and_mul(launcher, x[i], Activation.SILU),
        error,
        1e-2,
        {"torch": lambda i: reference.silu_and_mul(x[i])},
    )


def lora_cases(
    launcher: KernelLauncher, on: str, quick: bool, size: int = 4096, rows: tuple[int, ...] = (1, 64, 2048)
) -> Iterator[Case]:
    """What adapters of rank 16 add to a square product: one for all rows, and one for each of 32 parts of them."""
    for num_rows in rows[-2:] if quick else rows:
        for num_adapters in {1, min(32, num_rows)}:
            yield _lora_case(launcher, on, num_rows, num_adapters, size)


def _lora_case(launcher: KernelLauncher, on: str, num_rows: int, num_adapters: int, size: int) -> Case:
    rank, device = 16, torch.device(on)
    num_bytes = 2 * (num_adapters * 2 * rank * size + 3 * num_rows * size)
    copies, share = num_copies(num_bytes), num_rows // num_adapters
    num_rows = share * num_adapters
    x, out = (torch.randn(copies, num_rows, size, device=on).bfloat16() for _ in range(2))
    a = (torch.randn(copies, num_adapters, rank, size, device=on) / size**0.5).bfloat16()
    b = torch.randn(copies, num_adapters, size, rank, device=on).bfloat16()
    indices = torch.arange(num_rows)
    starts = torch.arange(0, num_rows + 1, share)

    def adapters(i: int) -> AdapterRows:
        deltas = [Delta(a[i, n], panels(b[i, n]), 0, size, 0.5) for n in range(num_adapters)]
        weights = [AdapterWeights([[delta]], ((size, size),), torch.bfloat16) for delta in deltas]
        own = AdapterRows(indices, starts, weights, num_rows)
        own.native = lora.DeviceRows.of(own, device)
        own.native.tiles = lora.RowTiles.of(own, device)
        return own

    batches = [adapters(i) for i in range(copies)]

    def run(i: int) -> None:
        lora.adapt(launcher, x[i], out[i], batches[i], 0)

    def error() -> float:
        before = out[0].double()
        low = x[0].double().view(num_adapters, share, size) @ a[0].double().mT
        added = 0.5 * (low @ b[0].double().mT).view(num_rows, size)
        run(0)
        return distance(out[0], before + added)

    def in_torch(i: int) -> None:
        low = x[i].view(num_adapters, share, size) @ a[i].mT
        out[i] += 0.5 * (low @ b[i].mT).view(num_rows, size)

    name = f"lora {num_rows} rows of {num_adapters} adapters"
    flops = 4 * num_rows * rank * size
    return Case(name, num_bytes, flops, copies, run, error, 1e-2, {"torch": in_torch})


def sampling_cases(
    launcher: KernelLauncher,
    on: str,
    quick: bool,
    rows: int = 64,
    vocab_sizes: tuple[int, ...] = (32768, 131072),
) -> Iterator[Case]:
    """Greedy, and top-k, top-p and min-p at once."""
    for vocab_size in vocab_sizes:
        logits = torch.randn(num_copies(4 * rows * vocab_size), rows, vocab_size, device=on) * 3
        for greedy in (True, False):
            yield _sampling_case(launcher, on, logits, greedy)


def _sampling_case(launcher: KernelLauncher, on: str, logits: Tensor, greedy: bool) -> Case:
    copies, rows, vocab_size = logits.shape
    parameters = [
        sampling.RowSampling(seed=row)
        if greedy
        else sampling.RowSampling(seed=row, position=7, temperature=0.8, top_k=50, top_p=0.9, min_p=0.01)
        for row in range(rows)
    ]
    request, sampler = (
        sampling.sampling_request(parameters),
        sampling.Sampler(launcher, rows, vocab_size, on=on),
    )
    request = request.with_tensors([tensor.to(on) for tensor in request.tensors])

    def error() -> float:
        """The share of rows whose token is none that may be drawn."""
        tokens = sampler.sample(logits[0], request).token_ids
        if greedy:
            return float((tokens != logits[0].argmax(1)).double().mean())
        values, order = (logits[0].double() / 0.8).sort(1, descending=True)
        masses = values[:, :50].softmax(1)
        kept = (masses.cumsum(1) - masses < 0.9 + 1e-6) & (masses >= (0.01 - 1e-6) * masses[:, :1])
        return 1 - float(((order[:, :50] == tokens[:, None]) & kept).any(1).double().mean())

    def in_torch(i: int) -> Tensor:
        if greedy:
            return logits[i].argmax(1)
        values, order = (logits[i] / 0.8).topk(50, dim=1)
        masses = values.softmax(1)
        masses = masses * ((masses.cumsum(1) - masses < 0.9) & (masses >= 0.01 * masses[:, :1]))
        noise = torch.empty_like(masses).exponential_()
        return order.gather(1, (masses / noise).argmax(1, keepdim=True))

    name = f"sample {rows} x {vocab_size}{' greedy' if greedy else ''}"
    run: Run = lambda i: sampler.sample(logits[i], request)  # noqa: E731
    return Case(name, logits[0].nbytes, 0, copies, run, error, 0.0, {"torch": in_torch})


CASES: dict[str, Callable[[KernelLauncher, str, bool], Iterator[Case]]] = {
    "decode": decode_cases,
    "prefill": prefill_cases,
    "encoder": encoder_cases,
    "write": write_cases,
    "rows": row_cases,
    "lora": lora_cases,
    "sampling": sampling_cases,
}


def seconds(run: Run, copies: int, replays: int = 20) -> float:
    """Of one call: the median over replays of a graph of at least 10 calls."""
    calls = max(10, copies)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # loads kernels, fills caches of the allocator
        for i in range(3):
            run(i % copies)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            run(i % copies)
    times = []
    for replay in range(replays + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= 2:
            times.append(begin.elapsed_time(end) / 1000 / calls)
    return statistics.median(times)


def floors(on: str) -> tuple[float, float]:
    """Bytes per second of a copy (read and written), and operations per second of a bf16 product."""
    source = torch.randn(1 << 29, device=on).bfloat16()
    target = torch.empty_like(source)
    copying = seconds(lambda i: target.copy_(source), 1)
    a, b = (torch.randn(8192, 8192, device=on).bfloat16() for _ in range(2))
    return 2 * source.nbytes / copying, 2 * 8192**3 / seconds(lambda i: a @ b, 1)


def launch_overhead(launcher: KernelLauncher, on: str, calls: int = 2000) -> dict[str, float]:
    """Seconds that Python takes for a launch of ours, and for one of PyTorch's."""
    x = torch.randn(1, 4096, device=on).bfloat16()
    weight, out = torch.ones(4096, device=on).bfloat16(), torch.empty_like(x)
    result = {}
    for name, run in (
        ("rms_norm", lambda: norms.rms_norm(launcher, x, weight, 1e-6, out=out)),
        ("torch add", lambda: torch.add(x, x, out=out)),
    ):
        for _ in range(100):
            run()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        result[name] = (time.perf_counter() - begin) / calls
        torch.cuda.synchronize()
    return result


def measure(case: Case, bandwidth: float, rate: float) -> dict[str, Any]:
    """Time a case and its peers."""
    taken = seconds(case.run, case.copies)
    row: dict[str, Any] = {
        "us": taken * 1e6,
        "TB/s": case.num_bytes / taken / 1e12,
        "TFLOP/s": case.flops / taken / 1e12,
        "of_floor": max(case.num_bytes / bandwidth, case.flops / rate) / taken,
    }
    for name, run in case.peers.items():
        try:
            row[f"{name}_us"] = seconds(run, case.copies) * 1e6
        except (RuntimeError, ValueError) as error:  # a peer that cannot is told of, and stops nobody
            row[f"{name}_error"] = str(error).splitlines()[0][:200]
    return row


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> int:
    """Check, measure, print, write. Exit status 1 if a result was wrong."""
    parser = argparse.ArgumentParser(description="Check and measure the CUDA kernels.")
    parser.add_argument("--only", choices=CASES, action="append", help="may be given again")
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--check", action="store_true", help="do not measure (as under compute-sanitizer)")
    parser.add_argument("--out", type=Path, help="folder of a JSON file of all figures")
    options = parser.parse_args()
    launcher, on = CudaLauncher.at(0), "cuda:0"
    bandwidth, rate = (1.0, 1.0) if options.check else floors(on)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cases": {},
    }
    if not options.check:
        report |= {
            "copy_bytes_per_s": bandwidth,
            "product_flops": rate,
            "launch_s": launch_overhead(launcher, on),
        }
        print(f"{report['device']}: copy {bandwidth / 1e12:.2f} TB/s, product {rate / 1e12:.0f} TFLOP/s")
        for name, taken in report["launch_s"].items():
            print(f"launch of {name}: {taken * 1e6:.1f} us of Python")
    wrong = 0
    for group in options.only or CASES:
        for case in CASES[group](launcher, on, options.quick):
            error = case.error()
            good = error <= case.tolerance
            wrong += not good
            row: dict[str, Any] = {"error": error, "good": good}
            if not options.check:
                row |= measure(case, bandwidth, rate)
            report["cases"][case.name] = row
            figures = "  ".join(f"{key} {_short(value)}" for key, value in row.items())
            print(f"{case.name:40} {figures}", flush=True)
            del case
            torch.cuda.empty_cache()
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        file = options.out / f"kernels-{report['device'].replace(' ', '-')}-{datetime.date.today()}.json"
        file.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{wrong} of {len(report['cases'])} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
