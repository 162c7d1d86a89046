"""The process that attacks: every attacker in loops of its own, at its pace. Writes a line of JSON for each attack.

It is started by `benchmarks.siege`, apart from the well-behaved client, so that it does not delay that one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import count

from pagewire.ipc.host.lifeline import die_with_parent
from pagewire.ipc.host.priority import go_behind

from . import bodies, combined, frames, grammars, greedy, pictures, raw_http, responses, slow, templates
from .attack import UNANSWERED, Attacker, Target, awaited, queued_seconds

ATTACKERS = {
    attacker.name: attacker
    for attacker in (
        Attacker("bodies", bodies.attack, 8, loops=4),
        Attacker("fields", bodies.fields, 0.3),
        Attacker("embeddings", bodies.embeddings, 0.5),
        Attacker("requests", raw_http.requests, 6, loops=3),
        Attacker("idle", raw_http.idle, 1, loops=3),
        Attacker("churn", raw_http.churn, 1),
        Attacker("slow-senders", slow.sender, 4, loops=6),
        Attacker("crumbs", slow.crumbs, 1, loops=4),
        Attacker("slow-readers", slow.reader, 2, loops=6),
        Attacker("greedy", greedy.attack, 2, loops=3),
        Attacker("leaving", greedy.leaving, 3, loops=3),
        Attacker("chats", greedy.chats, 1),
        Attacker("pooling", greedy.pooling, 2, loops=6, on_core=True),
        Attacker("grammars", grammars.attack, 4, loops=3),
        Attacker("many-grammars", grammars.many, 0.5),
        Attacker("slow-grammars", grammars.slow, 2, loops=6),
        Attacker("templates", templates.attack, 3, loops=3),
        Attacker("pictures", pictures.attack, 3, loops=6),
        Attacker("sizes", pictures.sizes, 0.5, loops=4),
        Attacker("padding", pictures.padding, 0.5, loops=2),
        Attacker("slow-pictures", pictures.slow, 2, loops=6),
        Attacker("responses", responses.attack, 3, loops=3),
        Attacker("references", responses.references, 0.3),
        Attacker("combined", combined.attack, 2, loops=3),
        Attacker("crowd", combined.crowd, 0.5),
        Attacker("kept", combined.kept, 1, loops=2),
        Attacker("headers", combined.headers, 4, loops=2),
        Attacker("strangers", combined.strangers, 1),
        Attacker("messages", frames.messages, 5, loops=2, on_core=True),
        Attacker("submits", frames.submits, 2, loops=2, on_core=True),
        Attacker("integers", frames.integers, 0.3, on_core=True),
        Attacker("shapes", frames.shapes, 0.5, on_core=True),
        Attacker("flood", frames.flood, 0.5, on_core=True),
        Attacker("hellos", frames.hellos, 0.5, on_core=True),
        Attacker("sockets", frames.sockets, 1, loops=2, on_core=True),
    )
}
NICENESS = 5  # below the server's priority: what is measured is the server, not a lack of processors
LONGEST_SECONDS = (
    150.0  # an attack that has not come to an end by then waits for an answer that does not come
)
BROKEN = "broken"  # the attacker itself failed


class Attacking:
    """A run of attackers on one target, until `end` on the monotonic clock."""

    def __init__(self, target: Target, seed: int, end: float) -> None:
        self._target, self._seed, self._end = target, seed, end
        self._begin = time.monotonic()

    async def run(self, numbers: dict[str, Iterable[int]]) -> None:
        """Carry out the attacks with these numbers, by attacker, side by side."""
        loops = []
        for name, given in numbers.items():
            queue = iter(given)
            loops += [self._loop(ATTACKERS[name], queue) for _ in range(ATTACKERS[name].loops)]
        alive = asyncio.create_task(self._show_life())
        await asyncio.gather(*loops)
        alive.cancel()

    async def _show_life(self) -> None:
        """Write a line each second: without them, the attackers stand still, and nothing is attacked."""
        while True:
            print(json.dumps({"queued": queued_seconds()}), flush=True)
            await asyncio.sleep(1.0)

    async def _loop(self, attacker: Attacker, queue: Iterator[int]) -> None:
        pause = attacker.loops / attacker.per_second
        for number in queue:
            begin = time.monotonic()
            if begin >= self._end:
                return
            self._write(attacker.name, number)
            status = await self._attack(attacker, number)
            took = time.monotonic() - begin
            self._write(attacker.name, number, status=status, took=round(took, 3))
            await asyncio.sleep(min(max(0.0, pause - took), max(0.0, self._end - time.monotonic())))

    async def _attack(self, attacker: Attacker, number: int) -> str:
        rng = random.Random(f"{self._seed}/{attacker.name}/{number}")
        try:
            return str(await awaited(attacker.attack(self._target, rng), LONGEST_SECONDS))
        except asyncio.TimeoutError:
            return UNANSWERED
        except OSError as error:
            return f"no connection ({os.strerror(error.errno) if error.errno else error})"
        except Exception as error:
            return f"{BROKEN}: {error!r:.200}"

    def _write(self, name: str, number: int, **more: object) -> None:
        at = round(time.monotonic() - self._begin, 3)
        line = {"name": name, "number": number, "at": at, "queued": queued_seconds()}
        print(json.dumps(line | more), flush=True)


def chosen(names: str, address: str | None) -> list[str]:
    """The names of the attackers in a list with commas; all that can reach the target if it is empty.

    Raises:
        ValueError: there is no such attacker, or it needs a core's socket.
    """
    for name in filter(None, names.split(",")):
        if name not in ATTACKERS:
            raise ValueError(f"there is no attacker {name!r}; there are {', '.join(ATTACKERS)}")
        if ATTACKERS[name].on_core and address is None:
            raise ValueError(f"{name} attacks a core's socket: it needs --target core")
    return [
        name
        for name, attacker in ATTACKERS.items()
        if (name in names.split(",") if names else address or not attacker.on_core)
    ]


def listed(attacks: str) -> dict[str, Iterable[int]]:
    """Numbers by attacker, from a list such as `bodies/17,grammars/4`."""
    numbers: dict[str, list[int]] = {}
    for attack in attacks.split(","):
        name, _, number = attack.partition("/")
        numbers.setdefault(name, []).append(int(number))
    return dict(numbers)


def main() -> int:
    """Attack until the time is over, the list is done, or the parent has ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", type=json.loads, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--attackers", default="")
    parser.add_argument("--attacks", default="")
    parser.add_argument("--lifeline", type=int, required=True)
    options = parser.parse_args()
    go_behind(NICENESS)
    die_with_parent(options.lifeline)
    target = Target(**options.target)
    names = chosen(options.attackers, target.address)
    numbers = listed(options.attacks) if options.attacks else {name: count() for name in names}
    attacking = Attacking(target, options.seed, time.monotonic() + options.seconds)
    asyncio.run(attacking.run(numbers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
