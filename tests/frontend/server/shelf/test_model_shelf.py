"""The shelf over a loader whose starts and ends are up to the test."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import AsyncExitStack
from typing import Any

import pytest

from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.shelf.model_shelf import MemoryEstimate, ModelShelf
from pagewire.frontend.server.shelf.table import ModelState, ShelfTable

PATIENCE = 20.0


class FakeModel:
    """A model that is loaded. gone: the test may lose it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.gone: Future[Any] = Future()


class FakeLoader:
    """Every model needs 1 byte, unless `estimates` says otherwise. gates: starts of these models wait for them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.estimates: dict[str, MemoryEstimate] = {}
        self.gates: dict[str, threading.Event] = {}
        self.errors: dict[str, Exception] = {}

    def measure(self, name: str) -> MemoryEstimate:
        return self.estimates.get(name, MemoryEstimate(1))

    def start(self, name: str) -> FakeModel:
        if (gate := self.gates.get(name)) is not None:
            assert gate.wait(PATIENCE)
        if (error := self.errors.pop(name, None)) is not None:
            raise error
        self.log.append(f"start {name}")
        return FakeModel(name)

    def stop(self, loaded: FakeModel) -> None:
        loaded.gone.cancel()
        self.log.append(f"stop {loaded.name}")

    def rest(self, name: str, loaded: FakeModel) -> None:
        assert name == loaded.name
        self.stop(loaded)

    def forget(self, name: str) -> None:
        """Nothing: none sleeps."""

    def close(self) -> None:
        """Nothing: none sleeps."""

    def gone(self, loaded: FakeModel) -> Future[Any]:
        return loaded.gone


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, PATIENCE))


def shelf_of(
    loader: FakeLoader, capacity: int = 2, idle: float = math.inf, waits: bool = True
) -> ModelShelf[FakeModel]:
    return ModelShelf(ShelfTable("abc", (), capacity, idle), loader, waits)


async def once(shelf: ModelShelf[FakeModel], name: str) -> None:
    async with shelf.use(name) as model:
        assert model.name == name and shelf.state(name) is ModelState.READY


async def until(shelf: ModelShelf[FakeModel], name: str, state: ModelState) -> None:
    while shelf.state(name) is not state:
        await asyncio.sleep(0)


def test_a_model_starts_once_for_all_who_wait() -> None:
    async def main() -> None:
        loader = FakeLoader()
        gate = loader.gates["a"] = threading.Event()
        shelf = shelf_of(loader)
        uses = [asyncio.create_task(once(shelf, "a")) for _ in range(5)]
        await until(shelf, "a", ModelState.STARTING)
        gone = asyncio.create_task(once(shelf, "a"))
        await asyncio.sleep(0)
        gone.cancel()  # a client that does not wait for it
        await once(shelf, "b")  # not held up by the start of another
        assert not any(use.done() for use in uses)
        gate.set()
        await asyncio.gather(*uses)
        assert loader.log == ["start b", "start a"] and gone.cancelled()
        await shelf.close()
        assert sorted(loader.log[2:]) == ["stop a", "stop b"]
        with pytest.raises(APIError, match="shutting down"):
            await once(shelf, "a")

    run(main())


def test_the_least_recently_used_ends_and_the_used_one_stays() -> None:
    async def main() -> None:
        loader = FakeLoader()
        shelf = shelf_of(loader)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(shelf.use("a"))
            await once(shelf, "b")
            await once(shelf, "c")
            assert loader.log == ["start a", "start b", "stop b", "start c"]
            await once(shelf, "b")
            assert loader.log[4:] == ["stop c", "start b"]
        await shelf.close()

    run(main())


def test_an_idle_model_ends_by_itself_and_one_that_is_held_does_not() -> None:
    async def main() -> None:
        loader = FakeLoader()
        shelf = shelf_of(loader, idle=0.0)
        async with shelf.use("a"):
            let_go = shelf.hold("a")
        assert shelf.state("a") is ModelState.READY
        let_go(None)
        await until(shelf, "a", ModelState.ABSENT)
        assert loader.log == ["start a", "stop a"]
        await shelf.close()

    run(main())


def test_what_does_not_fit_or_start_is_said_and_tried_again() -> None:
    async def main() -> None:
        loader = FakeLoader()
        shelf = shelf_of(loader)
        loader.estimates["a"] = MemoryEstimate(0, "its weights take 99 GiB")
        loader.errors["b"] = ValueError("no such layer")
        for name, text, code in (
            ("a", "does not fit: its weights take 99 GiB", "model_does_not_fit"),
            ("b", "did not start: no such layer", "model_not_started"),
        ):
            with pytest.raises(APIError, match=text) as caught:
                await once(shelf, name)
            assert (caught.value.status, caught.value.code) == (503, code)
            assert text in shelf.problems[name] and shelf.state(name) is ModelState.ABSENT
        await once(shelf, "b")
        assert "b" not in shelf.problems and loader.log == ["start b"]
        await shelf.close()

    run(main())


def test_requests_may_be_refused_while_a_model_starts() -> None:
    async def main() -> None:
        loader = FakeLoader()
        loader.errors["a"] = ValueError("no such layer")
        shelf = shelf_of(loader, waits=False)
        for text in ("not ready", "no such layer", "not ready"):  # an error is for the next who comes
            with pytest.raises(APIError, match=text) as caught:
                await once(shelf, "a")
            assert ("retry-after" in caught.value.headers) == (text == "not ready")
            while (
                shelf.state("a") is not ModelState.IDLE and "a" not in shelf.problems and text == "not ready"
            ):
                await asyncio.sleep(0)
        await once(shelf, "a")
        await shelf.close()

    run(main())


def test_a_lost_core_is_started_again_for_the_next_request() -> None:
    async def main() -> None:
        loader = FakeLoader()
        shelf = shelf_of(loader)
        async with shelf.use("b"), shelf.use("a") as model:
            await asyncio.to_thread(model.gone.set_result, RuntimeError("killed"))
            await until(shelf, "a", ModelState.ABSENT)
            await once(shelf, "a")
            assert shelf.state("a") is ModelState.IDLE  # the use of the lost one counts no more
            assert shelf.state("b") is ModelState.READY
        assert loader.log == ["start b", "start a", "stop a", "start a"]
        assert shelf.state("a") is ModelState.IDLE
        await shelf.close()

    run(main())
