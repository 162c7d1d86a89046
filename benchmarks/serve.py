"""Streams over HTTP: our server beside the same load without HTTP, and beside other servers, in turn.

    python -m benchmarks.serve MODEL_FOLDER --peer vllm=/path/to/its/python

`--peer pagewire:before=/path/to/python` is an older version of ours, installed in an environment of its own.

Each server of ours is attached to a core of its own version. A closed loop of `--concurrency` streams of random
token prompts, greedy, past the end of sequence. "AsyncLLM" is the load in Python on the very core that our server
is attached to. The table gives medians over the runs; everything goes to `benchmarks/results/` as JSON, too.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.compare import RESULTS
from benchmarks.daemon import running_core
from benchmarks.limits import processor
from pagewire import AsyncLLM, RequestOutputKind, SamplingParams
from pagewire.cli.load.client import LoadQuery, LoadResult, Target, arrivals, connected, drive
from pagewire.cli.load.report import summary
from pagewire.frontend.api import async_llm

LOWEST_ID, HIGHEST_ID = 10, 31_000
WARM_UP = 32  # requests
MAX_MODEL_LEN = 4096
VLLM_OPTIONS = ["--dtype", "bfloat16", "--max-num-seqs", "256", "--enable-prefix-caching"]
VLLM_OPTIONS += ["--max-model-len", str(MAX_MODEL_LEN), "--host", "127.0.0.1"]
VLLM_OPTIONS += ["--disable-uvicorn-access-log", "--disable-log-stats"]
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
Send = Callable[[LoadQuery], Awaitable[LoadResult]]


@dataclass(frozen=True)
class Peer:
    """Another server, as `--peer` names it: `vllm`, or `pagewire:LABEL` for another version of ours.

    python: the interpreter of its environment.
    """

    name: str
    python: str

    @classmethod
    def parse(cls, text: str) -> Peer:
        """The peer that NAME=PYTHON names.

        Raises:
            argparse.ArgumentTypeError: the name is unknown, or a part is missing.
        """
        name, _, python = text.partition("=")
        engine, _, label = name.partition(":")
        if not python or not (name == "vllm" or (engine == "pagewire" and label)):
            raise argparse.ArgumentTypeError(f"give vllm=PYTHON or pagewire:LABEL=PYTHON, not {text!r}")
        return cls(name, python)

    @property
    def is_vllm(self) -> bool:
        """True for vLLM, whose idle threads look for work: it is stopped while another server is measured."""
        return self.name == "vllm"


class Server:
    """A server's process and all below it."""

    def __init__(self, command: list[str], port: int, environment: dict[str, str]) -> None:
        self.port = port
        begin = time.perf_counter()
        self.process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdout=sys.stderr,
            start_new_session=True,
            cwd=RESULTS,  # not here, where `python -m` would import the version of this folder
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
    """A port of loopback on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(command: list[str], port: int, **environment: str) -> Iterator[Server]:
    """A server that is ready when the block begins, and is ended with it."""
    server = Server(command, port, environment)
    try:
        yield server
    finally:
        server.close()


def queries(count: int, num_in: int, num_out: int, seed: int) -> list[LoadQuery]:
    """Random token prompts."""
    rng = random.Random(seed)
    ids = range(LOWEST_ID, HIGHEST_ID)
    return [LoadQuery(rng.choices(ids, k=num_in), num_out) for _ in range(count)]


async def through_engine(llm: AsyncLLM, query: LoadQuery) -> LoadResult:
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


async def measure(send: Send, work: list[LoadQuery], concurrency: int) -> dict[str, Any]:
    """One run. Raises RuntimeError: a request failed, or has not all its tokens."""
    replies, seconds = await drive(send, work, arrivals(len(work), math.inf, 1.0, 0), concurrency)
    for query, reply in zip(work, replies, strict=True):
        if reply.error or reply.output_tokens != query.max_tokens:
            raise RuntimeError(f"a request went wrong: {reply}")
    return summary(replies, seconds)


async def one_run(
    name: str, target: Any, model: str, work: list[LoadQuery], concurrency: int
) -> dict[str, Any]:
    """Attach or connect, warm up, measure."""
    if name == "AsyncLLM":
        async with AsyncLLM.attach(target) as llm:
            await measure(lambda query: through_engine(llm, query), work[:WARM_UP], concurrency)
            return await measure(lambda query: through_engine(llm, query), work[WARM_UP:], concurrency)
    fields = {"temperature": 0.0, "ignore_eos": True}
    async with connected(Target(f"http://127.0.0.1:{target.port}", model=model, extra=fields)) as client:
        await measure(client.stream, work[:WARM_UP], concurrency)
        return await measure(client.stream, work[WARM_UP:], concurrency)


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: medians over the runs, the spread of the first column, and our server's speed over each."""

    def median(name: str, figure: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(figure(run) for run in runs[name])

    rows = [["", "out/s", "ttft median", "tpot median", "itl p99", "ours over it"], ["---"] * 6]
    speeds = {name: median(name, lambda run: run["output_tokens_per_s"]) for name in runs}
    for name in runs:
        values = [run["output_tokens_per_s"] for run in runs[name]]
        spread = 50 * (max(values) - min(values)) / speeds[name]
        rows.append(
            [
                name,
                f"{speeds[name]:,.0f} ±{spread:.0f}%",
                f"{median(name, lambda run: run['ttft_ms']['median']):,.1f} ms",
                f"{median(name, lambda run: run['tpot_ms']['median']):,.2f} ms",
                f"{median(name, lambda run: run['itl_ms']['p99']):,.1f} ms",
                f"{speeds['pagewire'] / speeds[name]:.2f}",
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def start(options: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    """What the load is put on, by name: a core's address, or servers. vLLM is stopped."""
    model = str(options.model)
    address = stack.enter_context(running_core(*core_options(model)))
    server = stack.enter_context(attached(sys.executable, address, *options.serve_option))
    targets: dict[str, Any] = {"AsyncLLM": address, "pagewire": server}
    for peer in options.peer:
        if peer.is_vllm:
            port = free_port()
            serve = [peer.python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *VLLM_OPTIONS]
            server = stack.enter_context(serving([*serve, "--port", str(port)], port, **VLLM_ENVIRONMENT))
            server.signal(signal.SIGSTOP)
        else:
            address = stack.enter_context(running_core(*core_options(model), python=peer.python))
            server = stack.enter_context(attached(peer.python, address))
        targets[peer.name] = server
    return targets


def core_options(model: str) -> list[str]:
    """Options of `pagewire core` for a model folder."""
    return ["--model", model, "--max-model-len", str(MAX_MODEL_LEN)]


@contextmanager
def attached(python: str, address: str, *options: str) -> Iterator[Server]:
    """A server of ours, of an interpreter's version, that is attached to the core at an address."""
    port = free_port()
    serve = [python, "-m", "pagewire.cli.main", "serve", "--attach", address, "--port", str(port)]
    with serving([*serve, *options], port) as server:
        yield server


def main() -> None:
    """Start, measure in turn, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="Compare streams over HTTP.")
    parser.add_argument("model", type=Path, help="a model folder")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        type=Peer.parse,
        metavar="NAME=PYTHON",
        help="vllm, or pagewire:LABEL for another version of ours",
    )
    parser.add_argument("--serve-option", action="append", default=[], help="more options of pagewire serve")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--requests", type=int, default=384)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    options.model = options.model.resolve()
    with ExitStack() as stack:
        runs = measure_in_turn(options, start(options, stack))
    print(table(runs))
    if not options.no_save:
        write(options, runs)


def measure_in_turn(options: argparse.Namespace, targets: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The figures of every run by the target's name; each run begins with another target."""
    names = list(targets)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(options.runs):
        work = queries(WARM_UP + options.requests, options.input_len, options.output_len, seed=number)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if name == "vllm":
                targets[name].signal(signal.SIGCONT)
            run = async_llm.run(one_run(name, targets[name], str(options.model), work, options.concurrency))
            if name == "vllm":
                targets[name].signal(signal.SIGSTOP)
            runs[name].append(run)
            print(f"{name}: {run['output_tokens_per_s']:,.0f} out/s", file=sys.stderr, flush=True)
    return runs


def write(options: argparse.Namespace, runs: dict[str, list[dict[str, Any]]]) -> None:
    """Write the load and the figures of all runs to `benchmarks/results/` as JSON."""
    date = time.strftime("%Y-%m-%d")
    load = {name: getattr(options, name) for name in ("concurrency", "requests", "input_len", "output_len")}
    path = RESULTS / f"serve-{options.model.name}-{date}.json"
    written = {"date": date, "machine": processor(), "load": load, "runs": runs}
    path.write_text(json.dumps(written, indent=1) + "\n")
    print(f"written to {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
