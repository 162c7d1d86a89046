"""Models on demand in real processes: cores start, end and are killed, and the streams of other models go on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.end_to_end import http_server
from tests.end_to_end.http_server import Server

PATIENCE = 300

# By the estimates of `inspect`, each takes 1.5 to 2 GiB: less once its packed weights are kept. Most of it are
# blocks that are never touched.
TWO_OF_THEM = "4000MiB"
MODELS = """
first: {model: demo, num-gpu-blocks-override: 30000}
second: {model: demo-vision, num-gpu-blocks-override: 30000}
third: {model: demo, num-gpu-blocks-override: 30000, max-model-len: 512}
"""
PROMPT = {"prompt": 'The "with" statement', "max_tokens": 200, "temperature": 0, "ignore_eos": True}


@pytest.fixture(autouse=True)
def starts_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request waits for the start of a core, which takes long on a busy machine."""
    monkeypatch.setattr(http_server, "PATIENCE", PATIENCE)


def completed(server: Server, model: str) -> str:
    """The text of a completion."""
    status, answer = server.request("POST", "/v1/completions", PROMPT | {"model": model})
    assert status == 200, answer
    return str(answer["choices"][0]["text"])


def streamed(server: Server, model: str) -> str:
    """The same, in the parts of a stream."""
    text = ""
    with server.begin("POST", "/v1/completions", PROMPT | {"model": model, "stream": True}) as response:
        assert response.status == 200
        for line in response:
            if line.startswith(b"data: {"):
                text += json.loads(line.removeprefix(b"data: "))["choices"][0]["text"]
    return text


def states(server: Server) -> dict[str, str]:
    """The states of the models."""
    _, answer = server.request("GET", "/v1/models")
    return {card["id"]: card["state"] for card in answer["data"]}


def cores(server: Server) -> set[int]:
    """Ids of the processes that the server has started."""
    return {child.pid for child in psutil.Process(server.process.pid).children()}


def wait_for(condition: Callable[[], Any]) -> None:
    """Wait until something is so."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_models_come_and_go_while_one_streams(tmp_path: Path) -> None:
    """Two of three fit. What is used stays, the other two take turns, and one of them is killed."""
    (tmp_path / "models.yaml").write_text(MODELS)
    server = Server(
        tmp_path, "--models", str(tmp_path / "models.yaml"), "--models-memory", TWO_OF_THEM, "--port", "0"
    )
    try:
        assert states(server) == dict.fromkeys(("first", "second", "third"), "absent") and not cores(server)
        expected = completed(server, "first")
        (first,) = cores(server)
        ended = threading.Event()

        def stream() -> int:
            count = 0
            while not ended.is_set():
                assert streamed(server, "first") == expected
                count += 1
            return count

        with ThreadPoolExecutor(1) as threads:
            streams = threads.submit(stream)
            try:
                seen = completed(server, "second")
                (second,) = cores(server) - {first}
                psutil.Process(second).kill()
                wait_for(lambda: states(server)["second"] == "absent")
                assert completed(server, "second") == seen
                assert completed(server, "third") == expected  # the same weights
                assert states(server) | {"first": ""} == {"first": "", "second": "absent", "third": "idle"}
            finally:
                ended.set()
            assert streams.result() > 0
        assert first in cores(server)
        status, answer = server.request("POST", "/v1/completions", PROMPT | {"model": "fourth"})
        assert status == 404 and "first, second, third" in answer["error"]["message"]
    finally:
        assert server.stop() == 0
    assert not psutil.pid_exists(first)


def test_an_idle_model_sleeps_and_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    """The core ends, the server stays, and the next request starts another core."""
    arguments = ("demo", "--idle-sleep", "0", "--models-memory", "1GiB", "--num-gpu-blocks-override", "1000")
    server = Server(tmp_path, *arguments, "--port", "0")
    try:
        text = completed(server, "demo")
        wait_for(lambda: states(server)["demo"] == "absent")
        assert not cores(server)
        assert completed(server, "demo") == text
    finally:
        assert server.stop() == 0
    server = Server(tmp_path, "demo", "demo-vision", "--models-memory", "300MiB", "--port", "0")
    try:
        status, answer = server.request("POST", "/v1/completions", PROMPT | {"model": "demo-vision"})
        assert status == 503 and answer["error"]["code"] == "model_does_not_fit" and not cores(server)
    finally:
        assert server.stop() == 0
