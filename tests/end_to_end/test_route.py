"""`pagewire route` on real cores: one is killed mid-stream, one joins, one is drained; the text stays the same."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import Daemon
from tests.end_to_end.http_server import Server

ADMIN = {"X_Pagewire_Admin": "1"}
NUM_STREAMS = 8


class Stream:
    """A streamed completion with a seed, of which some pieces have been read."""

    def __init__(self, server: Server, seed: int) -> None:
        body = {
            "model": "demo",
            "prompt": f"The {seed}th statement of Python, which stands between the others, is",
            "max_tokens": 200,
            "seed": seed,
            "temperature": 0.9,
            "ignore_eos": True,
            "stream": True,
        }
        self.response: http.client.HTTPResponse = server.begin("POST", "/v1/completions", body)
        assert self.response.status == 200
        self.text = ""
        self.finish_reason: str | None = None
        self._events = self._read()

    def _read(self) -> Iterator[dict[str, Any]]:
        for line in self.response:
            if line.startswith(b"data: {"):
                event: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
                assert "error" not in event, event
                yield event["choices"][0]

    def begin(self) -> Stream:
        """Read the first pieces."""
        while len(self.text) < 20:
            self.text += next(self._events)["text"]
        return self

    def finish(self) -> str:
        """The whole text."""
        for choice in self._events:
            self.text += choice["text"]
            self.finish_reason = choice["finish_reason"] or self.finish_reason
        assert self.finish_reason == "length"
        return self.text


def texts(server: Server) -> list[str]:
    """The streams' texts, all at once."""
    streams = [Stream(server, seed) for seed in range(NUM_STREAMS)]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        return list(pool.map(Stream.finish, streams))


def cores(server: Server) -> dict[int, dict[str, Any]]:
    """The router's cores by number."""
    status, answer = server.request("GET", "/cores", **ADMIN)
    assert status == 200, answer
    return {core["core"]: core for core in answer}


def wait_for_state(server: Server, number: int, state: str | None) -> None:
    """Wait until a core is in a state; None: until it is left."""
    while (found := cores(server).get(number, {}).get("state")) != state:
        assert found in ("up", "draining", "lost", "joining"), found


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[list[Daemon]]:
    """Three cores on the demo model, started side by side."""
    addresses = [f"ipc://{tmp_path}/core{number}.sock" for number in range(3)]
    with ThreadPoolExecutor(3) as pool:
        started = list(pool.map(lambda address: Daemon(address, "--num-threads", "1"), addresses))
    yield started
    for daemon in started:
        if daemon.process.poll() is None:
            daemon.stop()
        daemon.close()


def test_streams_go_on_whatever_becomes_of_cores(daemons: list[Daemon], tmp_path: Path) -> None:
    addresses = [option for daemon in daemons[:2] for option in ("--core", daemon.address)]
    server = Server(tmp_path, *addresses, "--port", "0", "--enable-admin", command="route")
    try:
        undisturbed = texts(server)
        assert len(set(undisturbed)) == NUM_STREAMS
        assert {core["state"] for core in cores(server).values()} == {"up"}
        with server.begin("GET", "/metrics") as answer:
            metrics = answer.read().decode()
        for engine in "01":
            (number,) = re.findall(
                rf'pagewire:route_requests_total{{engine="{engine}",model_name="demo"}} (\S+)', metrics
            )
            assert float(number) > 0
            assert f'vllm:generation_tokens_total{{engine="{engine}",model_name="demo"}}' in metrics
        assert server.request("GET", "/health")[0] == 200

        streams = [Stream(server, seed).begin() for seed in range(NUM_STREAMS)]
        daemons[0].process.kill()
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            assert list(pool.map(Stream.finish, streams)) == undisturbed
        assert cores(server)[0]["state"] == "lost"

        status, added = server.request("POST", "/cores", {"address": daemons[2].address}, **ADMIN)
        assert (status, added["state"]) == (200, "up"), added
        streams = [Stream(server, seed).begin() for seed in range(NUM_STREAMS)]
        assert server.request("POST", "/cores/drain", {"core": 1, "move": True}, **ADMIN)[0] == 200
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            assert list(pool.map(Stream.finish, streams)) == undisturbed
        wait_for_state(server, 1, None)
        assert texts(server) == undisturbed  # of the core that has joined

        assert server.request("POST", "/cores/drain", {"core": 9}, **ADMIN)[0] == 400
        assert server.request("POST", "/cores", {"address": "udp://nowhere"}, **ADMIN)[0] == 400
        assert server.request("GET", "/cores")[0] == 403
    finally:
        assert server.stop() == 0
