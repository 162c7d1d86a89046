"""Answers with pooled results wait in order for the memory that they share."""

from __future__ import annotations

import asyncio

import pytest

from pagewire.frontend.server.serving.answer_memory import AnswerMemory
from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.wire.budget import MAX_WAITING_ANSWERS


def test_memory_is_given_out_in_order_and_few_wait_for_it() -> None:
    async def scenario() -> None:
        memory, taken = AnswerMemory(100), []

        async def take(num_bytes: int) -> None:
            await memory.take(num_bytes)
            taken.append(num_bytes)

        await take(60)
        waiting = [asyncio.create_task(take(number)) for number in (50, 10, *[1] * (MAX_WAITING_ANSWERS - 2))]
        await asyncio.sleep(0)
        with pytest.raises(EngineBusyError, match="already waiting"):
            await memory.take(1)
        assert taken == [60], "10 would fit, but 50 asked before"
        waiting[0].cancel()
        await asyncio.wait(waiting[:2])
        assert taken[:2] == [60, 10]
        memory.give_back(60)
        await asyncio.gather(*waiting[1:])
        assert sum(taken) == 70 + MAX_WAITING_ANSWERS - 2

    asyncio.run(scenario())


def test_answers_of_one_tenant_that_are_not_read_hold_up_no_other() -> None:
    async def scenario() -> None:
        memory = AnswerMemory(100)
        await memory.take(90, "a")  # a first one may have all
        memory.give_back(90, "a")
        for _ in range(3):
            await memory.take(25, "a")
        more = [asyncio.create_task(memory.take(10, "a")) for _ in range(MAX_WAITING_ANSWERS)]
        await asyncio.sleep(0)
        with pytest.raises(EngineBusyError, match="already waiting"):
            await memory.take(10, "a")
        await memory.take(20, "b")
        assert not any(task.done() for task in more)
        memory.give_back(20, "b")
        memory.give_back(75, "a")
        for task in more:
            await task
            memory.give_back(10, "a")
        await memory.take(50, "d")
        late = asyncio.create_task(memory.take(60, "c"))
        await asyncio.sleep(0)
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        await memory.take(50, "e")

    asyncio.run(scenario())


def test_memory_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="takes 101 bytes; all may take 100"):
        asyncio.run(AnswerMemory(100).take(101))
