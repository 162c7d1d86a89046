"""The memory that the pooled results of all open answers share."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.shares import num_before, share_of
from pagewire.ipc.wire.budget import MAX_WAITING_ANSWERS

TENANT_QUARTERS = 3  # of what the others leave, that a tenant may take for more than one answer


@dataclass(frozen=True, eq=False)
class WaitingAnswer:
    """An answer that waits for memory. granted: is done once it has it."""

    tenant: str
    num_bytes: int
    granted: asyncio.Future[None]


class AnswerMemory:
    """The memory that the results of all open answers may take together, in bytes.

    An answer takes its part before anything is submitted, and gives it back when the client has read it. A tenant,
    who has a key, holds up no other by answers that are not read. For use on one event loop.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = self._free = num_bytes
        self._held: Counter[str] = Counter()  # by tenant
        self._waiting: list[WaitingAnswer] = []

    async def take(self, num_bytes: int, tenant: str = "") -> None:
        """Take memory for an answer; if too little is free, wait until all that asked before have theirs.

        An answer of a tenant that has more than its share is not waited for.

        Raises:
            ValueError: it is more than all there is. EngineBusyError: too many answers are waiting.
        """
        if num_bytes > self._num_bytes:
            raise ValueError(f"the answer takes {num_bytes} bytes; all may take {self._num_bytes}")
        numbers = Counter(answer.tenant for answer in self._waiting)
        if num_before(numbers[tenant], len({*numbers, tenant}), len(self._waiting)) >= MAX_WAITING_ANSWERS:
            raise EngineBusyError(f"{len(self._waiting)} large answers are already waiting for memory")
        answer = WaitingAnswer(tenant, num_bytes, asyncio.get_running_loop().create_future())
        self._waiting.append(answer)
        self._grant()
        try:
            await answer.granted
        except asyncio.CancelledError:
            if answer.granted.cancelled():
                self._waiting.remove(answer)
                self._grant()
            else:  # it got its memory at the same time
                self.give_back(num_bytes, tenant)
            raise

    def give_back(self, num_bytes: int, tenant: str = "") -> None:
        """Give memory back that an answer took."""
        self._add(tenant, -num_bytes)
        self._grant()

    def _grant(self) -> None:
        """Give memory to those that wait, in order, as far as it reaches."""
        for answer in list(self._waiting):
            own = self._held[answer.tenant]
            share = share_of(self._num_bytes, self._num_bytes - self._free, own, TENANT_QUARTERS)
            if answer.granted.done() or (answer.tenant and own and own + answer.num_bytes > share):
                continue
            if answer.num_bytes > self._free:
                return
            self._waiting.remove(answer)
            self._add(answer.tenant, answer.num_bytes)
            answer.granted.set_result(None)

    def _add(self, tenant: str, num_bytes: int) -> None:
        self._free -= num_bytes
        self._held[tenant] += num_bytes
        if not self._held[tenant]:
            del self._held[tenant]
