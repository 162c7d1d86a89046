"""The live view of `pagewire top`, on textual."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Sparkline, Static

from pagewire.cli.commands.top_look import COLUMNS, MAX_REQUESTS, Look, ask, cells, summary
from pagewire.frontend.client import CoreClient

HISTORY = 120

# Name to sort key. Oldest first within equals.
ORDERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "age": lambda request: 0,
    "frontend": lambda request: (request["frontend"], request["frontend_number"]),
    "phase": lambda request: ("prefill", "decode", "waiting").index(request["phase"]),
    "output": lambda request: -request["num_output_tokens"],
    "since token": lambda request: -(request["seconds_since_token"] or 0.0),
}


class Screen(App[None]):
    """Looks at the core every `interval` seconds. `failure`: why it ended, if not by its user."""

    TITLE = "pagewire top"
    CSS = """
    #summary { height: 3; padding: 0 1; }
    Sparkline { height: 2; margin: 0 1; }
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
        self.look: Look | None = None
        self.order = "age"
        self._client, self._interval = client, interval
        self._speeds: list[float] = []
        self._rows: list[dict[str, Any]] = []

    def compose(self) -> ComposeResult:
        """The engine, its speed, its requests, the keys."""
        yield Static(id="summary", markup=False)
        yield Sparkline([], summary_function=max)
        yield DataTable(cursor_type="row", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        """Begin."""
        self._table.add_columns(*COLUMNS)
        self._table.focus()
        self.run_worker(self._attempt(self._watch()))

    @property
    def _table(self) -> DataTable[Text]:
        return self.query_one(DataTable)

    async def _watch(self) -> None:
        while True:
            await self.refresh_look()
            await asyncio.sleep(self._interval)

    async def refresh_look(self) -> None:
        """Look, and show what is seen.

        Raises:
            EngineDeadError: the core is lost, or does not answer.
        """
        status = await self._call("status")
        self.look = Look.after(self.look, status, await self._call("requests", MAX_REQUESTS))
        self.show(self.look)

    def show(self, look: Look) -> None:
        """Show a look; the cursor stays on its request."""
        self.query_one("#summary", Static).update("\n".join(summary(look)))
        self._speeds = [*self._speeds[1 - HISTORY :], look.output_rate]
        self.query_one(Sparkline).data = self._speeds
        self._fill(look.requests)

    def _fill(self, requests: list[dict[str, Any]]) -> None:
        table, selected = self._table, self.selected
        self._rows = sorted(requests, key=lambda request: (ORDERS[self.order](request), -request["age"]))
        table.clear()
        for request in self._rows:
            table.add_row(*map(Text, cells(request)))
        if selected is not None:
            places = [place for place, request in enumerate(self._rows) if same(request, selected)]
            table.move_cursor(row=places[0] if places else 0)
        table.border_title = f"{len(self._rows)} requests by {self.order}"

    @property
    def selected(self) -> dict[str, Any] | None:
        """The request under the cursor."""
        row = self._table.cursor_row
        return self._rows[row] if 0 <= row < len(self._rows) else None

    async def action_abort(self) -> None:
        """End the selected request, all sequences of it; its frontend gets the finish reason "abort"."""
        if (request := self.selected) is not None:
            await self._attempt(self._abort(request))

    async def _abort(self, request: dict[str, Any]) -> None:
        name = request["request_id"]
        num_ended = await self._call("abort_request", name, request["frontend_number"])
        self.notify(
            f"{name}: {num_ended} sequences ended" if num_ended else f"{name} had ended", markup=False
        )
        await self.refresh_look()

    async def action_pause(self) -> None:
        """Hold new requests back, while those there are go on; or let them in again."""
        if self.look is not None:
            await self._attempt(self._pause(self.look.status["paused"]))

    async def _pause(self, paused: bool) -> None:
        if paused:
            await self._call("resume")
        else:  # answered once all that runs has ended: not waited for
            self._client.call("pause", wait_for_inflight_requests=True, clear_cache=False)
        await self.refresh_look()

    def action_sort(self) -> None:
        """Sort by the next thing."""
        names = list(ORDERS)
        self.order = names[(names.index(self.order) + 1) % len(names)]
        self._fill(self._rows)

    async def _call(self, method: str, *args: Any) -> Any:
        return await asyncio.to_thread(ask, self._client, method, *args)

    async def _attempt(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that needs the core; without one, there is nothing more to see."""
        try:
            await work
        except Exception as error:
            self.failure = error
            self.exit()


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """True if both are looks at the same sequence."""
    return all(one[name] == other[name] for name in ("frontend_number", "request_id", "index"))
