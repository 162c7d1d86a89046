"""Answers with pooled results wait in order for the memory that they share."""

from __future__ import annotations

import asyncio

import pytest

from pagewire.frontend.requests.answer_budget import AnswerTooLargeError
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


def test_memory_that_there_is_not_is_refused() -> None:
    with pytest.raises(AnswerTooLargeError, match="takes 101 bytes; all may take 100"):
        asyncio.run(AnswerMemory(100).take(101))
