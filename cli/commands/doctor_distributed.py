"""`pagewire doctor --distributed`: check and time what workers use to exchange tensors."""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator

from pagewire.cli.console.parser import UsageError
from pagewire.ipc.host.lifeline import Child

PROBE = (sys.executable, "-m", "pagewire.workers.ranks.probe")
MARKS = {True: "ok", False: "FAIL", None: "-"}
LIMIT_SECONDS = 120.0  # for the processes to start, meet and measure; one that hangs is killed
POLL_SECONDS = 0.02
NAMES = {"shared": "memory", "gloo": "gloo", "nccl": "nccl"}


def run(options: argparse.Namespace) -> int:
    """Check every kind of exchange that this machine has, print the results, and return 0 if none failed, else 1.

    Raises:
        UsageError: the options do not fit each other.
    """
    if options.ranks < 2:
        raise UsageError(f"--ranks must be at least 2, got {options.ranks}")
    if (options.at is None) != (options.rank is None):
        raise UsageError(
            "--at and --rank go together: they check several machines, each with a command of its own"
        )
    if options.at is not None and not 0 <= options.rank < options.ranks:
        raise UsageError(f"--rank must be in [0, {options.ranks - 1}], got {options.rank}")
    failed = False
    for kind, size, reason in kinds(options):
        if reason is not None:
            good, text = None, reason
        else:
            good, text = measured(kind, size, options.at, options.rank)
        failed |= good is False
        print(f"{MARKS[good]:4}  {NAMES[kind]:8}  {text}")
    print("Workers cannot exchange tensors: see FAIL above." if failed else "Workers can exchange tensors.")
    return int(failed)


def kinds(options: argparse.Namespace) -> Iterator[tuple[str, int, str | None]]:
    """The kinds of exchange, the ranks that try each, and why it is not tried, or None."""
    import torch

    if options.at is None:
        yield "shared", options.ranks, None
    yield "gloo", options.ranks, None
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if options.at is not None:
        yield "nccl", options.ranks, None if num_gpus else "not tried: no GPU"
    else:
        reason = f"not tried: it takes two GPUs, and this machine has {num_gpus}" if num_gpus < 2 else None
        yield "nccl", num_gpus, reason


def measured(kind: str, size: int, address: str | None, rank: int | None) -> tuple[bool, str]:
    """Run the ranks of a group here, or one of them, and wait for their report. Returns it, or what went wrong."""
    name = f"pagewire-doctor-{secrets.token_hex(8)}" if address is None else "pagewire-doctor"
    numbers = range(size) if rank is None else [rank]
    pipe = subprocess.PIPE
    ranks = [
        Child([*PROBE, kind, str(number), str(size), name, address or "-"], stdout=pipe, stderr=pipe)
        for number in numbers
    ]
    give_up = time.monotonic() + LIMIT_SECONDS
    while any(child.poll() is None for child in ranks) and not any(child.poll() for child in ranks):
        if time.monotonic() > give_up:
            break
        time.sleep(POLL_SECONDS)
    hung = [str(number) for number, child in zip(numbers, ranks, strict=True) if child.poll() is None]
    failed = any(child.poll() for child in ranks)
    for child in ranks:
        child.kill()  # those that wait for a rank that has failed, or hangs
    texts = [child.process.communicate() for child in ranks]
    if failed:
        lines = [
            line for _, error in texts for line in error.decode().splitlines() if line.startswith("rank ")
        ]
        return False, lines[0] if lines else "a process was killed"
    if hung:
        return False, f"no answer from rank {', '.join(hung)} within {LIMIT_SECONDS:g} s"
    output = texts[0][0].decode()
    return True, described(json.loads(output.splitlines()[-1])) if output else "see the machine of rank 0"


def described(report: dict[str, float]) -> str:
    """A line about a report of the probe."""
    return (
        f"{report['size']} ranks ({report['collective']}): a sum of 8 KiB takes {report['latency'] * 1e6:.0f} us, "
        f"a barrier {report['barrier'] * 1e6:.0f} us; sums of 16 MiB run at {report['bandwidth'] / 1e9:.2f} GB/s"
    )
