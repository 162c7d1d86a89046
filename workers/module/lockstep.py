"""Calls that take turns: each runs until it reaches a meeting point, where it waits until the others have."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class Lockstep:
    """Runs calls in threads of their own, never two at a time.

    Several passes of a module so go through a layer while its weights are in memory.
    """

    def __init__(self) -> None:
        self._waiting: deque[threading.Semaphore] = deque()

    def meet(self) -> None:
        """Wait until all other calls have reached a meeting point, or ended. Returns at once outside of `run`."""
        if self._waiting:
            turn = threading.Semaphore(0)
            self._waiting.append(turn)
            self._next()
            turn.acquire()

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """What the calls return. All of them are run to their end; then the first error is raised.

        What belongs to a thread, such as `torch.inference_mode`, a call has to set for itself.
        """
        results: dict[int, T] = {}
        errors: dict[int, Exception] = {}

        def work(index: int, turn: threading.Semaphore) -> None:
            turn.acquire()
            try:
                results[index] = calls[index]()
            except Exception as error:
                errors[index] = error
            finally:
                self._next()

        threads = []
        for index in range(len(calls)):
            self._waiting.append(turn := threading.Semaphore(0))
            threads.append(threading.Thread(target=work, args=(index, turn), name="lockstep", daemon=True))
        for thread in threads:
            thread.start()
        self._next()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[min(errors)]
        return [results[index] for index in range(len(calls))]

    def _next(self) -> None:
        """Let the call run that has waited for longest."""
        if self._waiting:
            self._waiting.popleft().release()
