"""Streams over HTTP: ours beside the same load without HTTP, and beside vLLM's server, in turn.

    python -m benchmarks.serve MODEL_FOLDER --peer vllm=/path/to/its/python

A closed loop of `--concurrency` streams of random token prompts, greedy, past the end of sequence. "AsyncLLM" is
the load in Python on the very core that our server is attached to. Servers that are not at their turn are
stopped. The table gives medians over the runs; everything goes to `benchmarks/results/` as JSON, too.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.compare import RESULTS
from benchmarks.daemon import running_core
from benchmarks.limits import processor
from pagewire import AsyncLLM, RequestOutputKind, SamplingParams
from pagewire.cli.load.client import LoadResult, Query, Target, arrivals, connected, drive
from pagewire.cli.load.report import summary
from pagewire.frontend import async_llm

LOWEST_ID, HIGHEST_ID = 10, 31_000
WARM_UP = 32  # requests
MAX_MODEL_LEN = 4096
PEERS: dict[str, tuple[list[str], dict[str, str]]] = {
    "vllm": (
        [
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            "{model}",
            "--dtype",
            "bfloat16",
            "--max-num-seqs",
            "256",
            "--enable-prefix-caching",
        ]
        + ["--max-model-len", str(MAX_MODEL_LEN), "--host", "127.0.0.1", "--port", "{port}"]
        + ["--disable-uvicorn-access-log", "--disable-log-stats"],
        {
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        },
    )
}
Send = Callable[[Query], Awaitable[LoadResult]]


class Server:
    """A server's process and all below it."""

    def __init__(self, command: list[str], port: int, environment: dict[str, str]) -> None:
        self.port = port
        begin = time.perf_counter()
        self.process = subprocess.Popen(
            command, env=os.environ | environment, stdout=sys.stderr, start_new_session=True
        )
        while not self._ready():
            if self.process.poll() is not None:
                raise RuntimeError(f"{command[0]} ended (status {self.process.returncode})")
            time.sleep(0.05)
        self.start_s = time.perf_counter() - begin

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of it."""
        os.killpg(self.process.pid, number)

    def close(self) -> None:
        """End it."""
        self.signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.process.wait()


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(command: list[str], port: int, **environment: str) -> Iterator[Server]:
    """A server, ready, for the length of the block."""
    server = Server(command, port, environment)
    try:
        yield server
    finally:
        server.close()


def queries(count: int, num_in: int, num_out: int, seed: int) -> list[Query]:
    """Random token prompts."""
    rng = random.Random(seed)
    ids = range(LOWEST_ID, HIGHEST_ID)
    return [Query(rng.choices(ids, k=num_in), num_out) for _ in range(count)]


async def through_engine(llm: AsyncLLM, query: Query) -> LoadResult:
    """One stream of text without HTTP, with the times that a client of a server would take."""
    params = SamplingParams(
        temperature=0.0, max_tokens=query.max_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    reply, begin = LoadResult(input_tokens=len(query.prompt)), time.perf_counter()
    async for output in llm.generate(query.prompt, params):
        now = time.perf_counter() - begin
        reply.output_tokens += len(output.outputs[0].token_ids)
        if output.outputs[0].text:
            if reply.ttft:
                reply.gaps.append(now - reply.last)
            else:
                reply.ttft = now
            reply.last = now
    reply.e2e = time.perf_counter() - begin
    return reply


async def measure(send: Send, work: list[Query], concurrency: int) -> dict[str, Any]:
    """One run. Raises RuntimeError: a request failed, or has not all its tokens."""
    replies, seconds = await drive(send, work, arrivals(len(work), math.inf, 1.0, 0), concurrency)
    for query, reply in zip(work, replies, strict=True):
        if reply.error or reply.output_tokens != query.max_tokens:
            raise RuntimeError(f"a request went wrong: {reply}")
    return summary(replies, seconds)


async def one_run(name: str, target: Any, model: str, work: list[Query], concurrency: int) -> dict[str, Any]:
    """Attach or connect, warm up, measure."""
    if name == "AsyncLLM":
        async with AsyncLLM.attach(target) as llm:
            await measure(lambda query: through_engine(llm, query), work[:WARM_UP], concurrency)
            return await measure(lambda query: through_engine(llm, query), work[WARM_UP:], concurrency)
    fields = {"temperature": 0.0, "ignore_eos": True}
    async with connected(Target(f"http://127.0.0.1:{target.port}", model=model, extra=fields)) as client:
        await measure(client.stream, work[:WARM_UP], concurrency)
        return await measure(client.stream, work[WARM_UP:], concurrency)


def cpu_seconds(root: int) -> float:
    """Of a process and all below it, until now."""
    processes = [psutil.Process(root)]
    processes += processes[0].children(recursive=True)
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: medians over the runs, the spread of the first column, and ours over each."""

    def middle(name: str, of: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(of(one) for one in found[name])

    rows = [["", "out/s", "ttft median", "tpot median", "itl p99", "ours over it"], ["---"] * 6]
    speeds = {name: middle(name, lambda one: one["output_tokens_per_s"]) for name in found}
    for name, runs in found.items():
        values = [one["output_tokens_per_s"] for one in runs]
        spread = 50 * (max(values) - min(values)) / speeds[name]
        rows.append(
            [
                name,
                f"{speeds[name]:,.0f} ±{spread:.0f}%",
                f"{middle(name, lambda one: one['ttft_ms']['median']):,.1f} ms",
                f"{middle(name, lambda one: one['tpot_ms']['median']):,.2f} ms",
                f"{middle(name, lambda one: one['itl_ms']['p99']):,.1f} ms",
                f"{speeds['pagewire'] / speeds[name]:.2f}",
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def start(options: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    """What the load is put on, by name: a core's address, or servers."""
    model = str(options.model)
    address = stack.enter_context(running_core("--model", model, "--max-model-len", str(MAX_MODEL_LEN)))
    port = free_port()
    ours = [sys.executable, "-m", "pagewire.cli.main", "serve", "--attach", address, "--port", str(port)]
    targets: dict[str, Any] = {
        "AsyncLLM": address,
        "pagewire": stack.enter_context(serving([*ours, *options.serve_option], port)),
    }
    for peer in options.peer:
        name, _, python = peer.partition("=")
        arguments, environment = PEERS[name]
        port = free_port()
        command = [python, *(word.format(model=model, port=port) for word in arguments)]
        targets[name] = stack.enter_context(serving(command, port, **environment))
        targets[name].signal(signal.SIGSTOP)
    return targets


def main() -> None:
    """Start, measure in turn, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="Compare streams over HTTP.")
    parser.add_argument("model", type=Path, help="a model folder")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="vllm")
    parser.add_argument("--serve-option", action="append", default=[], help="more options of pagewire serve")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--requests", type=int, default=384)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        targets = start(options, stack)
        names = list(targets)
        for run in range(options.runs):
            work = queries(WARM_UP + options.requests, options.input_len, options.output_len, seed=run)
            for name in names[run % len(names) :] + names[: run % len(names)]:
                if name in PEERS:
                    targets[name].signal(signal.SIGCONT)
                one = async_llm.run(
                    one_run(name, targets[name], str(options.model), work, options.concurrency)
                )
                if name in PEERS:
                    targets[name].signal(signal.SIGSTOP)
                found.setdefault(name, []).append(one)
                print(f"{name}: {one['output_tokens_per_s']:,.0f} out/s", file=sys.stderr, flush=True)
    found = {name: found[name] for name in names}
    print(table(found))
    if not options.no_save:
        write(options, found)


def write(options: argparse.Namespace, found: dict[str, list[dict[str, Any]]]) -> None:
    """The JSON."""
    date = time.strftime("%Y-%m-%d")
    load = {name: getattr(options, name) for name in ("concurrency", "requests", "input_len", "output_len")}
    path = RESULTS / f"serve-{options.model.name}-{date}.json"
    written = {"date": date, "machine": processor(), "load": load, "runs": found}
    path.write_text(json.dumps(written, indent=1) + "\n")
    print(f"written to {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
