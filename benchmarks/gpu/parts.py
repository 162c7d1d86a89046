"""Parts of a run, each in a process of its own with a time limit: one that fails hides nothing of the others."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.02
KEPT_OUTPUT = 6000
"""Characters of the end of a part's output that are kept: those of some 30 parts are a few hundred kB at most."""
LEAST_SECONDS = 5.0
"""A part for which less time is left is not begun."""
OK, FAILED, TIMED_OUT, SKIPPED, LEFT_OUT = "ok", "FAIL", "TIME", "skip", "left out"


class SkipError(Exception):
    """A part has nothing to do here. The message says why."""


@dataclass(frozen=True)
class Part:
    """Something to find out. run: returns figures for JSON, or raises; its output is kept. limit: in seconds."""

    name: str
    limit: float
    run: Callable[[], dict[str, Any]]


@dataclass
class Outcome:
    """What came of a part."""

    part: str
    verdict: str
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    error: str = ""
    """The first line."""
    figures: dict[str, Any] = field(default_factory=dict)
    output: str = ""

    @property
    def is_bad(self) -> bool:
        """True if it counts as a failure: also a part for which no time was left."""
        return self.verdict in (FAILED, TIMED_OUT, LEFT_OUT)

    @property
    def line(self) -> str:
        """The line of the table."""
        return f"{self.part:24} {self.verdict:8} {self.seconds:6.1f} s  {self.error[:160]}".rstrip()


def run_part(part: Part, seconds_left: float) -> Outcome:
    """Run a part in a forked process, for as long as it may take.

    A fork has what this process has imported, so a part begins at once. This process must never use a GPU.
    """
    if seconds_left < LEAST_SECONDS:
        return Outcome(part.name, LEFT_OUT, error="no time is left")
    limit, begin = min(part.limit, seconds_left), time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        output, result = Path(directory, "output"), Path(directory, "result")
        output.touch()
        sys.stdout.flush()
        if (pid := os.fork()) == 0:
            run_here(part, output, result)
        status, cpu_seconds = wait_for(pid, begin + limit)
        outcome = Outcome(part.name, FAILED, time.monotonic() - begin, cpu_seconds)
        outcome.output = output.read_text(errors="replace")[-KEPT_OUTPUT:]
        if status is None:
            outcome.verdict, outcome.error = TIMED_OUT, f"not done after {limit:.0f} s"
        elif result.exists():
            outcome.verdict, outcome.error, outcome.figures = json.loads(result.read_text())
        else:
            outcome.error = (
                f"ended by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            )
        return outcome


def wait_for(pid: int, deadline: float) -> tuple[int | None, float]:
    """The exit status of a process, negative for a signal, and its processor time.

    None as the status: it and its group were killed at the deadline.
    """
    while time.monotonic() < deadline:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            end_group(pid)
            return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
        time.sleep(POLL_SECONDS)
    end_group(pid)
    usage = os.wait4(pid, 0)[2]
    return None, usage.ru_utime + usage.ru_stime


def end_group(pid: int) -> None:
    """Kill what is left of a process group."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def run_here(part: Part, output: Path, result: Path) -> None:
    """Run a part in this process, which ends. result: gets the verdict, the error's first line and the figures."""
    status = 1
    try:
        os.setpgid(0, 0)
        sys.stdout = sys.stderr = file = output.open("w", buffering=1)
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
        faulthandler.enable()
        verdict, error, figures = FAILED, "", {}
        try:
            figures, verdict = part.run() or {}, OK
        except SkipError as reason:
            verdict, error = SKIPPED, str(reason)
        except BaseException as raised:
            traceback.print_exc()
            error = f"{type(raised).__name__}: {next(iter(str(raised).splitlines()), '')}"
        sys.stdout.flush()
        result.write_text(json.dumps([verdict, error, figures], default=str))
        status = 0
    finally:
        os._exit(status)


def summary(outcomes: list[Outcome]) -> str:
    """The table of all parts."""
    bad = sum(outcome.is_bad for outcome in outcomes)
    lines = [outcome.line for outcome in outcomes]
    return "\n".join([*lines, f"{len(outcomes) - bad} of {len(outcomes)} parts without a failure"])


def write_results(file: Path, facts: dict[str, Any], outcomes: list[Outcome]) -> None:
    """Write everything as JSON; after each part, so that what ends this program loses nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(
        json.dumps(facts | {"parts": [asdict(outcome) for outcome in outcomes]}, indent=1) + "\n"
    )
    unfinished.rename(file)
