"""The siege itself: its attacks can be repeated, and it fails if anything is wrong."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import zmq
import zmq.asyncio
import zmq.auth
from aiohttp import web

from pagewire.engine_core.clients.access import read_certificates, read_rights
from pagewire.ipc.wire.calls import Right
from tests.benchmarks.loading import load_from

load = partial(load_from, "siege")
attack, attackers, bodies, client = map(load, ("attack", "attackers", "bodies", "client"))
fortress, report, values, watcher = map(load, ("fortress", "report", "values", "watcher"))
attack_frames, main = load("frames"), load("__main__")


# ------------------------------------------------------------ attacks


class Sink:
    """A peer that takes all bytes, and answers each connection or message with little."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.reached = asyncio.Event()

    async def http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take what comes until the client pauses, and answer."""
        data = b""
        try:
            while piece := await asyncio.wait_for(reader.read(1 << 16), 0.05):
                data += piece
        except (asyncio.TimeoutError, OSError):
            pass
        self.received.append(data)
        self.reached.set()
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async def core(self, socket: zmq.asyncio.Socket) -> None:
        """Take every message."""
        while True:
            identity, *frames = await socket.recv_multipart()
            self.received += frames
            self.reached.set()
            await socket.send_multipart([identity, b"\x81\xa4type\xa4pong"])


async def received(name: str, numbers: list[int], folder: Path) -> tuple[list[bytes], set[str]]:
    """The beginning of all that a peer receives in the attacks with these numbers, and what came of them."""
    sink, address = Sink(), f"ipc://{folder}/core.sock"
    # In the attackers' own context: to end another one may wait for what a sender has left behind.
    router = attack_frames.context().socket(zmq.ROUTER)
    router.bind(address)
    server = await asyncio.start_server(sink.http, "127.0.0.1", 0)
    core = asyncio.create_task(sink.core(router))
    target = attack.Target("127.0.0.1", server.sockets[0].getsockname()[1], "key", "demo", address)
    statuses = set()
    for number in numbers:
        rng = Random(f"7/{name}/{number}")
        statuses.add(await attackers.ATTACKERS[name].attack(target, rng))
    await asyncio.wait_for(sink.reached.wait(), 20)  # what is sent last may come after the sender has left
    core.cancel()
    await asyncio.wait((core,))
    server.close()
    router.close(0)
    port = str(target.port).encode()
    return [data.replace(b"127.0.0.1:" + port, b"127.0.0.1:PORT")[:1000] for data in sink.received], statuses


@pytest.mark.parametrize(
    "name",
    [
        *("bodies", "fields", "embeddings", "requests", "greedy", "chats", "grammars", "templates"),
        *("many-grammars", "slow-grammars"),
    ],
)
def test_an_attack_is_repeated_by_its_number(name: str, tmp_path: Path) -> None:
    numbers = list(range(6))
    first, statuses = asyncio.run(received(name, numbers, tmp_path))
    again, _ = asyncio.run(received(name, numbers, tmp_path))
    assert first == again and len(set(first)) > 3
    assert statuses <= {"400", "half", "closed"}


@pytest.mark.parametrize("name", ["messages", "submits", "shapes", "hellos", "integers"])
def test_attacks_on_a_core_reach_it(name: str, tmp_path: Path) -> None:
    frames, statuses = asyncio.run(received(name, [0], tmp_path))
    assert frames
    assert statuses <= {"pong", "left", "silent"}


def test_every_attacker_ends_by_itself(tmp_path: Path) -> None:
    """Even where nobody answers as a server would; and none is broken."""
    target = {
        "host": "127.0.0.1",
        "port": 9,
        "key": "",
        "model": "",
        "address": f"ipc://{tmp_path}/core.sock",
    }
    running = attackers.Attacking(attack.Target(**target), seed=0, end=float("inf"))
    written: list[str] = []
    running._write = lambda name, number, **more: written.append(more.get("status", ""))
    names = [
        name
        for name in attackers.ATTACKERS
        if name not in ("flood", "messages", "submits", "shapes", "hellos", "integers")
    ]
    asyncio.run(running.run({name: [0] for name in names}))
    assert len(written) == 2 * len(names)
    assert {status.partition(" (")[0] for status in written} <= {"", "no connection", "refused"}


def test_attackers_have_certificates_with_and_without_rights(tmp_path: Path) -> None:
    fortress.certificates(tmp_path)
    assert set(read_certificates(tmp_path / "clients").values()) == {"server", "attacker", "reader"}
    rights = read_rights(tmp_path / "rights.yaml")
    assert rights["curve:reader"] == {Right.READ} and rights["curve:server"] == set(Right)
    with attack_frames.dealer(
        attack.Target("", 0, "", "", "tcp://127.0.0.1:9", str(tmp_path)), Random(1)
    ) as me:
        assert me.mechanism == zmq.CURVE


# ------------------------------------------------------------ the verdict


class Processes:
    """Processes under siege that are asleep. Nothing listens at their address."""

    url = "http://127.0.0.1:9"

    def __init__(self) -> None:
        self.started = {role: subprocess.Popen(["sleep", "60"]) for role in ("server", "core", "worker")}
        self.pids = {role: process.pid for role, process in self.started.items()}
        self.held = 100.0

    def roles(self) -> dict[str, list[int]]:
        """Those that run."""
        return {role: [process.pid] for role, process in self.started.items() if process.poll() is None}

    def memory(self) -> dict[str, float]:
        """In MiB."""
        return dict.fromkeys(self.roles(), self.held)

    def stop(self) -> list[str]:
        """End all; nothing goes wrong."""
        for role in self.started:
            self.kill(role)
        return []

    def kill(self, role: str) -> None:
        """End one."""
        self.started[role].kill()
        self.started[role].wait()


def test_a_fork_that_shares_the_memory_of_its_parent_counts_once() -> None:
    made = object.__new__(fortress.Fortress)
    made.roles = lambda: {"core": [os.getpid()] * 2, fortress.JOB: [os.getpid()] * 2}
    sizes = made.memory()
    assert sizes[fortress.JOB] > 1.9 * sizes["core"] > 0


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Three of them."""
    made = Processes()
    yield made
    made.stop()


def siege_of(processes: Processes) -> Any:
    """The report of a siege in which the client got one answer in time."""
    asked = client.Client("http://127.0.0.1:9", waits=[client.Wait("token", 0.0, 0.1)])
    return report.Report({}, report.AttackLog(), asked, watcher.Watcher(processes), watcher.Lag())


def test_a_siege_without_harm_is_withstood(processes: Processes) -> None:
    found = siege_of(processes)
    found.log.add({"name": "bodies", "number": 1, "at": 0.5})
    found.log.add({"name": "bodies", "number": 1, "at": 0.6, "status": "400", "took": 0.1})
    assert found.failures == [] and "withstood" in found.text()
    assert found.as_dict()["attacks"] == {"bodies": {"400": 1}}


def test_what_a_siege_fails_by(processes: Processes) -> None:
    wait = client.Wait
    for late, kept in ((wait("token", 0.0, 2.1), True), (wait("schema", 0.0, 2.1), False)):
        found = siege_of(processes)
        found.client.waits.append(late)
        assert bool(found.failures) == kept
    found.client.waits.append(wait("token", 0.0, 2.1, restart=True))
    assert not found.failures
    found.client.waits.append(wait("token", 0.0, 60.1, restart=True))
    assert "60.1 s for token" in found.failures[0]
    for status in ("500", attack.UNANSWERED, f"{attackers.BROKEN}: x"):
        found = siege_of(processes)
        found.log.add({"name": "bodies", "number": 1, "at": 0.6, "status": status, "took": 0.1})
        assert "bodies/1" in found.failures[0]
    found = siege_of(processes)
    found.client.waits.clear()
    assert found.failures == ["the client got no answer at all"]


def test_the_client_is_not_late_by_what_its_own_process_was(processes: Processes) -> None:
    found = siege_of(processes)
    found.client.waits.append(client.Wait("token", 10.0, 2.5))
    for due, woke in ((9.0, 9.9), (10.2, 10.24), (12.4, 13.0)):
        found.lag.note(due, woke)
    assert found.lag.within(10.0, 12.5) == pytest.approx(0.1) and found.lag.longest == pytest.approx(0.9)
    assert "2.5 s for token" in found.failures[0]
    found.lag.note(11.0, 11.45)
    assert not found.failures


def test_what_fails_of_a_siege_itself_is_named(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails, before the attacks and in their midst, and writes its report."""

    async def nothing(*args: object) -> None:
        pass

    async def keeps_asking(made: Any, http: object) -> None:
        asked.append(1)
        raise KeyError("choices")

    async def loses_its_way(made: Any) -> None:
        raise KeyError("model_name")

    options = main.arguments(["--minutes", "0.02", "--attackers", "strangers", "--target", "own"])
    found = asyncio.run(main.Siege(processes, options).run())
    assert any("before the attacks: ClientConnectorError" in text for text in found.failures)
    asked: list[int] = []
    processes = Processes()
    processes.port, processes.address, processes.keys = 9, None, ""  # type: ignore[attr-defined]
    for name, part in (("learn", nothing), ("ask_all", keeps_asking), ("follow_restarts", loses_its_way)):
        monkeypatch.setattr(main.Client, name, part)
    monkeypatch.setattr(main.Siege, "_warm_up", nothing)
    found = asyncio.run(main.Siege(processes, options).run())
    text = found.text()
    assert asked and "FAILED: the client got" in text and "no answer: KeyError('choices')" in text
    assert (
        "FAILED: the siege itself failed: client's look for restarts: KeyError('model_name') (test_siege.py:"
        in text
    )


def test_a_siege_that_cannot_begin_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def besieged(*args: object) -> None:
        raise RuntimeError("the core did not start: too little memory")

    monkeypatch.setattr(main, "besieged", besieged)
    monkeypatch.setattr(sys, "argv", ["siege"])
    assert main.main() == 1
    assert "FAILED" in (text := capsys.readouterr().out) and "too little memory" in text


@pytest.mark.parametrize("role", ["server", "core"])
def test_a_death_is_seen(processes: Processes, role: str) -> None:
    found = siege_of(processes)
    processes.kill(role)
    asyncio.run(asyncio.wait_for(found.watcher.watch(), 20))
    assert f"the {role} (pid {processes.pids[role]}) has died" in found.failures


def test_growth_is_seen_and_too_much_of_it_calls_the_siege_off(processes: Processes) -> None:
    found = siege_of(processes)
    processes.held = 100.0 + watcher.MEMORY_LIMIT_MIB
    asyncio.run(asyncio.wait_for(found.watcher.watch(), 20))
    assert "called off" in found.failures[0] and "memory grew by 9000 MiB" in found.failures[1]


def test_an_attack_has_the_seconds_in_which_its_process_runs() -> None:
    """What is there after the loop stood still for longer than the limit is in time; what never comes is not."""

    async def late() -> str:
        loop = asyncio.get_running_loop()
        loop.call_later(0.1, time.sleep, 2.5)  # the process stands still
        return await attack.awaited(asyncio.sleep(1.5, "done"), 2)

    assert asyncio.run(late()) == "done"
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(attack.awaited(asyncio.sleep(60), 1))


def test_time_in_wait_for_a_processor_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attack, "queued_seconds", time.monotonic)  # it waits all the time
    assert asyncio.run(attack.awaited(asyncio.sleep(0.2, "done"), 0.05)) == "done"


def test_pictures_may_be_kept(processes: Processes) -> None:
    found = siege_of(processes)
    processes.held = 250.0
    found.watcher._look()
    assert any("memory grew" in failure for failure in found.failures)
    found.options = found.options | {"pictures": "demo-vision"}
    assert not any("memory grew" in failure for failure in found.failures)


def test_attackers_that_stand_still_are_seen(processes: Processes) -> None:
    found, times = siege_of(processes), iter((100.0, 101.0, 109.0, 129.0, 141.0))
    found.log.clock = lambda: next(times)
    for queued in (0.5, 0.5, 0.5, 14.5):  # the last time they waited for a processor
        found.log.add({"queued": queued})
    assert not found.failures and not found.log.statuses
    found.log.note_time()
    (failure,) = found.failures
    assert "stood still for 12.0 s" in failure and found.as_dict()["attackers_silent_s"] == 12.0


def test_processor_time_of_the_siege_is_not_that_of_others() -> None:
    usage = watcher.Usage()
    assert subprocess.run([sys.executable, "-c", "sum(range(10_000_000))"]).returncode == 0
    busy, own = usage.since_begin()
    assert own > 0.01 and usage.others(busy=own, own=own, seconds=10.0) == 0.0
    assert usage.others(busy=own + 5.0, own=own, seconds=10.0) == pytest.approx(0.5 / usage.num_processors)
    assert busy > 0


def test_bodies_have_a_size_that_can_be_sent() -> None:
    for number in range(20):
        rng = Random(number)
        drawn = bodies.conversation(rng, values.Values(rng, wild=0.0, large=1.0))
        assert sum(len(str(message)) for message in drawn) < 8 * bodies.MAX_BYTES


def test_the_attacks_before_a_failure_are_kept() -> None:
    log = report.AttackLog()
    for number in range(100):
        log.add({"name": "idle" if number == 3 else "bodies", "number": number, "at": number})
        if number != 3:
            log.add({"name": "bodies", "number": number, "at": number, "status": "200", "took": 0.0})
    log.note_failure()
    assert log.at_failure[0] == "idle/3" and log.at_failure[-1] == "bodies/99"
    assert attackers.listed(",".join(log.at_failure))["idle"] == [3]


# ------------------------------------------------------------ the client


async def asked(answer: Callable[[web.Request], Awaitable[web.StreamResponse]], made: Any) -> None:
    """Let a client ask a server twice."""
    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    made.url = f"http://127.0.0.1:{port}"
    async with made.connection() as http:
        for _ in range(2):
            tokens = await made._stream(http, "/v1/completions", client.COMPLETION)
            made._same("completion", tokens)
    await runner.cleanup()


def test_the_client_notices_other_tokens() -> None:
    texts = iter(([5, 6], [5, 7]))

    async def answer(request: web.Request) -> web.Response:
        tokens = next(texts)
        lines = [f'data: {{"choices": [{{"token_ids": [{token}]}}]}}' for token in tokens]
        return web.Response(text="\n\n".join([*lines, "data: [DONE]", ""]))

    made = client.Client("")
    asyncio.run(asked(answer, made))
    assert made.wrong == ["completion: [5, 7] and not [5, 6]"]
    assert [wait.kind for wait in made.waits] == ["first token", "token", "token"] * 2


def test_a_wait_without_an_end_counts() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"token_ids": [5]}]}\n\n')
        begun.set()
        await asyncio.get_running_loop().create_future()
        return response

    begun = asyncio.Event()

    async def cut() -> Any:
        made = client.Client("")
        task = asyncio.create_task(asked(answer, made))
        await begun.wait()
        while [wait.kind for wait in made.waits] != ["first token"]:
            await asyncio.sleep(0)
        (wait,) = made.open_wait()
        made.end()
        task.cancel()
        return wait.kind, [wait.kind for wait in made.waits], made.open_wait()

    assert asyncio.run(cut()) == ("unfinished", ["first token", "unfinished"], [])


def test_a_restart_excuses_what_begins_before_the_next_worker_is_ready() -> None:
    """An answer that comes late from the killed worker is not one of the next worker."""
    # Before the kill is noticed, no answer, none from the core, and the next worker starts.
    states = iter([(0, 1), None, (), (1, 0), (1, 1)])

    async def metrics(request: web.Request) -> web.Response:
        state = next(states)
        made._waited("token", made._begin())
        if state is None:
            return web.Response(status=503)
        of_core = zip(("worker_restarts_total", "workers_ready"), state, strict=False)
        samples = [
            f'pagewire:{name}{{model_name="{model}"}} {value}\n'
            for name, value in of_core
            for model, value in (("demo", value), ("embedder", 0))
        ]
        of_server = 'pagewire:frontend_connections{state="open"} 1\n'
        return web.Response(text="".join([of_server, *samples]))

    async def restarted() -> None:
        app = web.Application()
        app.router.add_get("/metrics", metrics)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        made.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
        made._waited("token", made._begin())
        made.worker_killed()
        begin = made._begin()
        following = asyncio.create_task(made.follow_restarts())
        while made._served_since is None and not following.done():
            await asyncio.sleep(0)
        assert following.cancel(), following.exception()
        await runner.cleanup()
        made._waited("first token", begin)
        made._waited("token", made._begin())

    made = client.Client("")
    asyncio.run(restarted())
    assert [wait.restart for wait in made.waits] == [False, *[True] * 5, True, False]
