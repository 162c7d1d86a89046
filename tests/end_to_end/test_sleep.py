"""A server that sleeps: which processes are left, what becomes of requests, and what if a worker is killed."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.end_to_end.http_server import Server
from tests.end_to_end.test_on_demand import PROMPT, completed, streamed, wait_for

ADMIN = {"X_Pagewire_Admin": "1"}
DRAWN = PROMPT | {"temperature": 1.0, "seed": 7, "max_tokens": 50}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("sleep"), "demo", "--enable-admin", "--port", "0")
    yield server
    assert server.stop() == 0


def order(server: Server, path: str) -> Any:
    """The answer of a call that succeeds."""
    status, answer = server.request("POST", path, **ADMIN)
    assert status == 200, answer
    return answer


def tokens(server: Server) -> tuple[str, str]:
    """A greedy and a drawn completion."""
    status, answer = server.request("POST", "/v1/completions", DRAWN)
    assert status == 200, answer
    return completed(server, "demo"), str(answer["choices"][0]["text"])


def core(server: Server) -> psutil.Process:
    """The engine core."""
    (process,) = psutil.Process(server.process.pid).children()
    return process


def workers(server: Server) -> list[psutil.Process]:
    """The workers that the core has started, but for one that has just ended."""

    def works(child: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess):  # a zombie is none, either
            return "pagewire.workers.process.main" in child.cmdline()
        return False

    return [child for child in core(server).children() if works(child)]


def metric(server: Server, name: str) -> float:
    """The value of a metric without labels of its own."""
    with server.begin("GET", "/metrics") as response:
        lines = response.read().decode().splitlines()
    (line,) = [line for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
    return float(line.rpartition(" ")[2])


@pytest.mark.parametrize(
    ("level", "wakes"),
    [
        (1, ["/wake_up"]),
        (1, ["/wake_up?tags=weights", "/wake_up?tags=kv_cache"]),
        (1, ["/wake_up?tags=kv_cache", "/wake_up?tags=weights"]),
        (2, ["/wake_up"]),
        (2, ["/wake_up?tags=weights", "/wake_up?tags=kv_cache"]),
        (2, ["/wake_up?tags=kv_cache", "/wake_up?tags=weights"]),
    ],
)
def test_what_comes_meanwhile_waits_and_is_as_ever(server: Server, level: int, wakes: list[str]) -> None:
    before = tokens(server)
    engine = core(server)
    order(server, f"/sleep?level={level}")
    wait_for(lambda: len(workers(server)) == 2 - level)
    assert server.request("GET", "/is_sleeping", **ADMIN) == (200, {"is_sleeping": True})
    assert server.request("GET", "/health")[0] == 200 and server.request("GET", "/ready")[0] == 503
    assert metric(server, "pagewire:sleep_level") == level
    with ThreadPoolExecutor(2) as threads:
        stream, completion = (threads.submit(work, server, "demo") for work in (streamed, completed))
        wait_for(lambda: metric(server, "vllm:num_requests_waiting") == 2)
        for path in wakes[:-1]:
            order(server, path)
        assert order(server, wakes[-1]) == {"is_sleeping": False}
        assert stream.result() == completion.result() == before[0]
    assert tokens(server) == before and core(server) == engine and len(workers(server)) == 1
    assert metric(server, "pagewire:worker_restarts_total") == 0


def test_a_worker_that_is_killed_while_it_wakes_leaves_the_engine_asleep(server: Server) -> None:
    before = tokens(server)
    order(server, "/sleep?level=2")
    wait_for(lambda: not workers(server))
    with ThreadPoolExecutor(1) as threads:
        waking = threads.submit(server.request, "POST", "/wake_up", **ADMIN)
        wait_for(lambda: workers(server))
        workers(server)[0].send_signal(signal.SIGKILL)
        status, answer = waking.result()
    assert status == 500 and "SIGKILL" in json.dumps(answer)
    assert metric(server, "pagewire:sleep_level") == 2 and not workers(server)
    order(server, "/wake_up")
    assert tokens(server) == before


def test_requests_are_refused_by_option(tmp_path: Path) -> None:
    options = ("demo", "--enable-admin", "--while-asleep", "refuse", "--port", "0")
    server = Server(tmp_path, *options)
    try:
        before = tokens(server)
        for level in (1, 2):
            order(server, f"/sleep?level={level}")
            for stream in (False, True):
                with server.begin("POST", "/v1/completions", PROMPT | {"stream": stream}) as response:
                    assert response.status == 503 and int(response.headers["retry-after"]) > 0
                    assert json.loads(response.read())["error"]["code"] == "engine_asleep"
            order(server, "/wake_up")
            assert tokens(server) == before
    finally:
        assert server.stop() == 0


@pytest.mark.parametrize("level", [1, 2])
def test_a_model_on_demand_sleeps_and_is_woken(tmp_path: Path, level: int) -> None:
    """The core stays, and the processes that are left end with the server."""
    arguments = ("demo", "--idle-sleep", "0", "--idle-sleep-level", str(level), "--max-model-len", "512")
    server = Server(tmp_path, *arguments, "--models-memory", "2GiB", "--port", "0")
    try:
        text = completed(server, "demo")
        engine = core(server)
        for _ in range(2):
            wait_for(lambda: len(workers(server)) == 2 - level and asleep(server))
            assert completed(server, "demo") == text and core(server) == engine
        engine.kill()
        wait_for(lambda: not psutil.Process(server.process.pid).children())
        assert completed(server, "demo") == text and core(server) != engine
        wait_for(lambda: asleep(server))
        engine = core(server)
    finally:
        assert server.stop() == 0
    wait_for(lambda: not engine.is_running())


def asleep(server: Server) -> bool:
    """True if no model is loaded."""
    _, answer = server.request("GET", "/v1/models")
    return all(card["state"] == "absent" for card in answer["data"])
