"""A server under attack beside a well-behaved client: exits 1 if that notices, or anything dies, grows or hangs.

    python -m benchmarks.siege --minutes 1                   # all attackers; the core's socket too
    python -m benchmarks.siege --minutes 30 --target own     # a server with a core of its own, over HTTP alone
    python -m benchmarks.siege --minutes 1 --target curve    # a core over TCP, where some attackers may only read
    python -m benchmarks.siege --attackers grammars,templates --seed 7
    python -m benchmarks.siege --replay report.json          # the attacks before the failure that a report names

Everything is on loopback and in a temporary folder, and ends with the siege.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import aiohttp

from pagewire.ipc.host.lifeline import Child

from .attack import Target
from .attackers import chosen
from .client import WAIT_SECONDS, Client
from .fortress import EMBEDDER, EVIL_KEY, MODEL, PICTURES, Fortress, besieged
from .report import AttackLog, Report, described
from .watcher import Lag, Watcher

LONG_MINUTES = 5.0  # from this length on a siege kills workers by default
SETTLE_SECONDS = 60.0  # for the engine to be idle after the last attack
END_SECONDS = 20.0  # for attackers to end by themselves
FAILED_CHECK_SECONDS = 0.5
IDLE = ("vllm:num_requests_running", "vllm:num_requests_waiting")
USAGE = "vllm:kv_cache_usage_perc"
NUM_BLOCKS = re.compile(r'^vllm:cache_config_info.*num_gpu_blocks="(\d+)"', re.MULTILINE)
PROMISED = re.compile(r'^pagewire:retained_blocks.*kind="kept".* (\S+)$', re.MULTILINE)


class Siege:
    """One siege of a server that runs."""

    def __init__(self, fortress: Fortress, options: argparse.Namespace) -> None:
        self._fortress, self._options = fortress, options
        self._seconds = 60.0 * options.minutes
        self._client = Client(fortress.url, options.max_wait, bool(options.pictures))
        self._log, self._lag = AttackLog(), Lag()

    async def run(self) -> Report:
        """Learn, attack, settle; the report. What fails of the siege itself is in it, by name."""
        before: list[str] = []
        try:
            await self._client.learn()
            await self._warm_up()
        except Exception as error:
            before.append(f"before the attacks: {described(error)}")
        watcher = Watcher(self._fortress)
        given = {name: value for name, value in vars(self._options).items() if name != "json"}
        report = Report(given, self._log, self._client, watcher, self._lag, others=before)
        if not before:
            await self._attack(watcher, report)
        alive = not (watcher.deaths or watcher.overflow)
        if alive and not report.others:
            report.others += await self._settle()
            report.after = watcher.sample()
        report.others += await asyncio.to_thread(self._fortress.stop)
        if report.failures:
            self._log.note_failure()
            report.others += (
                [f"log of the {line}" for line in self._fortress.log_tail(5)] if not alive else []
            )
        return report

    async def _attack(self, watcher: Watcher, report: Report) -> None:
        """All at once until the time is over, or server or core are."""
        attackers = self._start_attackers()
        parts = {
            "watcher": watcher.watch(),
            "reader of the attackers' log": asyncio.to_thread(self._read, attackers),
            "look for a stuck client": self._client.stuck(),
            "client": self._client.run(),
            "client's look for restarts": self._client.follow_restarts(),
            "lag": self._lag.run(),
            "look for the first failure": self._note_first_failure(report),
        }
        if self._kills:
            rng = random.Random(self._options.seed)
            client = self._client
            parts["killer of workers"] = watcher.kill_workers(
                rng, client.worker_killed, lambda: client.served
            )
        tasks = [asyncio.create_task(part, name=name) for name, part in parts.items()]
        watch, reading, stuck = tasks[:3]
        try:
            await asyncio.wait(
                [watch, reading, stuck],
                timeout=self._seconds + END_SECONDS,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if stuck.done():
                report.others.append("called off: the client waits and waits")
            ended = attackers.poll()
            if not watch.done() and ended:
                report.others.append(f"the attackers ended with status {ended}")
        finally:
            if attackers.poll() is None:
                self._log.note_time()
            attackers.kill()
            self._client.end()
            for task in tasks:
                if task is not reading:  # it ends with the attackers
                    task.cancel()
            for task, result in zip(tasks, await asyncio.gather(*tasks, return_exceptions=True), strict=True):
                if isinstance(result, Exception):
                    report.others.append(f"the siege itself failed: {task.get_name()}: {described(result)}")

    @property
    def _kills(self) -> bool:
        if self._options.kills is None:
            return bool(self._options.minutes >= LONG_MINUTES)
        return bool(self._options.kills)

    def _start_attackers(self) -> Child:
        host, port = "127.0.0.1", self._fortress.port
        address, keys = self._fortress.address, self._fortress.keys
        pictures = PICTURES if self._options.pictures else ""
        target = Target(host, port, EVIL_KEY, MODEL, address, keys, pictures)
        command = [sys.executable, "-m", "benchmarks.siege.attackers", "--target", json.dumps(asdict(target))]
        command += ["--seed", str(self._options.seed), "--seconds", str(self._seconds)]
        command += ["--attackers", self._options.attackers, "--attacks", self._options.replay]
        return Child(command, stdout=subprocess.PIPE, own_session=True)

    def _read(self, attackers: Child) -> None:
        """Read the attackers' log to its end."""
        assert attackers.process.stdout is not None
        with attackers.process.stdout as lines:
            for line in lines:
                with suppress(ValueError):  # the last line of a killed process
                    self._log.add(json.loads(line))

    async def _note_first_failure(self, report: Report) -> None:
        while not report.failures or not self._client.waits:
            await asyncio.sleep(FAILED_CHECK_SECONDS)
        self._log.note_failure()

    async def _warm_up(self) -> None:
        """Bring all processes to their usual size: a full batch with log probabilities, a grammar, and pooling."""
        fields = {
            "prompt": [[300 + index, 301] for index in range(64)],
            "max_tokens": 100,
            "logprobs": 5,
            "n": 4,
        }
        async with self._client.connection() as http:
            for extra in ({}, {"guided_regex": "[a-z ]*"}):
                async with http.post("/v1/completions", json={**fields, **extra}) as response:
                    response.raise_for_status()
                    await response.read()
            if EMBEDDER in self._fortress.processes:
                texts = {"model": EMBEDDER, "input": [[300] * 500] * 8, "task": "token_embed"}
                async with http.post("/pooling", json=texts) as response:
                    response.raise_for_status()
                    await response.read()

    async def _settle(self) -> list[str]:
        """Wait until the engine is idle, and ask once more; what is wrong."""
        wrong = len(self._client.wrong)
        held: dict[str, float] = {}
        try:
            async with self._client.connection() as http:
                await asyncio.wait_for(self._idle(http, held), SETTLE_SECONDS)
                await self._client.ask_all(http)
        except asyncio.TimeoutError:
            return [f"not idle {SETTLE_SECONDS:g} s after the last attack: {held}"]
        except Exception as error:
            return [f"after the last attack: {described(error)} {held}"]
        return [f"afterwards: {text}" for text in self._client.wrong[wrong:]]

    async def _idle(self, http: aiohttp.ClientSession, held: dict[str, float]) -> None:
        """Wait until the engine has nothing to do. held: what it still has, by the name of a gauge."""
        while True:
            held.clear()
            held.update(await self._held(http))
            if not held:
                return
            await asyncio.sleep(0.2)

    async def _held(self, http: aiohttp.ClientSession) -> dict[str, float]:
        """What the engine still has to do, by the name of a gauge; empty if it is idle.

        A gauge that is missing, as in the answer of a server that is not ready, is NaN. KV blocks that a request
        has been promised, for up to a day, are not of interest.
        """
        async with http.get("/metrics") as response:
            text = await response.text()
        samples = {
            line.partition("{")[0]: float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if f'model_name="{MODEL}"' in line
        }
        num_blocks, promised = NUM_BLOCKS.search(text), PROMISED.search(text)
        if num_blocks and promised and USAGE in samples:
            samples[USAGE] -= float(promised[1]) / int(num_blocks[1])
        values = {name: samples.get(name, math.nan) for name in (*IDLE, USAGE)}
        return {name: value for name, value in values.items() if not abs(value) < 1e-6}


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The options of a run."""
    parser = argparse.ArgumentParser(description="A server under siege, beside a well-behaved client.")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same attacks")
    parser.add_argument(
        "--target", choices=("core", "curve", "own"), default="core",
        help="core: a server attached to a core whose socket is attacked as well; curve: the same over TCP, where "
        "certificates say what each attacker may do; own: a server with its own core",
    )  # fmt: skip
    parser.add_argument(
        "--attackers", default="", metavar="NAMES", help="only these, with commas between them"
    )
    parser.add_argument(
        "--kills", action=argparse.BooleanOptionalAction,
        help=f"kill workers now and then (default: from {LONG_MINUTES:g} minutes on); a wait for a new "
        "worker may then take a minute",
    )  # fmt: skip
    parser.add_argument(
        "--max-wait", type=float, default=WAIT_SECONDS, metavar="SECONDS",
        help="the longest that the client may wait for an answer to begin, or to go on (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--pictures", default="", metavar="MODEL",
        help="a model that takes pictures, such as demo-vision, to be served, asked and attacked as well (default: "
        "requests with pictures go to the demo model, which refuses them)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to this file as well")
    parser.add_argument(
        "--replay", default="", metavar="LIST", help="only these: bodies/17,grammars/4, or a report"
    )
    options = parser.parse_args(given)
    try:
        if options.replay.endswith(".json"):
            report = json.loads(Path(options.replay).read_text())
            options.replay, options.seed = (
                ",".join(report["attacks_before_failure"]),
                report["options"]["seed"],
            )
        chosen(options.attackers, None if options.target == "own" else "a core")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return options


def main() -> int:
    """Run a siege, and report."""
    options = arguments()
    try:
        with besieged(options.target, options.pictures) as fortress:
            report = asyncio.run(Siege(fortress, options).run())
    except (Exception, KeyboardInterrupt) as error:
        print(f"FAILED: there was no siege to its end: {described(error)}")
        return 1
    print(report.text())
    if options.json:
        options.json.write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
