"""What a machine can do at most, and what that means for a work: a floor under every engine's time.

A step reads all weights once (or multiplies with them, where that takes longer) and the keys and values of all
its requests; the prompt is multiplied at the matrix rate. No engine that computes in bfloat16 can be faster.

Both limits come from loops of their own (`probes.cpp`): products of numbers that stay in registers, and reading. A
limit measured with a product that reads and writes memory would move with that product.
"""

from __future__ import annotations

import ctypes
import functools
import json
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from pagewire.ipc.gguf.config import gguf_model_config
from pagewire.ipc.gguf.file import read_metadata
from pagewire.kernels.cpu import build
from pagewire.kernels.cpu import kernels as cpu_kernels

REPEATS = 7
READ_BYTES = 1 << 30
ROUNDS = 1 << 18


@dataclass(frozen=True)
class Limits:
    """Bytes per second read by all cores, and bf16 floating-point operations per second in registers."""

    read_bytes_per_s: float
    flop_per_s: float

    def best(self, other: Limits) -> Limits:
        """The higher of both."""
        return Limits(
            max(self.read_bytes_per_s, other.read_bytes_per_s), max(self.flop_per_s, other.flop_per_s)
        )

    def floor_s(self, num_bytes: float, flop: float) -> float:
        """The least time that reading and multiplying take, one beside the other."""
        return max(num_bytes / self.read_bytes_per_s, flop / self.flop_per_s)


def seconds(work: Callable[[], object], chosen: Callable[[list[float]], float] = min) -> float:
    """The time of one of several runs, after a warm-up; the fastest one unless another is chosen."""
    work()
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return chosen(times)


@functools.cache
def probes() -> ctypes.CDLL:
    """The loops of `probes.cpp`, for the instructions that the kernels use here."""
    kernels = cpu_kernels.load()
    if kernels is None:
        raise RuntimeError("the limits need the compiled kernels")
    folder = Path(build.__file__).parent
    sources = [Path(__file__).with_name("probes.cpp"), folder / "team.cpp"]
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory) / "probes.so"
        command = [*build.compiler_command(), *build.FLAGS, "-shared", *kernels.isa.compiler_flags]
        subprocess.run([*command, f"-I{folder}", *map(str, sources), "-o", str(library)], check=True)
        loaded = ctypes.CDLL(str(library))
    loaded.probe_multiply.argtypes = [ctypes.c_int64, ctypes.c_int32]
    loaded.probe_multiply.restype = ctypes.c_double
    loaded.probe_read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32]
    loaded.probe_change.argtypes = loaded.probe_read.argtypes
    loaded.probe_float.argtypes = [ctypes.c_int64, ctypes.c_int32]
    loaded.probe_float.restype = ctypes.c_double
    return loaded


def measure_limits(chosen: Callable[[list[float]], float] = min) -> Limits:
    """Measured on all cores that this process may use. chosen: of several times; the least is the machine's own."""
    library, num_threads = probes(), torch.get_num_threads()
    source = torch.ones(READ_BYTES, dtype=torch.uint8)
    read = READ_BYTES / seconds(
        lambda: library.probe_read(source.data_ptr(), READ_BYTES, num_threads), chosen
    )
    flop = library.probe_multiply(1, num_threads) * ROUNDS
    return Limits(read, flop / seconds(lambda: library.probe_multiply(ROUNDS, num_threads), chosen))


def processor() -> str:
    """The processor's name, and the instruction set that the kernels use."""
    names = [line for line in build.CPUINFO.read_text().splitlines() if line.startswith("model name")]
    name = names[0].partition(":")[2].strip() if names else platform.processor()
    kernels = cpu_kernels.load()
    return f"{name}, {kernels.isa.name if kernels else 'reference'}"


def floor_seconds(
    limits: Limits, model: Path, count: int, num_in: int, num_out: int, shared: int, bits: float = 16
) -> float:
    """The least time for `count` prompts of `num_in` tokens (`shared` of them computed once), `num_out` each.

    bits: of a weight as it is read; products count as those of bfloat16, so narrow ones may be faster than this.
    """
    config = (
        gguf_model_config(read_metadata(model))
        if model.is_file()
        else json.loads((model / "config.json").read_text())
    )
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    num_experts, chosen = config.get("num_experts", 1), config.get("num_experts_per_tok", 1)
    inner = 3 * hidden * config.get("moe_intermediate_size", config["intermediate_size"])
    others = hidden * head_dim * 2 * (heads + kv_heads)
    body, head = layers * (others + chosen * inner), hidden * config["vocab_size"]
    kv_bytes = 2 * layers * kv_heads * head_dim * 2

    def streaming(rows: int) -> float:
        """The time to read the weights. Of experts, it is as many as `rows` tokens choose on average, at random."""
        read = num_experts * (1 - (1 - chosen / num_experts) ** rows)
        return bits / 8 * (layers * (others + read * inner) + head) / limits.read_bytes_per_s

    def step(rows: int) -> float:
        """The weights are streamed or multiplied, whichever takes longer."""
        return max(streaming(rows), 2 * rows * (body + head) / limits.flop_per_s)

    prompt_tokens = shared + count * (num_in - shared)
    attention = 2 * layers * heads * head_dim * 2 * count * (num_in - shared) * (num_in + shared) / 2
    attention += 2 * layers * heads * head_dim * 2 * shared * shared / 2
    flop = 2 * (prompt_tokens * body + count * head) + attention
    seconds = max(flop / limits.flop_per_s, streaming(prompt_tokens))
    for done in range(num_in, num_in + num_out - 1):
        seconds += step(count) + count * (done + 1) * kv_bytes / limits.read_bytes_per_s
    return seconds
