"""Engines of models that are not used: they sleep, are woken, or start anew."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from pagewire.frontend.server.http.options import ServerOptions
from pagewire.frontend.server.shelf import loader as loader_module
from pagewire.frontend.server.shelf.loader import EngineLoader
from pagewire.frontend.server.shelf.model_shelf import MemoryEstimate
from pagewire.ipc.errors import EngineDeadError
from pagewire.ipc.options.engine_args import EngineArgs


class FakeEngine:
    """An engine with a session and a service at once: notes what it is told, and fails where a test says so."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.fails: set[str] = set()
        self.engine = self.session = self

    def call(self, method: str, *args: Any) -> Future[None]:
        self.log.append((method, *args))
        future: Future[None] = Future()
        if method in self.fails:
            future.set_exception(EngineDeadError("lost"))
        else:
            future.set_result(None)
        return future

    def shutdown(self) -> None:
        self.log.append(("shutdown",))


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    """Those that were started, in order."""
    started: list[FakeEngine] = []

    def start(args: EngineArgs, restarts: int) -> FakeEngine:
        started.append(FakeEngine())
        return started[-1]

    monkeypatch.setattr(loader_module.AsyncLLM, "from_engine_args", start)
    monkeypatch.setattr(loader_module, "Service", lambda engine, options: engine)
    return started


def loader_of(level: int | None) -> EngineLoader:
    return EngineLoader({"one": EngineArgs()}, ServerOptions(), lambda args: MemoryEstimate(1), level)


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_sleeps_and_is_woken(engines: list[FakeEngine], level: int) -> None:
    loader = loader_of(level)
    first: Any = loader.start("one")
    loader.rest("one", first)
    assert loader.start("one") is first and engines == [first]
    assert first.log == [("sleep", level), ("wake_up",)]
    loader.rest("one", first)
    loader.close()
    loader.close()
    assert first.log[-2:] == [("sleep", level), ("shutdown",)]


def test_without_a_level_it_ends(engines: list[FakeEngine]) -> None:
    loader = loader_of(None)
    first: Any = loader.start("one")
    loader.rest("one", first)
    assert first.log == [("shutdown",)] and loader.start("one") is not first


@pytest.mark.parametrize("method", ["sleep", "wake_up"])
def test_what_fails_is_replaced(engines: list[FakeEngine], method: str) -> None:
    loader = loader_of(2)
    first: Any = loader.start("one")
    first.fails = {method}
    loader.rest("one", first)
    assert loader.start("one") is engines[1]
    assert first.log[-2:] == [(method, 2)[: 2 if method == "sleep" else 1], ("shutdown",)]


def test_other_options_need_another_engine(engines: list[FakeEngine]) -> None:
    loader = loader_of(2)
    first: Any = loader.start("one")
    loader.rest("one", first)
    loader.fitted["one"] = MemoryEstimate(1, changes={"max_model_len": 16}, fitted="a shorter context")
    assert loader.start("one") is engines[1]
    assert first.log == [("sleep", 2), ("shutdown",)]


def test_a_model_that_is_removed_ends(engines: list[FakeEngine]) -> None:
    loader = loader_of(2)
    first: Any = loader.start("one")
    loader.rest("one", first)
    loader.forget("one")
    loader.forget("one")
    assert first.log == [("sleep", 2), ("shutdown",)]
    second: Any = loader.start("one")
    del loader.models["one"]
    loader.rest("one", second)
    assert second.log == [("shutdown",)]
