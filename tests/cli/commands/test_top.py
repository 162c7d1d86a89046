"""`pagewire top` on a real core: one snapshot for scripts, and the live view with a pilot at its keys."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from pagewire import AsyncLLM, SamplingParams
from pagewire.cli.commands import build_parser
from pagewire.cli.commands.top import attach
from pagewire.cli.commands.top_screen import Screen
from pagewire.cli.commands.top_snapshot import CoreSnapshot, lines, printable, span
from pagewire.cli.main import main
from tests.cli.command import pagewire, start_core

ENDLESS = SamplingParams(max_tokens=900, ignore_eos=True)


def request(name: str, number: int = 1, **values: Any) -> dict[str, Any]:
    """A request as the core reports it."""
    return {
        "frontend": "attached",
        "frontend_number": number,
        "frontend_pid": 7,
        "request_id": name,
        "index": 0,
        "phase": "decode",
        "priority": 0,
        "num_prompt_tokens": 5,
        "num_cached_tokens": 0,
        "num_output_tokens": 3,
        "max_output_tokens": 16,
        "age": 1.5,
        "seconds_since_token": 0.01,
    } | values


def status(**values: Any) -> dict[str, Any]:
    """A core's state."""
    names = (
        *("uptime_s", "running", "waiting", "num_preemptions", "num_prompt_tokens", "num_output_tokens"),
        *("num_prefix_queries", "num_prefix_hits", "worker_busy_s", "worker_idle_s"),
    )
    fixed = {
        "model": "demo",
        "num_blocks": 100,
        "num_free_blocks": 75,
        "worker_restarts": 0,
        "sleep_level": 0,
        "clients": [],
    }
    fixed |= {"num_states": 0, "num_free_states": 0}
    states = {"worker_ready": True, "paused": False, "sleeping": False}
    return dict.fromkeys(names, 0) | fixed | states | values


def test_one_snapshot_as_text_and_as_json(address: str) -> None:
    text = pagewire("top", "--attach", address, "--once", "--interval", "0.1")
    assert (text.returncode, text.stderr) == (0, "")
    assert text.stdout.startswith("demo: serving, up ") and "\ntop " in text.stdout
    result = pagewire("top", "--attach", address, "--json", "--interval", "0.1")
    snapshot = json.loads(result.stdout)
    assert snapshot["requests"] == [] and snapshot["status"]["waiting"] == 0
    assert set(snapshot["rates"]) == {
        *("prompt_tokens_per_s", "output_tokens_per_s", "worker_busy", "prefix_hit_rate", "kv_usage"),
        "state_usage",
    }


def test_rates_are_between_two_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.0, 13.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    first = CoreSnapshot.after(None, status(), [])
    grown = {"num_prompt_tokens": 50, "num_output_tokens": 20, "worker_busy_s": 1.0}
    second = CoreSnapshot.after(first, status(num_prefix_queries=8, num_prefix_hits=2, **grown), [])
    assert (second.prompt_rate, second.output_rate, second.busy, second.hit_rate) == (25, 10, 0.5, 0.25)
    third = CoreSnapshot.after(second, second.status | {"paused": True}, [])
    assert (third.output_rate, third.hit_rate, third.state) == (0, None, "paused")


def test_states_of_an_engine_and_its_workers() -> None:
    def state(**values: Any) -> str:
        return CoreSnapshot(0.0, status(**values), []).state

    assert [state(), state(worker_ready=False)] == ["serving", "worker restarting"]
    assert state(sleeping=True, sleep_level=1) == "asleep, level 1"
    assert state(sleeping=True, sleep_level=2, worker_ready=False) == "asleep, level 2"


def test_state_slots_are_shown_where_there_are_some() -> None:
    text = "KV cache 25.0% (25 of 100 blocks), prefix hits -, 0 preemptions"
    assert text in lines(CoreSnapshot(0.0, status(), []))
    snapshot = CoreSnapshot(0.0, status(num_states=8, num_free_states=6), [])
    assert text.replace("prefix", "states 25.0% (2 of 8 slots), prefix") in lines(snapshot)


def test_text_is_aligned_and_names_cannot_harm_the_terminal() -> None:
    client = {"number": 1, "name": "at\x1b[2Jtached", "pid": 7, "requests": 1}
    phases = {"waiting": 0, "prefill": 0, "decode": 1}
    requests = [request("a\x1b]0;evil\x07"), request("b" * 100, index=2, seconds_since_token=None)]
    text = list(
        lines(CoreSnapshot(0.0, status(model="d\x9bemo", clients=[client | {"phases": phases}]), requests))
    )
    assert all(line.isprintable() for line in text)
    heads = text.index(next(line for line in text if "REQUEST" in line))
    assert text[heads + 1].index("decode") == text[heads + 2].index("decode") == text[heads].index("PHASE")
    assert "… [2]" in text[heads + 2] and text[heads + 2].endswith(" -")
    assert printable("ü") == "ü"


def test_spans() -> None:
    spans = [0.0, 9.994, 10, 59.9, 60, 3599, 3600, 86399, 86400, 1e6]
    assert [span(s) for s in spans] == [
        *("0.00s", "9.99s", "10s", "59s", "1m00s", "59m59s", "1h00m", "23h59m", "1d00h", "11d13h"),
    ]


# ------------------------------------------------------------ the live view


@asynccontextmanager
async def watching(address: str, width: int = 140) -> AsyncIterator[tuple[Screen, Pilot[None]]]:
    """The live view of a core, with a pilot."""
    client = attach(build_parser().parse_args(["top", "--attach", address]))
    screen = Screen(client, 0.05)
    try:
        async with screen.run_test(size=(width, 30)) as pilot:
            yield screen, pilot
    finally:
        client.close()


async def until(pilot: Pilot[None], condition: Callable[[], object]) -> None:
    """Let the view go on until something is so."""
    while not condition():
        await pilot.pause()


def shown(screen: Screen) -> list[str]:
    """Request ids, from the top."""
    table = screen.query_one(DataTable)
    return [str(table.get_row_at(row)[2]) for row in range(table.row_count)]


def test_requests_of_others_are_seen_and_ended(address: str) -> None:
    async def consume(engine: AsyncLLM, name: str, params: SamplingParams) -> list[str | None]:
        async with aclosing(engine.generate("with", params, name)) as outputs:
            last = [output async for output in outputs][-1]
        return [output.finish_reason for output in last.outputs]

    async def go() -> None:
        async with AsyncLLM.attach(address) as engine, watching(address) as (screen, pilot):
            await until(pilot, lambda: screen.snapshot is not None)
            # Held back by a pause, nothing ends before its time.
            await pilot.press("p")
            await until(pilot, lambda: screen.snapshot is not None and screen.snapshot.status["paused"])
            first = asyncio.create_task(consume(engine, "first", ENDLESS.clone()))
            await until(pilot, lambda: shown(screen) == ["first"])
            second = asyncio.create_task(
                consume(engine, "second\x1b[x]", SamplingParams(n=2, max_tokens=900))
            )
            await until(pilot, lambda: len(shown(screen)) == 3)
            assert shown(screen) == ["first", "second\\x1b[x]", "second\\x1b[x] [1]"]

            def summary() -> str:
                return str(screen.query_one("#summary", Static).render())

            await until(pilot, lambda: "demo: paused" in summary() and "3 waiting" in summary())

            await pilot.press("down")
            assert screen.selected is not None and screen.selected["request_id"] == "second\x1b[x]"
            await pilot.press("a")
            assert await second == ["abort", "abort"]
            await until(pilot, lambda: len(screen._notifications))
            assert [said.message for said in screen._notifications] == ["second\\x1b[x]: 2 sequences ended"]
            await until(pilot, lambda: shown(screen) == ["first"])

            await pilot.press("p")
            await until(pilot, lambda: screen.snapshot is not None and not screen.snapshot.status["paused"])
            assert await first == ["length"]
            await until(pilot, lambda: shown(screen) == [])
            await pilot.press("a")  # there is nothing to end
            await pilot.press("q")
        assert screen.failure is None

    asyncio.run(go())


def test_the_cursor_stays_on_its_request_whatever_the_order(address: str) -> None:
    async def go() -> None:
        async with watching(address) as (screen, pilot):
            await until(pilot, lambda: screen.snapshot is not None)
            screen.workers.cancel_all()  # from here on, only the test shows snapshots
            old = request("old", age=9.0, num_output_tokens=1, seconds_since_token=5.0)
            new = request("new", age=1.0, num_output_tokens=9, phase="prefill", seconds_since_token=None)
            other = request("other", 2, age=5.0, frontend="another", phase="waiting", seconds_since_token=7.0)
            screen.show(CoreSnapshot(0.0, status(), [new, other, old]))
            assert shown(screen) == ["old", "other", "new"]
            await pilot.press("down")
            orders = {"frontend": ["other", "old", "new"], "phase": ["new", "old", "other"]}
            orders |= {"output": ["new", "other", "old"], "since token": ["other", "old", "new"]}
            for name, expected in orders.items():
                await pilot.press("s")
                assert (screen.order, shown(screen)) == (name, expected)
                assert screen.selected == other
            await pilot.press("s")
            assert screen.order == "age"
            screen.show(CoreSnapshot(0.0, status(), [new]))
            assert screen.selected == new

    asyncio.run(go())


def test_a_core_that_dies_ends_the_view_with_the_cause(tmp_path: Any) -> None:
    address = f"ipc://{tmp_path}/core.sock"
    core = start_core(address, "--kv-cache-memory-bytes", "16777216")

    async def go() -> Exception | None:
        async with watching(address) as (screen, pilot):
            await until(pilot, lambda: screen.snapshot is not None)
            core.kill()
            await until(pilot, lambda: screen.failure is not None)
        return screen.failure

    failure = asyncio.run(go())
    core.communicate(timeout=60)
    assert "closed the connection" in str(failure)


# ------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("", 2, "the live view needs a terminal; use --once or --json"),
        ("--once --interval 0", 2, "must be 0.1 or more"),
        ("--once --curve-secret x", 2, "both --curve-secret and --curve-server"),
        ("--once --attach nonsense", 1, "'nonsense' must begin with ipc:// or tcp://"),
    ],
)
def test_mistakes(arguments: str, code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = main(["top", *arguments.split()])
    except SystemExit as end:
        status = end.code
    out, err = capsys.readouterr()
    assert (status, out) == (code, "") and message in err and err.count("\n") == 1


def test_without_textual_the_command_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "textual", None)
    assert main(["top"]) == 2
    assert "pip install 'pagewire[top]'; or use --once" in capsys.readouterr().err


@pytest.mark.parametrize("width", [80, 140])
def test_no_column_is_cut(address: str, width: int) -> None:
    async def go() -> None:
        async with watching(address, width) as (screen, pilot):
            await until(pilot, lambda: screen.snapshot is not None)
            screen.workers.cancel_all()
            await pilot.pause()  # a snapshot may have been on its way
            screen._past.clear()
            old = request(
                "chatcmpl-" + "0123456789abcdef" * 2, num_prompt_tokens=123456, max_output_tokens=1000
            )
            screen.show(CoreSnapshot(0.0, status(), [old], output_rate=12.0))
            screen.show(CoreSnapshot(5.0, status(), [old] * 40, output_rate=8.0))
            await pilot.pause()
            table = screen.query_one(DataTable)
            assert table.virtual_size.width <= table.size.width, "nothing is beyond the edge"
            names = [str(column.label) for column in table.columns.values()]
            assert ("PID" in names) == (width == 140) and {"REQUEST", "OUTPUT", "SINCE TOKEN"} <= set(names)
            (name,) = {str(table.get_row_at(row)[names.index("REQUEST")]) for row in range(40)}
            assert name == old["request_id"] or (
                width == 80 and name.endswith("…") and name.startswith("chatcmpl")
            )
            label = str(screen.query_one("#speed-label", Static).render())
            assert label == "tokens/s generated: 8, at most 12 of the last 5 s"
            assert str(screen.query_one("#usage-label", Static).render()).startswith(
                "KV cache: 25.0%, at most"
            )

    asyncio.run(go())
