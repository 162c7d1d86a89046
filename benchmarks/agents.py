"""Agents in a closed loop: each turn has the whole conversation so far and a little more, as agents send it.

    python -m benchmarks.agents --model MODEL [--server ours=http://127.0.0.1:8000/v1] [--server NAME=URL ...]
    python -m benchmarks.agents --model MODEL --pressure [--swap-space 4]
    python -m benchmarks.agents --tokenization MODEL

Without --server, `pagewire serve MODEL` is started, with further arguments of its own. An agent sends its
conversation, reads the streamed answer, thinks (--think), and its tools take some time (--tools); then the
conversation has the answer and a result, so that the last of --turns has --tokens tokens. Servers are measured one
after the other. The table has the time to the first token by the part of the conversation, over all agents.
--pressure starts one server after the other: with all the KV blocks that the conversations need, with half of them,
and with half of them beside swap space, a folder on disk, and both; while an agent waits for its tools, others take
its blocks. The answers are compared; status 1: one differs (on a GPU, give --batch-invariant as well).
--tokenization needs no server: it times how a turn of 100,000 tokens of history and 200 new ones is rendered and
tokenized, whole and from the last turn's end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from pagewire.cli.load.client import decode_chunk

CHARS_PER_TOKEN = 4.0  # until a server has said how many tokens a prompt has
WORDS = Path(__file__).read_text("utf-8").split()
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\\n{% endif %}"
)


@dataclass
class Turn:
    """One request of an agent. ttft, seconds: to the first token, and to the end. cached: as the server says.

    text: of the answer.
    """

    agent: int
    number: int
    ttft: float
    seconds: float
    prompt_tokens: int = 0
    cached: int = 0
    text: str = ""


@dataclass
class Load:
    """What each agent does."""

    model: str
    num_agents: int
    num_turns: int
    num_tokens: int
    max_tokens: int
    think: float
    tools: float
    seed: int
    system: str
    turns: list[Turn] = field(default_factory=list)


def text_of(num_tokens: float, chars_per_token: float, seed: str) -> str:
    """Words that are about this many tokens; others for each seed."""
    draw, parts, size = random.Random(seed), list[str](), 0.0
    while size < num_tokens * chars_per_token:
        parts.append(draw.choice(WORDS))
        size += len(parts[-1]) + 1
    return " ".join(parts)


async def one_turn(
    session: aiohttp.ClientSession, url: str, load: Load, messages: list[Any]
) -> tuple[Turn, str]:
    """Send a conversation, and return its measurements with the text of the answer."""
    body = {
        "model": load.model,
        "messages": messages,
        "max_tokens": load.max_tokens,
        "temperature": 0.7,
        "seed": len(messages),
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begin, first, text = time.perf_counter(), 0.0, ""
    turn = Turn(0, 0, 0.0, 0.0)
    async with session.post(f"{url}/chat/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = decode_chunk(line[6:])
            for choice in chunk.choices:
                if not choice.empty:
                    first = first or time.perf_counter()
                    text += (choice.delta and choice.delta.content) or ""
            if chunk.usage is not None:
                turn.prompt_tokens = chunk.usage.prompt_tokens
                details = json.loads(line[6:])["usage"].get("prompt_tokens_details") or {}
                turn.cached = details.get("cached_tokens") or 0
    turn.ttft, turn.seconds = (first or time.perf_counter()) - begin, time.perf_counter() - begin
    return turn, text


async def agent(session: aiohttp.ClientSession, url: str, load: Load, number: int) -> None:
    """One conversation from its first turn to its last."""
    ratio, step = CHARS_PER_TOKEN, load.num_tokens / load.num_turns
    messages: list[Any] = [
        {"role": "system", "content": load.system},
        {"role": "user", "content": text_of(step / 2, ratio, f"{load.seed}-{number}")},
    ]
    await asyncio.sleep((load.think + load.tools) * number / load.num_agents)
    for index in range(load.num_turns):
        turn, text = await one_turn(session, url, load, messages)
        turn.agent, turn.number, turn.text = number, index, text
        load.turns.append(turn)
        if turn.prompt_tokens:
            ratio = sum(len(message["content"]) for message in messages) / turn.prompt_tokens
        await asyncio.sleep(load.think + load.tools)
        room = step * (index + 2) - turn.prompt_tokens - load.max_tokens
        result = text_of(max(8.0, room), ratio, f"{load.seed}-{number}-{index}")
        messages += [{"role": "assistant", "content": text or "."}, {"role": "user", "content": result}]


async def measure(url: str, load: Load) -> float:
    """Run all agents at once; returns the seconds that they took."""
    begin, timeout = time.perf_counter(), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(agent(session, url, load, number) for number in range(load.num_agents)))
    return time.perf_counter() - begin


def percentile(values: list[float], share: float) -> float:
    """The value that a share of all does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def table(name: str, load: Load, seconds: float) -> str:
    """The times to the first token in each third of the conversations, in ms."""
    lines = [
        f"{name}: {load.num_agents} agents, {len(load.turns)} turns in {seconds:.1f} s",
        "| prompt tokens | turns | cached | TTFT p50 | p90 | p99 | max |",
        "|---|---|---|---|---|---|---|",
    ]
    for third in range(3):
        own = [turn for turn in load.turns if turn.number * 3 // load.num_turns == third]
        if not own:
            continue
        times = [1e3 * turn.ttft for turn in own]
        sizes = [turn.prompt_tokens for turn in own]
        cached = sum(turn.cached for turn in own) / max(1, sum(sizes))
        shown = [f"{percentile(times, share):.0f} ms" for share in (0.5, 0.9, 0.99, 1.0)]
        lines.append(f"| {min(sizes)}-{max(sizes)} | {len(own)} | {cached:.0%} | {' | '.join(shown)} |")
    return "\n".join(lines)


@contextmanager
def own_server(model: str, options: list[str]) -> Iterator[str]:
    """`pagewire serve` on a free port; the URL of its API."""
    import signal
    import subprocess

    command = [sys.executable, "-m", "pagewire.cli.main", "serve", model, "--port", "0", *options]
    server = subprocess.Popen([*command, "--disable-log-requests"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        _, _, url = server.stdout.readline().strip().partition(" ")
        yield f"{url}/v1"
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


# ---------------------------------------------------------------- pressure

COUNTED = ("vllm:num_preemptions_total", "pagewire:swap_blocks_total", "pagewire:kv_tier_blocks_total")


def pressures(load: Load, swap_space: float, folder: Path) -> dict[str, list[str]]:
    """Options of servers with enough KV blocks for all conversations, and with half of what they need.

    swap_space: in GiB. folder: on disk.
    """
    needed = load.num_tokens + load.max_tokens
    longest = needed + needed // 4  # the texts have about as many tokens as they are to have
    whole, half = (
        ["--max-model-len", str(longest), "--num-gpu-blocks-override", str(blocks)]
        for blocks in (load.num_agents * -(-longest // 16), load.num_agents * -(-needed // 16) // 2)
    )
    swap, disk = ["--swap-space", str(swap_space)], ["--kv-cache-dir"]
    return {
        "all blocks": whole,
        "half of them": half,
        "half, swap space": [*half, *swap],
        "half, disk": [*half, *disk, str(folder / "disk")],
        "half, swap space and disk": [*half, *swap, *disk, str(folder / "both")],
    }


async def counted(url: str) -> str:
    """What a server has counted of preemptions and of blocks that went out and came back."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{url.removesuffix('/v1')}/metrics") as response,
    ):
        text = await response.text()
    parts = []
    for line in text.splitlines():
        name, event = line.partition("{")[0], line.partition('event="')[2].partition('"')[0]
        if name in COUNTED:
            parts.append(
                f"{name.partition(':')[2].removesuffix('_total')} {event} {float(line.split()[-1]):.0f}"
            )
    return "; ".join(parts)


def under_pressure(given: argparse.Namespace, options: list[str]) -> dict[str, Load]:
    """The turns of the same agents on servers with more and less KV memory, and tiers, by setting."""
    found: dict[str, Load] = {}
    with tempfile.TemporaryDirectory(prefix="pagewire-agents-") as folder:
        for name, own in pressures(load_of(given), given.swap_space, Path(folder)).items():
            found[name] = load = load_of(given)
            with own_server(given.model, [*own, *options]) as url:
                seconds = asyncio.run(measure(url, load))
                print(table(name, load, seconds), asyncio.run(counted(url)), sep="\n", flush=True)
    return found


def answers(load: Load) -> dict[tuple[int, int], str]:
    """The texts of all turns, by agent and number."""
    return {(turn.agent, turn.number): turn.text for turn in load.turns}


# ---------------------------------------------------------------- tokenization


def tokenization(model: str) -> None:
    """Print how long a turn takes until its tokens are there."""
    from pagewire.frontend.text.chat_template import render_chat
    from pagewire.frontend.text.tokenizer import load_tokenizer
    from pagewire.ipc.files.hub import model_folder

    tokenizer = load_tokenizer(model_folder(model, tokenizer_only=True))
    messages = [{"role": "system", "content": text_of(500, 3, "system")}]

    def render() -> str:
        return render_chat(tokenizer, messages, chat_template=None if tokenizer.chat_template else CHATML)

    def timed(work: Callable[[], Any]) -> tuple[float, Any]:
        begin = time.perf_counter()
        result = work()
        return 1e3 * (time.perf_counter() - begin), result

    ids: list[int] = []
    while len(ids) < 100_000:
        for _ in range(40):
            roles = ("user", "assistant")
            messages += [
                {"role": role, "content": text_of(150, 3, f"{len(messages)}{role}")} for role in roles
            ]
        ids = tokenizer.encode_turn(render(), False)
    rows: list[tuple[float, float, float, int]] = []
    for number in range(9):
        messages += [
            {"role": "user", "content": text_of(90, 3, f"u{number}")},
            {"role": "assistant", "content": text_of(90, 3, f"a{number}")},
        ]
        rendering, text = timed(render)
        turn, ids = timed(lambda text=text: tokenizer.encode_turn(text, False))
        whole, expected = timed(lambda text=text: tokenizer.encode(text, False))
        assert ids == expected
        rows.append((rendering, whole, turn, len(ids)))
    medians = [statistics.median(column) for column in list(zip(*rows, strict=True))[:3]]
    new = (rows[-1][3] - rows[0][3]) / (len(rows) - 1)
    print(
        f"{model}: {rows[-1][3]} tokens, {new:.0f} new ones in a turn, {len(messages)} messages; medians of 9:"
    )
    print(
        "template {:.1f} ms, tokens of the whole text {:.1f} ms, from the last turn's end {:.1f} ms".format(
            *medians
        )
    )


def load_of(given: argparse.Namespace) -> Load:
    """What each agent does, by the arguments."""
    system = text_of(given.tokens / given.turns / 2, CHARS_PER_TOKEN, f"system{given.seed}")
    return Load(
        given.model,
        given.agents,
        given.turns,
        given.tokens,
        given.max_tokens,
        given.think,
        given.tools,
        given.seed,
        system,
    )


def main() -> int:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--server", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--agents", type=int, default=16)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--think", type=float, default=1.0, metavar="SECONDS")
    parser.add_argument("--tools", type=float, default=1.0, metavar="SECONDS")
    parser.add_argument(
        "--seed", type=int, default=0, help="with another one, nothing is cached of an earlier run"
    )
    parser.add_argument("--out", type=Path, help="JSON with every turn")
    parser.add_argument(
        "--pressure", action="store_true", help="with half the KV blocks, with and without tiers"
    )
    parser.add_argument("--swap-space", type=float, default=4.0, metavar="GIB", help="with --pressure")
    parser.add_argument("--tokenization", metavar="MODEL")
    given, options = parser.parse_known_args()
    if given.tokenization:
        tokenization(given.tokenization)
        return 0
    found: dict[str, Load] = {}

    def run(name: str, url: str) -> None:
        load = found[name] = load_of(given)
        seconds = asyncio.run(measure(url.rstrip("/"), load))
        print(table(name, load, seconds), flush=True)

    for server in given.server:
        name, _, url = server.partition("=")
        run(name, url)
    if given.pressure:
        found |= under_pressure(given, options)
    elif not given.server:
        with own_server(given.model, options) as url:
            run("pagewire", url)
    if given.out:
        turns = {name: [asdict(turn) for turn in load.turns] for name, load in found.items()}
        given.out.write_bytes(msgspec.json.encode(turns))
    texts = [answers(load) for load in found.values()]
    return int(given.pressure and any(text != texts[0] for text in texts))


if __name__ == "__main__":
    sys.exit(main())
