"""A snapshot of a running core for `pagewire top`, and its text form."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagewire.ipc.errors import EngineDeadError
from pagewire.ipc.quoting import on_one_line

if TYPE_CHECKING:
    from pagewire.frontend.core.client import CoreClient

ANSWER_SECONDS = 10.0  # a core that takes longer to answer a call counts as hung
MAX_REQUESTS = 1000  # most requests that a snapshot lists: keeps the message and the table small
NAME_WIDTH = 48  # names of models, frontends and requests are cut to this many characters
WIDE, MIN_NAME = 110, 8  # of a table that has all columns, and of a request's name in a narrower one
LEFT_OUT = ("PID", "CACHED", "OF")
COLUMNS = ("FRONTEND", "PID", "REQUEST", "PHASE", "PROMPT", "CACHED", "OUTPUT", "OF", "AGE", "SINCE TOKEN")


@dataclass(frozen=True)
class CoreSnapshot:
    """The core's answers to `status` and `requests`, and its rates since the previous snapshot.

    Attributes:
        time: `time.monotonic()` of the snapshot.
        prompt_rate, output_rate: tokens per second. busy: share of the time in which the worker computed.
        hit_rate: share of the tokens looked up in the prefix cache that it held; None: no token was looked up.
    """

    time: float
    status: dict[str, Any]
    requests: list[dict[str, Any]]
    prompt_rate: float = 0.0
    output_rate: float = 0.0
    busy: float = 0.0
    hit_rate: float | None = None

    @classmethod
    def after(
        cls, before: CoreSnapshot | None, status: dict[str, Any], requests: list[dict[str, Any]]
    ) -> CoreSnapshot:
        """Return a snapshot taken now, with its rates since `before`."""
        now = time.monotonic()
        if before is None:
            return cls(now, status, requests)

        def grown(name: str) -> float:
            return float(status[name] - before.status[name])

        seconds, queries = now - before.time, grown("num_prefix_queries")
        return cls(
            now,
            status,
            requests,
            prompt_rate=grown("num_prompt_tokens") / seconds,
            output_rate=grown("num_output_tokens") / seconds,
            busy=min(1.0, grown("worker_busy_s") / seconds),
            hit_rate=grown("num_prefix_hits") / queries if queries else None,
        )

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks in use, 0 to 1."""
        return 1.0 - float(self.status["num_free_blocks"] / self.status["num_blocks"])

    @property
    def state_usage(self) -> float:
        """Share of the state slots that running sequences use, 0 to 1; 0 if the model keeps no states."""
        total = self.status["num_states"]
        return 1.0 - float(self.status["num_free_states"] / total) if total else 0.0

    @property
    def state(self) -> str:
        """State of the engine: serving, paused, asleep (with its level) or worker restarting."""
        if not self.status["worker_ready"] and self.status["sleep_level"] < 2:
            return "worker restarting"
        asleep = f"asleep, level {self.status['sleep_level']}"
        return asleep if self.status["sleeping"] else "paused" if self.status["paused"] else "serving"

    def as_dict(self) -> dict[str, Any]:
        """Return the snapshot as JSON-compatible values, for `--json`."""
        rates = {
            "prompt_tokens_per_s": self.prompt_rate,
            "output_tokens_per_s": self.output_rate,
            "worker_busy": self.busy,
            "prefix_hit_rate": self.hit_rate,
            "kv_usage": self.kv_usage,
            "state_usage": self.state_usage,
        }
        return {"status": self.status, "rates": rates, "requests": self.requests}


def call(client: CoreClient, method: str, *args: Any) -> Any:
    """Call a method of the core and return its answer.

    Raises:
        EngineDeadError: the core is lost, or did not answer in time.
    """
    try:
        return client.call(method, *args).result(ANSWER_SECONDS)
    except futures.TimeoutError:
        raise EngineDeadError(f"the engine core has not answered for {ANSWER_SECONDS:g} s") from None


def take_snapshot(client: CoreClient, seconds: float) -> CoreSnapshot:
    """Return a snapshot whose rates are measured over `seconds`.

    Raises:
        EngineDeadError: the core is lost, or did not answer in time.
    """
    first = CoreSnapshot.after(None, call(client, "status"), [])
    time.sleep(seconds)
    return CoreSnapshot.after(first, call(client, "status"), call(client, "requests", MAX_REQUESTS))


def lines(snapshot: CoreSnapshot) -> Iterator[str]:
    """Yield a snapshot as lines of text: the engine, its frontends, its requests."""
    yield from summary(snapshot)
    yield ""
    yield from table(
        ("FRONTEND", "PID", "WAITING", "PREFILL", "DECODE"),
        [
            (printable(client["name"]), str(client["pid"]), *map(str, client["phases"].values()))
            for client in snapshot.status["clients"]
        ],
    )
    if snapshot.requests:
        yield ""
        yield from table(COLUMNS, [cells(request) for request in snapshot.requests])


def summary(snapshot: CoreSnapshot) -> Iterator[str]:
    """Yield three lines that describe the engine."""
    status, hits = snapshot.status, "-" if snapshot.hit_rate is None else f"{100 * snapshot.hit_rate:.0f}%"
    used, states = status["num_blocks"] - status["num_free_blocks"], ""
    if num_states := status["num_states"]:
        num_used = num_states - status["num_free_states"]
        states = f"states {100 * snapshot.state_usage:.1f}% ({num_used} of {num_states} slots), "
    yield (
        f"{printable(status['model'])}: {snapshot.state}, up {span(status['uptime_s'])}, "
        f"worker busy {100 * snapshot.busy:.0f}%, {status['worker_restarts']} restarts"
    )
    yield (
        f"sequences: {status['running']} running, {status['waiting']} waiting; "
        f"tokens/s: {snapshot.prompt_rate:.0f} prompt, {snapshot.output_rate:.0f} generated"
    )
    yield (
        f"KV cache {100 * snapshot.kv_usage:.1f}% ({used} of {status['num_blocks']} blocks), {states}"
        f"prefix hits {hits}, {status['num_preemptions']} preemptions"
    )


def cells(request: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a request, one for each of `COLUMNS`."""
    since = request["seconds_since_token"]
    name = printable(request["request_id"]) + (f" [{request['index']}]" if request["index"] else "")
    return (
        printable(request["frontend"]),
        str(request["frontend_pid"]),
        name,
        printable(request["phase"]),
        str(request["num_prompt_tokens"]),
        str(request["num_cached_tokens"]),
        str(request["num_output_tokens"]),
        str(request["max_output_tokens"]),
        span(request["age"]),
        "-" if since is None else span(since),
    )


def fitted(requests: Sequence[dict[str, Any]], width: int) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of requests in a table of some width; what does not fit is left out or shortened.

    Each column has a place beside it on both sides.
    """
    rows = list(map(cells, requests))
    places = [place for place, name in enumerate(COLUMNS) if width >= WIDE or name not in LEFT_OUT]
    widths = [max(len(row[place]) for row in (COLUMNS, *rows)) + 2 for place in places]
    of_request = places.index(COLUMNS.index("REQUEST"))
    room = max(MIN_NAME, width - sum(widths) + widths[of_request] - 2)
    chosen = [[row[place] for place in places] for row in rows]
    for row in chosen:
        if len(row[of_request]) > room:
            row[of_request] = row[of_request][: room - 1] + "…"
    return [COLUMNS[place] for place in places], chosen


def span(seconds: float) -> str:
    """Return a short form of a duration: 0.25s, 12s, 3m05s, 2h10m, 4d03h."""
    if seconds < 10:
        return f"{seconds:.2f}s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes == 0:
        return f"{rest}s"
    if minutes < 60:
        return f"{minutes}m{rest:02}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h{minutes:02}m"
    return f"{hours // 24}d{hours % 24:02}h"


def printable(text: str) -> str:
    """Return a name without control characters, cut to `NAME_WIDTH`: other users choose it."""
    clean = on_one_line(text)
    return clean if len(clean) <= NAME_WIDTH else clean[: NAME_WIDTH - 1] + "…"


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of a table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
