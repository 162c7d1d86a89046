"""A router over several cores: prefix hits and time to first token, cores that are killed, the router's cost.

    python -m benchmarks.route hits       # chats of 64 users on three cores: by prefix, and each core in turn
    python -m benchmarks.route kill       # the same chats, while a core is killed every 10 s for a minute
    python -m benchmarks.route overhead   # a router on one core, beside a server on one core
    python -m benchmarks.route forward    # how much a router forwards: cores whose workers compute nothing

On the demo model in float32, or with --model. All processes share this machine. Exits 1 if a stream is lost or
changed.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.closed_loop import run_requests

ROOT = Path(__file__).parents[1]
FAKE_CORE = """
import sys, threading
from pathlib import Path
from tests.engine_core.conftest import RunningCore
from pagewire.ipc.options.engine_args import EngineArgs
folder = Path(sys.argv[2])
args = EngineArgs(model=str(folder), max_model_len=4096, max_num_seqs=256, skip_tokenizer_init=True)
core = RunningCore(sys.argv[1], args, ["--num-blocks", "8192"], 60.0, folder, None, 1 << 27)
print("ready", flush=True)
sys.stdin.read()
core.stop()
"""
TURNS = 6  # of a chat: more do not fit into the demo model's context
WORDS = [
    "the",
    "list",
    "of",
    "a",
    "module",
    "is",
    "read",
    "before",
    "each",
    "statement",
    "which",
    "returns",
    "its",
    "value",
    "as",
    "in",
    "the",
    "table",
    "below",
]


@dataclass
class Chat:
    """What one user got: the text of each turn, seconds to the first token of each, and errors."""

    texts: list[str] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    num_tokens: int = 0
    errors: list[str] = field(default_factory=list)


class Core:
    """`pagewire core` as a process, which can be killed and started again at its address."""

    def __init__(self, address: str, *options: str) -> None:
        self.address, self._options = address, options
        self.start()
        self.wait()

    def start(self) -> None:
        """Start it."""
        command = [sys.executable, "-m", "pagewire.cli.main", "core", "--listen", self.address]
        environment_options = ["--disable-log-stats", *self._options]
        self.process = subprocess.Popen([*command, *environment_options], stdout=subprocess.PIPE, text=True)

    def wait(self) -> None:
        """Wait until it is ready."""
        assert self.process.stdout is not None
        if not self.process.stdout.readline().startswith("ready"):
            raise RuntimeError("the core did not start; its log above tells why")

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait()


@contextmanager
def cores(count: int, options: Sequence[str]) -> Iterator[list[Core]]:
    """Some cores, for the length of the block."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        started = []
        for number in range(count):
            started.append(Core(f"ipc://{folder}/core{number}.sock", *options))
            stack.callback(started[-1].stop)
        yield started


@contextmanager
def server(command: str, *options: str) -> Iterator[tuple[str, psutil.Process]]:
    """The URL and the process of `pagewire serve` or `pagewire route`, for the length of the block."""
    arguments = [sys.executable, "-m", "pagewire.cli.main", command, "--port", "0", "--disable-log-requests"]
    process = subprocess.Popen([*arguments, *options], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        ready, _, url = process.stdout.readline().strip().partition(" ")
        if ready != "ready":
            raise RuntimeError("the server did not start; its log above tells why")
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def routed(started: Sequence[Core], *options: str) -> list[str]:
    """The options of a router on these cores."""
    return [*(option for core in started for option in ("--core", core.address)), *options]


# ---------------------------------------------------------------- chats


async def chat(
    http: aiohttp.ClientSession, url: str, user: int, turns: int, length: int, stop_at: float
) -> Chat:
    """The chats of one user: each turn repeats all before it, each chat has six. Until `turns`, or a moment."""
    rng = random.Random(user)
    group = f"Group {user % 4}. " + " ".join(random.Random(user % 4).choices(WORDS, k=200))
    result = Chat()
    for turn in range(turns):
        if time.monotonic() >= stop_at:
            break
        if turn % TURNS == 0:
            messages = [{"role": "system", "content": group}]
        await asyncio.sleep(rng.uniform(0.0, 0.3))
        messages.append({"role": "user", "content": " ".join(rng.choices(WORDS, k=12))})
        text = await answer(http, url, messages, user * 1000 + turn, length, result)
        if text is None:
            break
        messages.append({"role": "assistant", "content": text})
        result.texts.append(text)
    return result


async def answer(
    http: aiohttp.ClientSession,
    url: str,
    messages: list[dict[str, str]],
    seed: int,
    length: int,
    result: Chat,
) -> str | None:
    """One streamed answer; None after an error."""
    body = {
        "messages": messages,
        "seed": seed,
        "temperature": 0.8,
        "max_tokens": length,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    started, text, first, ended = time.monotonic(), "", None, False
    try:
        async with http.post(f"{url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {await response.text()}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(str(event["error"]))
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                    ended |= choice["finish_reason"] == "length"
                if event.get("usage"):
                    result.num_tokens += event["usage"]["completion_tokens"]
                if first is None and text:
                    first = time.monotonic() - started
    except (RuntimeError, aiohttp.ClientError) as error:
        result.errors.append(str(error)[:200])
        return None
    if not ended:
        result.errors.append("the stream ended early")
        return None
    result.first.append(first or 0.0)
    return text


async def all_chats(
    url: str, users: int, turns: int, length: int, seconds: float = 1e9
) -> tuple[list[Chat], float]:
    """The chats of all users at once, and how long they took."""
    connector, limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=600)
    began = time.monotonic()
    async with aiohttp.ClientSession(connector=connector, timeout=limit) as http:
        chats = await asyncio.gather(
            *(chat(http, url, user, turns, length, began + seconds) for user in range(users))
        )
    return list(chats), time.monotonic() - began


async def counters(url: str, *names: str) -> list[float]:
    """The values of counters, over all cores."""
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return [sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{")) for name in names]


def percentile(values: list[float], share: float) -> float:
    """The value at a share of the way through the sorted values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


# ---------------------------------------------------------------- what is measured


def hits(options: argparse.Namespace) -> bool:
    """Prefix hits and times to the first token, by prefix and in turn."""
    table: dict[str, tuple[float, float, float, float]] = {}
    texts: list[list[list[str]]] = []
    for policy in ("prefix", "round-robin"):
        with (
            cores(3, core_options(options)) as started,
            server("route", *routed(started, "--policy", policy)) as (url, _),
        ):
            chats, seconds = asyncio.run(all_chats(url, options.users, options.turns, options.length))
            queries, found = asyncio.run(
                counters(url, "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
            )
        if errors := [error for each in chats for error in each.errors]:
            print(f"{policy}: {len(errors)} errors, such as {errors[0]}")
            return False
        first = [value for each in chats for value in each.first]
        table[policy] = (found / queries, statistics.median(first), percentile(first, 0.9), seconds)
        texts.append([each.texts for each in chats])
    print(f"{options.users} users, {options.turns} turns of {options.length} tokens, three cores")
    for policy, (rate, median, high, seconds) in table.items():
        print(
            f"{policy:12} prefix hits {rate:6.1%}   first token {median * 1000:6.0f} ms (median) "
            f"{high * 1000:6.0f} ms (90%)   {seconds:.1f} s in all"
        )
    same = texts[0] == texts[1]
    print("the same texts" if same else "THE TEXTS DIFFER")
    return same


def kill(options: argparse.Namespace) -> bool:
    """Chats while cores are killed, beside the same chats undisturbed."""

    async def disturbed(url: str, started: list[Core]) -> tuple[list[Chat], int]:
        chats = asyncio.create_task(all_chats(url, options.users, 10_000, options.length, options.seconds))
        deaths = 0
        while not (await asyncio.wait((chats,), timeout=options.interval))[0]:
            if deaths >= options.seconds / options.interval:
                continue
            victim = started[deaths % len(started)]
            victim.process.kill()
            victim.process.wait()
            victim.start()
            await asyncio.to_thread(victim.wait)
            deaths += 1
        return chats.result()[0], deaths

    with cores(3, core_options(options)) as started, server("route", *routed(started)) as (url, _):
        chats, deaths = asyncio.run(disturbed(url, started))
        (moved,) = asyncio.run(counters(url, "pagewire:route_moved_total"))
    errors = [error for each in chats for error in each.errors]
    num_turns = max(len(each.texts) for each in chats)
    with cores(3, core_options(options)) as started, server("route", *routed(started)) as (url, _):
        calm, _ = asyncio.run(all_chats(url, options.users, num_turns, options.length))
    changed = sum(
        text != other
        for a, b in zip(chats, calm, strict=True)
        for text, other in zip(a.texts, b.texts, strict=False)
    )
    streams = sum(len(each.texts) for each in chats)
    digest = hashlib.sha256("".join(text for each in chats for text in each.texts).encode()).hexdigest()[:12]
    print(
        f"{streams} streams of {options.length} tokens, {deaths} deaths, {moved:.0f} moved: "
        f"{len(errors)} lost, {changed} changed ({digest})"
    )
    for error in errors[:3]:
        print(f"  {error}")
    return not errors and not changed and deaths > 0


def overhead(options: argparse.Namespace) -> bool:
    """Tokens per second of a router on one core, and of a server on it, in turn; and the processor time of each."""
    rates: dict[str, list[float]] = {"serve": [], "route": []}
    costs: dict[str, list[float]] = {"serve": [], "route": []}
    with cores(1, core_options(options)) as started, ExitStack() as stack:
        (core,) = started
        servers = {
            "serve": stack.enter_context(server("serve", "--attach", core.address)),
            "route": stack.enter_context(server("route", *routed(started))),
        }
        for number in range(options.rounds + 1):
            for command, (url, process) in list(servers.items())[:: 1 if number % 2 else -1]:
                before = sum(process.cpu_times()[:2])
                chats, seconds = asyncio.run(all_chats(url, options.users, options.turns, options.length))
                num_tokens = sum(each.num_tokens for each in chats)
                if number:  # the first round warms up
                    rates[command].append(num_tokens / seconds)
                    costs[command].append((sum(process.cpu_times()[:2]) - before) / num_tokens * 1e6)
    ratios = [route / serve for serve, route in zip(rates["serve"], rates["route"], strict=True)]
    for command, values in rates.items():
        print(
            f"{command}: {statistics.median(values):.0f} tokens/s ({min(values):.0f} to {max(values):.0f}), "
            f"{statistics.median(costs[command]):.0f} us of its processor time per token"
        )
    print(f"route / serve: {statistics.median(ratios):.3f} (median of {len(ratios)} pairs)")
    return True


def forward(options: argparse.Namespace) -> bool:
    """Tokens and requests per second that pass through a session on fake cores, without HTTP."""
    from pagewire.frontend.core import open_session
    from pagewire.frontend.core.session import Session
    from pagewire.frontend.route.engine import open_router as routed_engine
    from pagewire.frontend.route.places import running_place

    def run(session: Session, length: int) -> tuple[float, float, float]:
        total, sizes = options.requests, {"prompt_tokens": 200, "output_tokens": length}
        began, used = time.perf_counter(), time.process_time()
        num_tokens = run_requests(session, total, num_open=options.open, **sizes)
        seconds = time.perf_counter() - began
        return num_tokens / seconds, total / seconds, (time.process_time() - used) / num_tokens * 1e6

    for count in options.cores:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            addresses = [f"ipc://{folder}/core{number}.sock" for number in range(count)]
            for address in addresses:
                command = [sys.executable, "-c", FAKE_CORE, address, folder]
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
                )
                stack.callback(process.communicate)
                assert process.stdout is not None
                process.stdout.readline()
            plain: dict[str, Any] = {"curve": None, "tokenizer": None, "timeout": 10.0}
            sessions = {"session": open_session.attach(addresses[0], **plain)} if count == 1 else {}
            router = routed_engine([running_place(address) for address in addresses])
            sessions["router"] = router.session
            for name, session in sessions.items():
                for length in (1, 100):
                    run(session, length)
                    tokens, requests, cost = run(session, length)
                    print(
                        f"{name:8} {count} core(s), outputs of {length:3} tokens: {tokens:8.0f} tokens/s, "
                        f"{requests:6.0f} requests/s, {cost:6.1f} us of its processor time per token"
                    )
                session.close()
    return True


def core_options(options: argparse.Namespace) -> list[str]:
    """The options of each core."""
    return [
        *("--model", options.model, "--dtype", options.dtype, "--num-threads", "1"),
        *("--num-gpu-blocks-override", str(options.blocks)),
    ]


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("hits", "kill", "overhead", "forward"))
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--blocks", type=int, default=2048, help="KV blocks of each core")
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--length", type=int, default=40, help="tokens of each answer")
    parser.add_argument("--seconds", type=float, default=60.0, help="for which cores are killed")
    parser.add_argument("--interval", type=float, default=10.0, help="between two deaths")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of runs")
    parser.add_argument("--requests", type=int, default=4000, help="that are forwarded")
    parser.add_argument("--open", type=int, default=256, help="requests that are open at once")
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 3], help="fake cores to forward to")
    options = parser.parse_args()
    run = {"hits": hits, "kill": kill, "overhead": overhead, "forward": forward}[options.what]
    return 0 if run(options) else 1


if __name__ == "__main__":
    sys.exit(main())
