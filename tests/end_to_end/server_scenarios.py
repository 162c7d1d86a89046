"""Loads of mixed requests on servers, with clients that leave and a server that is killed; what is left behind."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import aiohttp
import psutil

from pagewire import AsyncLLM
from tests.end_to_end.mixed_requests import (
    Answer,
    Crowd,
    MixedRequest,
    draw_request,
    run_crowd,
    same,
    undisturbed,
)
from tests.end_to_end.server_process import INSPECTION, ServerProcess

GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


@dataclass
class Round:
    """What one load came to. Afterwards:

    tasks: on the server's loop. rss_mib: of the server. status: of the core. gauges: of the server's /metrics.
    """

    counts: Counter[str]
    wrong: list[str]
    tasks: int
    rss_mib: float
    status: dict[str, Any]
    gauges: dict[str, float]

    @property
    def leaks(self) -> str:
        """What is still held; "" if nothing."""
        state = self.status
        held = {name: value for name, value in self.gauges.items() if value}
        if state["num_free_blocks"] == state["num_blocks"] and not state["waiting"] and not held:
            return ""
        return f"{state['num_blocks'] - state['num_free_blocks']} blocks, {state['waiting']} waiting, {held}"


async def core_status(llm: AsyncLLM) -> dict[str, Any]:
    """What the core says of itself."""
    return await asyncio.wrap_future(llm.session.call("status"))  # type: ignore[no-any-return]


async def idle_status(llm: AsyncLLM) -> dict[str, Any]:
    """What the core says of itself once nothing runs any more."""
    while (state := await core_status(llm))["running"] or state["in_flight"]:
        await asyncio.sleep(0.001)
    return state


async def requests_and_answers(
    llm: AsyncLLM, count: int, seed: int, concurrency: int = 64
) -> tuple[list[MixedRequest], list[Answer]]:
    """So many requests, and what they should be answered."""
    rng, places = random.Random(seed), asyncio.Semaphore(concurrency)
    requests = [draw_request(rng) for _ in range(count)]

    async def one(request: MixedRequest) -> Answer:
        async with places:
            return await undisturbed(llm, request)

    return requests, list(await asyncio.gather(*map(one, requests)))


async def mixed_load(
    address: str, server: ServerProcess, count: int, concurrency: int, num_rounds: int, seed: int = 0
) -> list[Round]:
    """The same requests in several rounds; a fifth of the clients leave midway. (A first round, of a few
    requests, brings the server to its usual size, and is reported as well.)
    """
    process, rounds = psutil.Process(server.process.pid), []
    async with AsyncLLM.attach(address) as llm:
        requests, expected = await requests_and_answers(llm, count, seed)
        for number in range(num_rounds + 1):
            share = min(count, concurrency) if number == 0 else count
            async with aiohttp.ClientSession(server.url, connector=aiohttp.TCPConnector(limit=0)) as http:
                counts, wrong = await run_crowd(Crowd(http), requests[:share], expected[:share], concurrency)
            state = await idle_status(llm)
            async with aiohttp.ClientSession(server.url) as http:
                tasks, gauges = await idle_tasks(http), await idle_gauges(http)
            rounds.append(Round(counts, wrong, tasks, process.memory_info().rss / 2**20, state, gauges))
    return rounds


async def idle_tasks(http: aiohttp.ClientSession) -> int:
    """The number of tasks on the server's loop once it has no request open."""
    while True:
        async with http.get("/load") as response:
            if not (await response.json())["server_load"]:
                break
    async with http.get(INSPECTION) as response:
        return int((await response.json())["tasks"])


async def idle_gauges(http: aiohttp.ClientSession) -> dict[str, float]:
    """What /metrics says of requests and blocks."""
    async with http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    samples = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if "{" in line}
    return {name: samples[name] for name in GAUGES}


@dataclass
class Killing:
    """What came of killing one of two servers. unharmed: right answers of the other. cut: of the killed one's."""

    unharmed: int
    wrong: list[str]
    cut: int
    status: dict[str, Any]
    afterwards: bool


async def kill_one_server(
    address: str, killed: ServerProcess, other: ServerProcess, count: int, seed: int = 1
) -> Killing:
    """`count` requests on each of two servers; one is killed in the midst of them. Then one more on the other."""
    async with AsyncLLM.attach(address) as llm:
        requests, expected = await requests_and_answers(llm, count, seed)
        stays = [MixedRequest(r.path, r.body, r.prompts, r.fields, r.num_logprobs, None) for r in requests]
        async with aiohttp.ClientSession(killed.url) as doomed_http, aiohttp.ClientSession(other.url) as http:
            doomed, unharmed = Crowd(doomed_http), Crowd(http)

            async def doomed_one(request: MixedRequest) -> bool:
                try:
                    return (await doomed.ask(request))[1]
                except (aiohttp.ClientError, OSError):
                    return False

            lost = [asyncio.ensure_future(doomed_one(request)) for request in stays]
            running = asyncio.ensure_future(run_crowd(unharmed, stays, expected, count))
            await asyncio.gather(doomed.after(count), unharmed.after(count))
            killed.process.kill()
            cut = (await asyncio.gather(*lost)).count(False)
            counts, wrong = await running
            while any(c["pid"] == killed.process.pid for c in (await core_status(llm))["clients"]):
                await asyncio.sleep(0.001)
            state = await idle_status(llm)
            answer, whole = await unharmed.ask(stays[0])
        return Killing(counts["whole"], wrong, cut, state, same(answer, expected[0], whole))
