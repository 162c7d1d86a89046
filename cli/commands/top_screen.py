"""The live view of `pagewire top`, on textual."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Sparkline, Static

from pagewire.cli.commands.top_snapshot import (
    MAX_REQUESTS,
    CoreSnapshot,
    call,
    fitted,
    printable,
    summary,
)
from pagewire.frontend.core.client import CoreClient

HISTORY = 120  # snapshots in the graphs
MARGIN = 6  # columns of the terminal beside the table: its border and bar

# Sort keys by name; requests with equal keys are sorted by age, oldest first.
ORDERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "age": lambda request: 0,
    "frontend": lambda request: (request["frontend"], request["frontend_number"]),
    "phase": lambda request: ("prefill", "decode", "waiting").index(request["phase"]),
    "output": lambda request: -request["num_output_tokens"],
    "since token": lambda request: -(request["seconds_since_token"] or 0.0),
}


class Screen(App[None]):
    """The live view: takes a snapshot of the core every `interval` seconds.

    failure: the error that ended the view; None if the user quit.
    """

    TITLE = "pagewire top"
    CSS = """
    #summary { height: 3; padding: 0 1; }
    .label { height: 1; padding: 0 1; }
    Sparkline { height: 1; margin: 0 1; }
    DataTable { height: 1fr; border: round $primary; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("a", "abort", "end the request"),
        Binding("p", "pause", "pause/resume"),
        Binding("s", "sort", "sort"),
        Binding("q", "quit", "quit"),
    ]

    def __init__(self, client: CoreClient, interval: float) -> None:
        super().__init__()
        self.failure: Exception | None = None
        self.snapshot: CoreSnapshot | None = None
        self.order = "age"
        self._client, self._interval = client, interval
        self._past: list[CoreSnapshot] = []
        self._rows: list[dict[str, Any]] = []

    def compose(self) -> ComposeResult:
        """Yield the widgets: summary, graphs, table of requests, list of keys."""
        yield Static(id="summary", markup=False)
        for name in ("speed", "usage"):
            yield Static(id=f"{name}-label", classes="label", markup=False)
            yield Sparkline([], id=name, summary_function=max)
        yield DataTable(cursor_type="row", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        """Start taking snapshots."""
        self._table.focus()
        self.run_worker(self._attempt(self._watch()))

    @property
    def _table(self) -> DataTable[Text]:
        return self.query_one(DataTable)

    async def _watch(self) -> None:
        while True:
            await self.refresh_snapshot()
            await asyncio.sleep(self._interval)

    async def refresh_snapshot(self) -> None:
        """Take a snapshot and show it.

        Raises:
            EngineDeadError: the core is lost, or did not answer in time.
        """
        status = await self._call("status")
        self.snapshot = CoreSnapshot.after(self.snapshot, status, await self._call("requests", MAX_REQUESTS))
        self.show(self.snapshot)

    def show(self, snapshot: CoreSnapshot) -> None:
        """Show a snapshot; the cursor stays on its request."""
        self.query_one("#summary", Static).update("\n".join(summary(snapshot)))
        self._past = [*self._past[1 - HISTORY :], snapshot]
        speeds, usages = [past.output_rate for past in self._past], [past.kv_usage for past in self._past]
        span = f"of the last {self._past[-1].time - self._past[0].time:.0f} s"
        self._graph(
            "speed", speeds, f"tokens/s generated: {speeds[-1]:.0f}, at most {max(speeds):.0f} {span}"
        )
        self._graph("usage", usages, f"KV cache: {usages[-1]:.1%}, at most {max(usages):.1%} {span}")
        self._fill(snapshot.requests)

    def _graph(self, name: str, values: list[float], label: str) -> None:
        self.query_one(f"#{name}-label", Static).update(label)
        self.query_one(f"#{name}", Sparkline).data = values

    def _fill(self, requests: list[dict[str, Any]]) -> None:
        table, selected = self._table, self.selected
        self._rows = sorted(requests, key=lambda request: (ORDERS[self.order](request), -request["age"]))
        table.clear(columns=True)
        columns, rows = fitted(self._rows, self.size.width - MARGIN)
        table.add_columns(*columns)
        for row in rows:
            table.add_row(*map(Text, row))
        if selected is not None:
            places = [place for place, request in enumerate(self._rows) if same(request, selected)]
            table.move_cursor(row=places[0] if places else 0)
        table.border_title = f"{len(self._rows)} sequences by {self.order}"

    @property
    def selected(self) -> dict[str, Any] | None:
        """The request under the cursor."""
        row = self._table.cursor_row
        return self._rows[row] if 0 <= row < len(self._rows) else None

    async def action_abort(self) -> None:
        """End all sequences of the selected request; its frontend gets the finish reason "abort"."""
        if (request := self.selected) is not None:
            await self._attempt(self._abort(request))

    async def _abort(self, request: dict[str, Any]) -> None:
        request_id, name = request["request_id"], printable(request["request_id"])
        num_ended = await self._call("abort_request", request_id, request["frontend_number"])
        self.notify(
            f"{name}: {num_ended} sequences ended" if num_ended else f"{name} had already ended", markup=False
        )
        await self.refresh_snapshot()

    async def action_pause(self) -> None:
        """Pause the engine (running requests go on, new ones wait), or resume it."""
        if self.snapshot is not None:
            await self._attempt(self._pause(self.snapshot.status["paused"]))

    async def _pause(self, paused: bool) -> None:
        if paused:
            await self._call("resume")
        else:  # the answer comes once running requests have ended, so it is not awaited
            self._client.call("pause", wait_for_inflight_requests=True, clear_cache=False)
        await self.refresh_snapshot()

    def action_sort(self) -> None:
        """Sort by the next order of `ORDERS`."""
        names = list(ORDERS)
        self.order = names[(names.index(self.order) + 1) % len(names)]
        self._fill(self._rows)

    async def _call(self, method: str, *args: Any) -> Any:
        return await asyncio.to_thread(call, self._client, method, *args)

    async def _attempt(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work that needs the core; an error ends the view and is kept in `failure`."""
        try:
            await work
        except Exception as error:
            self.failure = error
            self.exit()


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return True if both describe the same sequence."""
    return all(first[name] == second[name] for name in ("frontend_number", "request_id", "index"))
