"""Large texts are tokenized one at a time, beside all others; those who leave give their place up."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import weakref
from collections.abc import Callable

import pytest

from pagewire.frontend.api import off_loop
from pagewire.frontend.api.off_loop import OFF_LOOP_CHARS, OffLoopThreads, num_chars, tokenize_off_loop
from pagewire.frontend.text.prompts import TextPair
from pagewire.frontend.text.tokenizer import LARGE_TEXT
from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.tenants import current_tenant

PATIENCE = 20.0


class Work:
    """Work that ends when it is released."""

    def __init__(self) -> None:
        self.begun, self.release = threading.Event(), threading.Event()

    def __call__(self, result: str) -> str:
        self.begun.set()
        assert self.release.wait(PATIENCE)
        return result


def start(size: int, work: Callable[[str], str], result: str) -> asyncio.Task[str]:
    return asyncio.ensure_future(tokenize_off_loop(size, work, result))


def test_large_texts_take_turns_and_others_pass() -> None:
    async def run() -> None:
        first, second = Work(), Work()
        a, b = start(LARGE_TEXT, first, "a"), start(LARGE_TEXT + 1, second, "b")
        assert await asyncio.to_thread(first.begun.wait, PATIENCE)
        assert await tokenize_off_loop(LARGE_TEXT - 1, str.upper, "long") == "LONG"
        assert await tokenize_off_loop(3, str.upper, "short") == "SHORT"
        assert not second.begun.is_set()
        first.release.set()
        assert await a == "a"
        assert await asyncio.to_thread(second.begun.wait, PATIENCE)
        second.release.set()
        assert await b == "b"

    asyncio.run(run())


def test_work_in_threads_is_that_of_its_tenant() -> None:
    async def run() -> None:
        current_tenant.set("alice")
        slow = OffLoopThreads("texts", 1, 1)
        assert await slow.run(current_tenant.get) == "alice"
        current_tenant.set("bob")
        assert await slow.run(current_tenant.get) == "bob"

    asyncio.run(run())


def test_tenants_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        first, order = Work(), list[str]()
        begun = start(LARGE_TEXT, first, "first")
        assert await asyncio.to_thread(first.begun.wait, PATIENCE)
        waiting = []
        for name in ("a0", "a1", "a2", "b0"):
            current_tenant.set(name[0])
            waiting.append(start(LARGE_TEXT, lambda name: order.append(name) or name, name))
            await asyncio.sleep(0)
        with pytest.raises(EngineBusyError):
            current_tenant.set("a")
            await tokenize_off_loop(LARGE_TEXT, str.upper, "a3")
        first.release.set()
        assert await asyncio.gather(begun, *waiting) == ["first", "a0", "a1", "a2", "b0"]
        assert "b0" in order[:2]

    monkeypatch.setattr(off_loop, "_large_texts", OffLoopThreads("large texts", 1, 3))
    asyncio.run(run())


def test_many_texts_of_one_tenant_do_not_hold_up_another(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        slow, size = [Work() for _ in range(20)], OFF_LOOP_CHARS
        current_tenant.set("a")
        own = [asyncio.ensure_future(off_loop.off_loop(size, work, "a")) for work in slow]
        for work in slow[:2]:
            assert await asyncio.to_thread(work.begun.wait, PATIENCE)
        current_tenant.set("b")
        assert await off_loop.off_loop(size, str.upper, "b") == "B"
        assert not any(work.begun.is_set() for work in slow[2:])
        for work in slow:
            work.release.set()
        assert await asyncio.gather(*own) == ["a"] * 20

    monkeypatch.setattr(off_loop, "_work", OffLoopThreads("texts", 3, math.inf, num_reserved=1))
    asyncio.run(run())


def test_who_leaves_gives_the_place_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        first, never = Work(), Work()
        a = start(LARGE_TEXT, first, "a")
        assert await asyncio.to_thread(first.begun.wait, PATIENCE)
        waiting = [start(LARGE_TEXT, never, "b") for _ in range(2)]
        text = Text("c" * LARGE_TEXT)
        kept = weakref.ref(text)
        last = start(LARGE_TEXT, len, text)
        del text
        await asyncio.sleep(0)
        with pytest.raises(EngineBusyError, match="3 large texts are already waiting"):
            await tokenize_off_loop(LARGE_TEXT, str.upper, "d")
        for task in (*waiting, last, a):
            task.cancel()
        await asyncio.wait((*waiting, last, a))
        del task, last
        gc.collect()
        assert kept() is None  # though the queue has not come to it yet
        again = start(LARGE_TEXT, str.upper, "e")
        await asyncio.sleep(0)
        assert not again.done()  # what had begun counts until it ends
        first.release.set()
        assert await again == "E" and not never.begun.is_set()

    monkeypatch.setattr(off_loop, "_large_texts", OffLoopThreads("large texts", 1, 3))
    asyncio.run(run())


class Text(str):
    """A string that can be referred to weakly."""


def test_what_work_raises_reaches_its_caller() -> None:
    async def run() -> None:
        with pytest.raises(ValueError, match="invalid literal"):
            await tokenize_off_loop(LARGE_TEXT, int, "x")

    asyncio.run(run())


def test_the_characters_of_a_prompt() -> None:
    assert num_chars("abc") == num_chars({"prompt": "abc"}) == num_chars(TextPair("a", "bc")) == 3
    assert num_chars([1, 2]) == num_chars({"prompt_token_ids": [1]}) == 0
