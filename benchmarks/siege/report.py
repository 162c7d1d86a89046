"""What came of a siege: figures, and the verdict."""

from __future__ import annotations

import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagewire.engine_core.media import store
from pagewire.frontend.media import intake, loader

from .attack import SERVER_ERROR, UNANSWERED
from .attackers import BROKEN
from .client import Client, Wait
from .watcher import GROWTH_MIB, Lag, Watcher

LAST = 60  # attacks before the first failure that a report lists
KEPT = 5000
KEPT_BYTES = (loader.CACHE_BYTES, intake.MAX_LAYOUT_BYTES, store.MAX_BYTES, store.MAX_LAYOUT_BYTES)
KEPT_PICTURES_MIB = sum(KEPT_BYTES) / (1 << 20)
"""What a server and a core keep of pictures at most, beside `GROWTH_MIB`."""
SILENCE_SECONDS = 10.0  # of the attackers, who write a line each second: longer, and it is no siege


@dataclass
class AttackLog:
    """The attacks so far.

    statuses: their number by attacker and status. bad: those that failed as none may. longest_silence: seconds
    between lines of the attackers, in which they did not wait for a processor. queued: seconds in which they did.
    """

    statuses: dict[str, Counter[str]] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)
    open: dict[str, float] = field(default_factory=dict)
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=KEPT))
    at_failure: list[str] = field(default_factory=list)
    longest_silence: float = 0.0
    queued: float = 0.0
    clock: Callable[[], float] = time.monotonic
    _last_line: float | None = None

    def add(self, line: dict[str, Any]) -> None:
        """Note the begin or the end of an attack, or, with a line without a name, that the attackers go on."""
        self.note_time(line.get("queued"))
        if "name" not in line:
            return
        name = f"{line['name']}/{line['number']}"
        if "status" not in line:
            self.open[name] = line["at"]
            self.recent.append({"attack": name, "at": line["at"]})
            return
        self.open.pop(name, None)
        status = line["status"]
        self.statuses.setdefault(line["name"], Counter())[status.partition(":")[0]] += 1
        if status == UNANSWERED or status.startswith((SERVER_ERROR, BROKEN)):
            self.bad.append(f"{name}: {status} after {line['took']:.1f} s")

    def note_time(self, queued: float | None = None) -> None:
        """Count the time since the last line as one in which the attackers stood still.

        queued: seconds of their lives in which they have waited for a processor; None: none since the last line.
        """
        now, waited = self.clock(), 0.0
        if queued is not None:
            waited, self.queued = queued - self.queued, queued
        if self._last_line is not None:
            self.longest_silence = max(self.longest_silence, now - self._last_line - waited)
        self._last_line = now

    def note_failure(self) -> None:
        """Keep the attacks that came before the first failure: those still open, then the latest."""
        if not self.at_failure:
            # Copied at once: a thread adds lines meanwhile.
            still_open, latest = list(self.open), [attack["attack"] for attack in list(self.recent)[-LAST:]]
            self.at_failure = [name for name in still_open if name not in latest] + latest


@dataclass
class Report:
    """A siege's figures. failures: what the verdict is made of; empty if the siege was withstood."""

    options: dict[str, Any]
    log: AttackLog
    client: Client
    watcher: Watcher
    lag: Lag
    after: dict[str, float] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    begin: float = field(default_factory=time.monotonic)

    @property
    def late(self) -> list[Wait]:
        """The waits that were too long, also without the time in which the client's process could not run."""
        given = [*self.client.waits, *self.client.open_wait()]
        long = [wait for wait in given if wait.seconds > wait.limit]
        return [
            wait
            for wait in long
            if wait.seconds - self.lag.within(wait.begin, wait.begin + wait.seconds) > wait.limit
        ]

    @property
    def failures(self) -> list[str]:
        """All that went wrong."""
        watcher, client = self.watcher, self.client
        found = [*watcher.deaths, *filter(None, [watcher.overflow]), *self.others]
        if late := self.late:
            worst = max(late, key=lambda wait: wait.seconds)
            found.append(
                f"the client waited too long {len(late)} times; worst {worst.seconds:.1f} s for {worst.kind}, "
                f"limit {worst.limit:g} s; {worst.stages or 'stages unknown'}"
            )
        if client.wrong:
            found.append(f"the client got {len(client.wrong)} wrong answers; first: {client.wrong[0]}")
        if not client.waits:
            found.append("the client got no answer at all")
        may_grow = GROWTH_MIB + (KEPT_PICTURES_MIB if self.options.get("pictures") else 0.0)
        if watcher.growth > may_grow:
            found.append(f"memory grew by {watcher.growth:.0f} MiB, limit {may_grow:.0f}")
        if self.log.longest_silence > SILENCE_SECONDS:
            found.append(
                f"the attackers stood still for {self.log.longest_silence:.1f} s, limit {SILENCE_SECONDS:g} s"
            )
        if self.log.bad:
            first = "; ".join(text[:160] for text in self.log.bad[:5])
            found.append(f"{len(self.log.bad)} attacks failed as they must not; first: {first}")
        return found

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "options": self.options,
            "attacks": {name: dict(counts.most_common()) for name, counts in self.log.statuses.items()},
            "waits": waits(self.client.waits),
            "late": [
                [wait.kind, round(wait.begin - self.begin, 1), round(wait.seconds, 2), wait.stages]
                for wait in self.late
            ],
            "answers": self.client.num_answers,
            "lag_s": round(self.lag.longest, 3),
            "attackers_silent_s": round(self.log.longest_silence, 3),
            "attackers_queued_s": round(self.log.queued, 3),
            "processors_used_by_others": round(self.watcher.others, 3),
            "memory_mib": {"before": self.watcher.before, "peak": self.watcher.peak, "after": self.after},
            "kills": [round(moment - self.begin, 1) for moment in self.watcher.kills],
            "jobs": self.watcher.num_jobs,
            "failures": self.failures,
            "bad_attacks": self.log.bad[:100],
            "wrong_answers": self.client.wrong[:20],
            "attacks_before_failure": self.log.at_failure,
        }

    def text(self) -> str:
        """The report to read."""
        lines = ["attacks"]
        for name, counts in self.log.statuses.items():
            shown = ", ".join(f"{count} x {status}" for status, count in counts.most_common(8))
            lines.append(f"  {name:<14} {sum(counts.values()):>6}: {shown}")
        lines.append(
            f"client: {self.client.num_answers} answers; waits in seconds (this process woke up to "
            f"{self.lag.longest:.2f} s late, the attackers up to {self.log.longest_silence:.2f} s; they waited "
            f"{self.log.queued:.0f} s for a processor)"
        )
        for kind, figures in waits(self.client.waits).items():
            cells = "  ".join(f"{name} {value:.3f}" for name, value in figures.items() if name != "count")
            lines.append(f"  {kind:<14} {figures['count']:>6}: {cells}")
        lines.append("memory in MiB, before / peak / after")
        for role, size in self.watcher.peak.items():
            lines.append(
                f"  {role:<14} {self.watcher.before.get(role, 0):6.0f} {size:6.0f} {self.after.get(role, 0):6.0f}"
            )
        lines.append(
            f"processor time that went to others than the siege: {self.watcher.others:.0%} of the machine"
        )
        lines.append(
            f"workers killed: {len(self.watcher.kills)}; processes for jobs: {self.watcher.num_jobs}"
        )
        failures = self.failures
        lines += [f"FAILED: {failure}" for failure in failures] or ["withstood"]
        if failures and self.log.at_failure:
            lines.append(f"attacks before the first failure (--replay): {','.join(self.log.at_failure)}")
        return "\n".join(lines)


def described(error: BaseException) -> str:
    """An error by its type and text, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{error!r:.300}{place}"


def waits(given: list[Wait]) -> dict[str, dict[str, float]]:
    """Count, median, 99th percentile and maximum of waits, by kind; those for a new worker apart."""
    kinds: dict[str, list[float]] = {}
    for wait in given:
        kinds.setdefault("restart" if wait.restart else wait.kind, []).append(wait.seconds)
    figures = {}
    for kind, seconds in kinds.items():
        ordered = sorted(seconds)
        share = {"median": 0.5, "p99": 0.99, "max": 1.0}
        values = {
            name: round(ordered[min(len(ordered) - 1, int(part * len(ordered)))], 4)
            for name, part in share.items()
        }
        figures[kind] = {"count": len(ordered), **values}
    return figures
