"""The time to the first token of prompts that an engine has seen before its restart, or that another one has seen.

    python -m benchmarks.tiers [--model FOLDER] [--prompts 20] [--tokens 2000] [--cores]

One prompt at a time: in one engine cold and then warm, and in another one that finds them on disk (kv_cache_dir);
with --cores in one that runs beside it, and fetches them over tcp on loopback (kv_peers).
The files are written out and dropped from the system's cache before the restart, so they are read from the disk.
Without --model it is a random Llama of 300M weights (`make_families`). Status 1: tokens differ, or a prompt was not
found.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

from benchmarks.limits import processor
from benchmarks.make_families import make
from pagewire import LLM, SamplingParams

FIRST = SamplingParams(temperature=0.0, max_tokens=1)
VOCABULARY = 2_000  # of the smallest model that may be named


def drop_from_memory(folder: Path) -> int:
    """Have the files in a folder written out, and dropped from the system's cache; returns their bytes."""
    total = 0
    for path in folder.rglob("*.*"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        total += os.fstat(file).st_size
        os.close(file)
    return total


@contextmanager
def core(model: Path, num_bytes: int, address: str, other: str) -> Iterator[LLM]:
    """A frontend of a core that fetches blocks from another one, and gives it blocks. num_bytes: of its cache."""
    options = [
        "--listen",
        address,
        "--kv-peers",
        other,
        "--kv-cache-memory-bytes",
        str(num_bytes),
        "--device",
        "cpu",
    ]
    command = [
        sys.executable,
        "-m",
        "pagewire.cli.main",
        "core",
        "--model",
        str(model),
        "--skip-tokenizer-init",
    ]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline(), "the core does not start"
        with LLM.attach(address) as llm:
            yield llm
    finally:
        process.terminate()
        process.wait()


def wait_for_peer(llm: LLM) -> None:
    """Wait until a core can be asked: both have read the whole checkpoint by then."""
    while not any(
        row["name"] == "pagewire:kv_peers" and row["value"] for row in llm.session.call("metrics").result()
    ):
        time.sleep(0.1)


def first_tokens(llm: LLM, prompts: Sequence[list[int]]) -> tuple[list[float], list[int], list[int]]:
    """Of each prompt: seconds to its first token, the token, and how many of its tokens were cached."""
    seconds, tokens, cached = [], [], []
    for prompt in prompts:
        began = time.perf_counter()
        (output,) = llm.generate([prompt], FIRST, use_tqdm=False)
        seconds.append(time.perf_counter() - began)
        tokens.append(output.outputs[0].token_ids[0])
        cached.append(output.num_cached_tokens or 0)
    return seconds, tokens, cached


def measure(model: Path, tier: Path, prompts: Sequence[list[int]]) -> bool:
    """Print the times of each phase; False if a token differs, or a prompt was not found."""
    num_bytes = (len(prompts) + 2) * len(prompts[0]) * 64 << 10  # more than any of these models needs

    def engine() -> LLM:
        return LLM(
            str(model),
            device="cpu",
            skip_tokenizer_init=True,
            kv_cache_memory_bytes=num_bytes,
            kv_cache_dir=str(tier),
        )

    warm_up = [[5] * len(prompts[0])]
    with engine() as llm:
        first_tokens(llm, warm_up)
        phases = {"cold": first_tokens(llm, prompts), "memory": first_tokens(llm, prompts)}
        began = time.perf_counter()
    saved = time.perf_counter() - began
    size = drop_from_memory(tier)
    print(f"ended, with {size / 1e9:.2f} GB on disk, in {saved:.1f} s")
    with engine() as llm:
        first_tokens(llm, [[6] * len(prompts[0])])
        phases["disk"] = first_tokens(llm, prompts)
        phases["memory, after it"] = first_tokens(llm, prompts)
    return summed_up(phases)


def measure_cores(model: Path, prompts: Sequence[list[int]]) -> bool:
    """As `measure`, of two cores that run side by side."""
    num_bytes = (len(prompts) + 2) * len(prompts[0]) * 64 << 10
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    one, other = (f"tcp://127.0.0.1:{probe.getsockname()[1]}" for probe in probes)
    for probe in probes:
        probe.close()
    with core(model, num_bytes, one, other) as first, core(model, num_bytes, other, one) as second:
        for number, llm in enumerate((first, second)):
            wait_for_peer(llm)
            first_tokens(llm, [[5 + number] * len(prompts[0])])
        phases = {"cold": first_tokens(first, prompts), "memory": first_tokens(first, prompts)}
        phases["another core"] = first_tokens(second, prompts)
        phases["memory, after it"] = first_tokens(second, prompts)
    return summed_up(phases)


def summed_up(phases: dict[str, tuple[list[float], list[int], list[int]]]) -> bool:
    """Print the times of phases; False if a token differs, or a prompt was not found."""
    cold = statistics.median(phases["cold"][0])
    for name, (seconds, _, cached) in phases.items():
        middle = statistics.median(seconds)
        print(
            f"{name:17} {middle * 1e3:8.1f} ms ({middle / cold:6.1%} of cold), from {min(seconds) * 1e3:.1f} to "
            f"{max(seconds) * 1e3:.1f}; {min(cached)} tokens cached"
        )
    found = all(min(cached) for name, (_, _, cached) in phases.items() if name != "cold")
    return found and all(tokens == phases["cold"][1] for _, tokens, _ in phases.values())


def main() -> int:
    """Make a model and prompts, and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a model folder; default: a random Llama of 300M weights")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=2000, help="of each prompt")
    parser.add_argument("--cores", action="store_true", help="two cores, in place of a restart")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pagewire-tiers-") as scratch:
        model = options.model or Path(scratch) / "llama"
        if options.model is None:
            make("llama", model)
        random = Random(1)
        prompts = [
            [random.randrange(3, VOCABULARY) for _ in range(options.tokens)] for _ in range(options.prompts)
        ]
        print(f"{processor()}; {options.prompts} prompts of {options.tokens} tokens, one at a time")
        right = (
            measure_cores(model, prompts)
            if options.cores
            else measure(model, Path(scratch) / "tier", prompts)
        )
        return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
