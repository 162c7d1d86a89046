"""Two workers in two network namespaces, as if on two machines: tokens, rate, and a worker that is killed.

    python -m benchmarks.join_netns [MODEL] [--latency-ms 1]

The core and rank 0 are in the one namespace, rank 1 in the other; a link with a latency connects them
(`delayed_link`). They join over TCP with CURVE, and exchange tensors through gloo. Needs root. The tokens are
compared with those of one worker.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.delayed_link import delayed_link

HEAD, OTHER = "10.123.0.1", "10.123.0.2"
PORT = 5710
PROMPTS = [
    f"{word} is" for word in ("Paris", "Water", "The sum", "A list", "London", "Python", "Music", "Light")
]
NAMESPACES = ("pagewire-head", "pagewire-other")


def agent(namespace: str, rank: int, key: Path) -> subprocess.Popen[bytes]:
    """`pagewire worker` in a namespace."""
    command = [sys.executable, "-m", "pagewire.cli.main", "worker", "--join", f"tcp://{HEAD}:{PORT}"]
    return subprocess.Popen(
        ["ip", "netns", "exec", namespace, *command, "--key", str(key), "--rank", str(rank)]
    )


def measure(model: str, joined: Path | None) -> dict[str, object]:
    """Generate with one worker, or with two that join; kill one of them the second time."""
    from pagewire import LLM, SamplingParams

    options = (
        {}
        if joined is None
        else {
            "tensor_parallel_size": 2,
            "distributed_executor_backend": "join",
            "join_address": f"tcp://{HEAD}:{PORT}",
            "join_key": str(joined),
        }
    )
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    with LLM(model, dtype="float32", num_threads=1, kv_cache_memory_bytes=64 << 20, **options) as llm:  # type: ignore[arg-type]
        rounds = []
        for attempt in range(3):
            if attempt == 2 and joined is not None:
                os.kill(worker_in(NAMESPACES[1]), signal.SIGKILL)
            begin = time.perf_counter()
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            seconds = time.perf_counter() - begin
            rounds.append((seconds, [list(output.outputs[0].token_ids) for output in outputs]))
    count = sum(map(len, rounds[0][1]))
    return {
        "tokens": rounds[-1][1],
        "same": all(tokens == rounds[0][1] for _, tokens in rounds),
        "tokens_per_second": round(count / rounds[1][0], 1),
        "seconds_with_a_killed_worker": round(rounds[2][0], 2),
    }


def worker_in(namespace: str) -> int:
    """The process id of the worker that runs in a namespace."""
    pids = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True)
    workers = [
        int(pid)
        for pid in pids.stdout.split()
        if "pagewire.workers.process.main" in psutil.Process(int(pid)).cmdline()
    ]
    return workers[0]


def main() -> None:
    """Run both, and print a JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--latency-ms", type=float, default=1.0, help="of a packet, in either direction")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        print(json.dumps(measure(options.model, options.measure)))
        return
    alone = measure(options.model, None)
    with tempfile.TemporaryDirectory() as folder:
        from pagewire.ipc.join.group_key import GroupKey

        key = Path(folder) / "key"
        GroupKey.read_or_make(key)
        agents: list[subprocess.Popen[bytes]] = []
        with delayed_link(NAMESPACES, (HEAD, OTHER), options.latency_ms / 1e3):
            try:
                agents = [agent(name, rank, key) for rank, name in enumerate(NAMESPACES)]
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.join_netns",
                    options.model,
                    "--measure",
                    str(key),
                ]
                done = subprocess.run(
                    ["ip", "netns", "exec", NAMESPACES[0], *command], stdout=subprocess.PIPE, check=True
                )
            finally:
                for process in agents:
                    process.terminate()
                    process.wait()
    joined = json.loads(done.stdout.splitlines()[-1])
    equal = joined.pop("tokens") == alone.pop("tokens")
    report = {
        "latency_ms": options.latency_ms,
        "tokens_equal": equal,
        "one_worker": alone,
        "two_that_joined": joined,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
