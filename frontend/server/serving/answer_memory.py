"""The memory that the pooled results of all open answers share."""

from __future__ import annotations

import asyncio

from pagewire.frontend.requests.answer_budget import AnswerTooLargeError
from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.wire.budget import MAX_WAITING_ANSWERS


class AnswerMemory:
    """The memory that the results of all open answers may take together, in bytes.

    An answer takes its part before anything is submitted, and gives it back when the client has read it. For use on
    one event loop.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = self._free = num_bytes
        self._num_waiting = 0
        # Of the answer that waits for memory; the others wait for the lock, in order.
        self._first = asyncio.Lock()
        self._freed = asyncio.Event()

    async def take(self, num_bytes: int) -> None:
        """Take memory for an answer; if too little is free, wait until all that asked before have theirs.

        Raises:
            AnswerTooLargeError: it is more than all there is. EngineBusyError: too many answers are waiting.
        """
        if num_bytes > self._num_bytes:
            raise AnswerTooLargeError(f"the answer takes {num_bytes} bytes; all may take {self._num_bytes}")
        if self._num_waiting >= MAX_WAITING_ANSWERS:
            raise EngineBusyError(f"{self._num_waiting} large answers are already waiting for memory")
        self._num_waiting += 1
        try:
            async with self._first:
                while num_bytes > self._free:
                    self._freed.clear()
                    await self._freed.wait()
                self._free -= num_bytes
        finally:
            self._num_waiting -= 1

    def give_back(self, num_bytes: int) -> None:
        """Give memory back that an answer took."""
        self._free += num_bytes
        self._freed.set()
