"""Times the CPU kernels: products and attention beside the machine's limits, attention beside PyTorch's, too.

    python -m benchmarks.kernels_cpu
    python -m benchmarks.kernels_cpu --quantised

A share "of floor" is the time that reading or multiplying takes at least (`limits.py`) over the time it took.
The last columns are of caches of 8 and 4 bits, beside the dtype of the model. PyTorch gets its best case: the keys
and values of each request already gathered into one contiguous tensor, which no paged cache has. Caches and
matrices rotate between calls, so that what memory limits reads memory.
"""

import argparse
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.limits import Limits, measure_limits, processor
from pagewire.kernels import linear
from pagewire.kernels.data.integers import INT8, Integers, quantise
from pagewire.kernels.data.kv_codes import CODES, row_width
from pagewire.kernels.data.paging import AttentionBatch, Cache
from pagewire.kernels.data.weight import Weight
from pagewire.kernels.ops import paged_attention, store_kv

BLOCK_SIZE = 16
ROWS = (1, 2, 8, 32, 128, 512, 2048)
SIZES = ((5632, 1024), (1024, 2816), (4096, 4096))
MATRIX_BYTES = 128 << 20
QUANTISED_ROWS = (1, 8, 32, 512)
QUANTISED_SIZES = ((5632, 1024), (1024, 2816), (3072, 1024), (16384, 2048), (2048, 8192))
"""Of Llama models with hidden sizes of 1,024 and 2,048."""
SCHEMES = {
    "int8/row": INT8,
    "int8/32": Integers(8, 32, 128),
    "int4/32": Integers(4, 32, 8),
    "int4/32 min": Integers(4, 32, 0),
    "int4/128": Integers(4, 128, 8),
}


@dataclass(frozen=True, slots=True)
class Case:
    """Requests of equal length: `query_len` new tokens each on a context of `seq_len`."""

    name: str
    num_requests: int
    query_len: int
    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    copies: int

    @property
    def kv_elements(self) -> int:
        return 2 * self.num_requests * self.seq_len * self.num_kv_heads * self.head_dim

    @property
    def flops(self) -> int:
        pairs = self.query_len * self.seq_len - self.query_len * (self.query_len - 1) // 2
        return 4 * self.num_requests * self.num_heads * pairs * self.head_dim


CASES = (
    Case("decode, 16 x 4,096, heads 32/8", 16, 1, 4096, 32, 8, 128, 1),
    Case("decode, 64 x 1,024, heads 32/8", 64, 1, 1024, 32, 8, 128, 1),
    Case("decode, 8 x 1,088, heads 16/8, 64", 8, 1, 1088, 16, 8, 64, 8),
    Case("decode, 32 x 192, heads 16/8, 64", 32, 1, 192, 16, 8, 64, 8),
    Case("decode, 1 x 32,768, heads 32/8", 1, 1, 32768, 32, 8, 128, 2),
    Case("decode, 16 x 2,048, heads 16/16", 16, 1, 2048, 16, 16, 128, 1),
    Case("decode, 16 x 2,048, heads 64/8, 64", 16, 1, 2048, 64, 8, 64, 2),
    Case("decode, 4 x 512, heads 14/2, 64", 4, 1, 512, 14, 2, 64, 64),
    Case("prefill, 2,048, heads 32/8", 1, 2048, 2048, 32, 8, 128, 1),
    Case("prefill, 4 x 512, heads 14/2, 64", 4, 512, 512, 14, 2, 64, 4),
    Case("chunk of 256 at 8,192, heads 32/8", 1, 256, 8192, 32, 8, 128, 1),
)


def measure(calls: list[Callable[[], object]], seconds: float, share: float = 0.5) -> float:
    """The time of one call, going round the list, that a share of the calls are below; default: the median."""
    for call in calls:
        call()
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < deadline:
        call = calls[len(times) % len(calls)]
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[int(len(times) * share)]


def fastest(calls: list[Callable[[], object]], seconds: float) -> float:
    """The time of one call, going round the list, that a twentieth of the calls are below."""
    return measure(calls, seconds, share=0.05)


def paged_call(case: Case, dtype: torch.dtype, cache_dtype: torch.dtype) -> Callable[[], object]:
    blocks_each = -(-case.seq_len // BLOCK_SIZE)
    num_blocks = case.num_requests * blocks_each
    width = row_width(case.head_dim, cache_dtype)
    k, v = (torch.empty(num_blocks, case.num_kv_heads, BLOCK_SIZE, width, dtype=cache_dtype) for _ in "kv")
    tokens = torch.randn(num_blocks * BLOCK_SIZE, case.num_kv_heads, case.head_dim).to(dtype)
    cache = Cache(k, v)
    store_kv(tokens, tokens, cache, torch.arange(len(tokens)))
    batch = AttentionBatch(
        query_start_loc=torch.arange(case.num_requests + 1, dtype=torch.int32) * case.query_len,
        seq_lens=torch.full((case.num_requests,), case.seq_len, dtype=torch.int32),
        block_table=torch.randperm(num_blocks, dtype=torch.int32).view(case.num_requests, blocks_each),
        slot_mapping=torch.full((case.num_requests * case.query_len,), -1),
        max_query_len=case.query_len,
        max_seq_len=case.seq_len,
    )
    q = torch.randn(case.num_requests * case.query_len, case.num_heads, case.head_dim).to(dtype)
    return lambda: paged_attention(q, cache, batch, case.head_dim**-0.5)


def dense_call(case: Case, dtype: torch.dtype) -> Callable[[], object]:
    def randn(num_heads: int, length: int) -> Tensor:
        return torch.randn(case.num_requests, num_heads, length, case.head_dim).to(dtype)

    q, k = randn(case.num_heads, case.query_len), randn(case.num_kv_heads, case.seq_len)
    v = randn(case.num_kv_heads, case.seq_len)
    grouped = case.num_heads != case.num_kv_heads
    if case.query_len in (1, case.seq_len):
        causal = case.query_len > 1
        return lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
    offset = case.seq_len - case.query_len
    mask = torch.ones(case.query_len, case.seq_len, dtype=torch.bool).tril(offset)
    return lambda: functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


def packed_copies(weight: Weight) -> list[linear.Linear]:
    """So many packed copies of a matrix [N, K] that no processor's cache holds them."""
    return [linear.pack(weight) for _ in range(max(2, -(-MATRIX_BYTES // weight.num_bytes)))]


def product_calls(size: tuple[int, int], num_rows: int, dtype: torch.dtype) -> list[Callable[[], object]]:
    """Products of rows with as many matrices [N, K] as no processor's cache holds."""
    x = torch.randn(num_rows, size[1]).to(dtype)
    weight = linear.dense_weight(torch.randn(size).to(dtype))
    return [functools.partial(product, x) for product in packed_copies(weight)]


def print_quantised(limits: Limits, dtype: torch.dtype, seconds: float) -> None:
    """A row for each matrix and number of rows: the dense product, and each scheme's time beside it."""
    print(
        f"\n{'quantised: ms, of reading, x dense':36}{'dense ms':>10}", *(f"{name:>22}" for name in SCHEMES)
    )
    for size in QUANTISED_SIZES:
        dense = linear.dense_weight(torch.randn(size).to(dtype))
        products = {name: packed_copies(quantise(dense, scheme)) for name, scheme in SCHEMES.items()}
        plain = packed_copies(dense)
        for num_rows in QUANTISED_ROWS:
            x = torch.randn(num_rows, size[1]).to(dtype)
            base = fastest([functools.partial(product, x) for product in plain], seconds)
            line = f"{f'{num_rows} x [{size[0]:,}, {size[1]:,}]':36}{base * 1e3:10.3f}"
            for copies in products.values():
                took = fastest([functools.partial(product, x) for product in copies], seconds)
                read = copies[0].num_bytes / limits.read_bytes_per_s
                line += f"{took * 1e3:11.3f}{read / took:6.0%}{base / took:6.2f}"
            print(line, flush=True)


def print_products(limits: Limits, dtype: torch.dtype, seconds: float) -> None:
    """A row for each matrix and number of rows."""
    print(f"\n{'products':36}{'ms':>9}{'GB/s':>8}{'GFLOP/s':>9}{'of floor':>10}  limit")
    for num_out, num_in in SIZES:
        for num_rows in ROWS:
            took = measure(product_calls((num_out, num_in), num_rows, dtype), seconds)
            flop, num_bytes = 2.0 * num_rows * num_out * num_in, num_out * num_in * dtype.itemsize
            print(
                f"{f'{num_rows} x [{num_out:,}, {num_in:,}]':36}{took * 1e3:9.3f}{num_bytes / took / 1e9:8.1f}"
                f"{flop / took / 1e9:9.0f}{limits.floor_s(num_bytes, flop) / took:10.0%}"
                f"  {'memory' if num_bytes / limits.read_bytes_per_s > flop / limits.flop_per_s else 'arithmetic'}"
            )


def print_attention(limits: Limits, dtype: torch.dtype, seconds: float, only: str) -> None:
    """A row for each case."""
    print(
        f"\n{'attention':36}{'ms':>9}{'GB/s':>8}{'GFLOP/s':>9}{'of floor':>10}"
        f"{'torch ms':>10}{'ratio':>8}"
        f"{'int8 ms':>10}{'ratio':>8}{'int4 ms':>10}{'ratio':>8}"
    )
    for case in CASES:
        if only not in case.name:
            continue
        ours, *coded = (
            measure([paged_call(case, dtype, kept) for _ in range(case.copies)], seconds)
            for kept in (dtype, *CODES)
        )
        theirs = measure([dense_call(case, dtype) for _ in range(case.copies)], seconds)
        num_bytes = case.kv_elements * dtype.itemsize
        print(
            f"{case.name:36}{ours * 1e3:9.3f}{num_bytes / ours / 1e9:8.1f}{case.flops / ours / 1e9:9.0f}"
            f"{limits.floor_s(num_bytes, case.flops) / ours:10.0%}{theirs * 1e3:10.3f}{theirs / ours:8.2f}"
            + "".join(f"{each * 1e3:10.3f}{ours / each:8.2f}" for each in coded)
        )


def main() -> None:
    """Measure the machine, then the kernels."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--seconds", type=float, default=1.0, help="per measurement")
    parser.add_argument("--only", default="", help="only cases of attention whose name contains this")
    parser.add_argument("--quantised", action="store_true", help="only products with quantised weights")
    arguments = parser.parse_args()
    dtype: torch.dtype = getattr(torch, arguments.dtype)
    print(f"{processor()}; {arguments.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    limits = measure_limits()
    if arguments.quantised:
        print_quantised(limits, dtype, arguments.seconds)
    else:
        if not arguments.only:
            print_products(limits, dtype, arguments.seconds)
        print_attention(limits, dtype, arguments.seconds, arguments.only)
    limits = limits.best(measure_limits())  # neighbours on the machine may have slowed either
    print(
        f"\nlimits: {limits.read_bytes_per_s / 1e9:.1f} GB/s read, {limits.flop_per_s / 1e9:,.0f} GFLOP/s in bf16 "
        "products of registers"
    )


if __name__ == "__main__":
    main()
