"""A server under a load of mixed requests, and two servers of which one is killed; exits 1 if anything is wrong.

    python -m benchmarks.serve_faults load    # 1,000 requests at 64 at once, a fifth of the clients leave midway
    python -m benchmarks.serve_faults kill    # two servers on one core, one killed in the midst of its requests

Completions and chats, streamed or not, n > 1, log probabilities, stop strings, greedy or with a seed. Every answer
is compared with what an undisturbed `AsyncLLM` gives. Starts a core of its own on the demo model in float32.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from benchmarks.daemon import running_core
from tests.end_to_end.server_process import ServerProcess
from tests.end_to_end.server_scenarios import kill_one_server, mixed_load

GROWTH_MIB, GROWTH_SHARE = 8.0, 0.05


def load(address: str, count: int, concurrency: int, num_rounds: int) -> bool:
    """Rounds of the same requests on one server."""
    server = ServerProcess(address)
    try:
        rounds = asyncio.run(mixed_load(address, server, count, concurrency, num_rounds))
    finally:
        status = server.stop()
    for number, one in enumerate(rounds):
        name = f"round {number}" if number else "first requests"
        print(
            f"{name}: {one.counts['whole']} whole and right, {one.counts['left']} left midway and right so far, "
            f"{one.counts['wrong']} wrong; {one.tasks} tasks, {one.rss_mib:.1f} MiB, "
            f"{one.status['num_free_blocks']} of {one.status['num_blocks']} blocks free"
        )
        for message in one.wrong[:3]:
            print(f"  {message}")
    first, last = rounds[1], rounds[-1]
    flat = last.rss_mib - first.rss_mib < max(GROWTH_MIB, GROWTH_SHARE * first.rss_mib)
    clean = not any(one.wrong or one.leaks for one in rounds) and last.tasks == rounds[0].tasks
    print(
        f"grown from round 1 to {num_rounds}: {last.rss_mib - first.rss_mib:+.1f} MiB; exit status {status}"
    )
    return clean and flat and status == 0


def kill(address: str, count: int) -> bool:
    """Two servers, one killed."""
    servers = [ServerProcess(address) for _ in range(2)]
    try:
        found = asyncio.run(kill_one_server(address, *servers, count))
    finally:
        servers[0].stop()
        status = servers[1].stop()
    state = found.status
    print(f"killed one server with {found.cut} of {count} requests open")
    print(f"the other: {found.unharmed} of {count} whole and right, one more afterwards: {found.afterwards}")
    print(f"{state['num_free_blocks']} of {state['num_blocks']} blocks free; exit status {status}")
    for message in found.wrong[:3]:
        print(f"  {message}")
    return (
        (found.unharmed, found.afterwards, status) == (count, True, 0)
        and found.cut > 0
        and state["num_free_blocks"] == state["num_blocks"]
    )


def main() -> int:
    """Run one scenario."""
    parser = argparse.ArgumentParser(description="Load and faults on HTTP servers.")
    parser.add_argument("scenario", choices=("load", "kill"))
    parser.add_argument("--requests", type=int, help="default: 1000 for load, 200 on each server for kill")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    with running_core("--dtype", "float32") as address:
        if options.scenario == "load":
            good = load(address, options.requests or 1000, options.concurrency, options.rounds)
        else:
            good = kill(address, options.requests or 200)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
