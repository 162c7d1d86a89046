"""`/health` and `/ready`: what the core says about itself, asked at most once a second."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from pagewire.frontend.api.async_llm import AsyncLLM
from pagewire.frontend.server.operate import monitoring
from pagewire.ipc.errors import EngineDeadError
from tests.frontend.conftest import FakeCore
from tests.frontend.server.client import Client


def says(core: FakeCore, alive: bool, ready: bool, reason: str) -> list[int]:
    """Let the core give this answer; returns a list that grows by one with every question."""
    asked: list[int] = []

    def answer() -> dict[str, Any]:
        asked.append(len(asked))
        return {"alive": alive, "ready": ready, "reason": reason}

    core.calls["check_health"] = answer
    return asked


@pytest.mark.parametrize(
    ("alive", "ready", "reason"),
    [(True, True, ""), (True, False, "the engine sleeps"), (False, False, "the worker is starting")],
)
def test_health_and_readiness(
    serve: Callable[..., Client], core: FakeCore, alive: bool, ready: bool, reason: str
) -> None:
    says(core, alive, ready, reason)
    client = serve(api_key=["secret"])
    for path, good in (("/health", alive), ("/ready", ready)):
        answer = client.get(path)
        assert answer.status == (200 if good else 503)
        if not good:
            assert reason in answer.error["message"]


def test_any_number_of_clients_ask_the_core_once(serve: Callable[..., Client], core: FakeCore) -> None:
    asked = says(core, True, True, "")
    client = serve()

    async def play() -> list[int]:
        calls = [client.call("GET", path) for path in ("/health", "/ready") for _ in range(20)]
        return [(await call.answer()).status for call in calls]

    assert client.run(play) == [200] * 40
    assert len(asked) <= 2


def test_a_late_answer_is_not_waited_for_while_the_last_one_is_young(
    serve: Callable[..., Client], core: FakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitoring, "HEALTH_SECONDS", 0.0)  # ask each time
    monkeypatch.setattr(monitoring, "PATIENCE_SECONDS", 0.01)
    asked = says(core, True, True, "")
    client = serve()
    assert client.get("/health").status == 200
    released = threading.Event()

    def late() -> dict[str, Any]:
        asked.append(len(asked))
        released.wait(60)
        return {"alive": False, "ready": False, "reason": "the worker is starting"}

    core.calls["check_health"] = late
    try:
        assert [client.get(path).status for path in ("/health", "/ready")] == [200, 200]
        assert len(asked) == 2  # and the second is not answered yet
        monkeypatch.setattr(
            monitoring, "KEPT_SECONDS", 0.0
        )  # the last answer is too old now: wait for the next
    finally:
        released.set()
    answer = client.get("/health")
    assert answer.status == 503 and "starting" in answer.error["message"]


def test_a_bad_answer_is_not_given_again(serve: Callable[..., Client], core: FakeCore) -> None:
    says(core, True, False, "the engine sleeps")
    client = serve()
    assert client.get("/ready").status == 503
    says(core, True, True, "")
    assert client.get("/ready").status == 200


def test_check_health_raises_the_reason(engine: AsyncLLM, core: FakeCore) -> None:
    says(core, False, False, "the worker has not answered ping for 6 s")
    with pytest.raises(EngineDeadError, match="has not answered ping"):
        asyncio.run(engine.check_health())
    assert engine.is_running
    says(core, True, False, "the engine is paused")
    asyncio.run(engine.check_health())


def test_a_core_that_does_not_say_is_not_healthy(
    engine: AsyncLLM, core: FakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewire.frontend.api.async_engine.HEALTH_SECONDS", 0.2)
    core.calls["check_health"] = lambda: core._stop.wait(2.0)
    with pytest.raises(EngineDeadError, match="has not said"):
        asyncio.run(engine.check_health())
