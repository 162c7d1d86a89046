"""Runs work in pieces beside the steps: short pieces between two steps, long ones in a thread.

A thread that runs Python beside the steps takes the interpreter whenever a step lets it go, which a step does in
each operation of PyTorch, and keeps it for up to 5 ms (`sys.getswitchinterval`), or longer where it is then not
scheduled. So whatever is Python, or works on little memory, runs in the thread of the steps, for a tenth of their
time; the other thread has only what waits for a disk or works on much memory, which does not hold the interpreter.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from enum import Enum
from typing import TypeAlias, TypeVar

T = TypeVar("T")

LARGE_BYTES = 1 << 18  # work on more memory at a time is a long piece
SHARE = 0.1  # of the time of steps that short pieces take
LEAST_SECONDS, MOST_SECONDS = 0.001, 0.005  # of them between two steps, whatever the share is
NICENESS = 5  # of the thread: where processors are short, steps come first


class Piece(Enum):
    """How long a piece of work may take."""

    SHORT = "short"
    """Well under a millisecond, with nothing to wait for."""
    LONG = "long"
    """It waits for a disk, or works on much memory."""


Pieces: TypeAlias = Generator[Piece, None, T]
"""Work that yields, before each of its pieces, how long this one may take; it gives a T in the end."""


class PieceRunner:
    """Runs work that yields, before each of its pieces, how long this one may take.

    All methods are for the thread of the steps, in which short pieces run.
    wake: called by the other thread when `advance` has something to do again. clock: in seconds.
    """

    def __init__(self, wake: Callable[[], None], clock: Callable[[], float] = time.perf_counter) -> None:
        self._wake, self._clock = wake, clock
        self._short: deque[Iterator[Piece]] = deque()  # whose next piece is a short one, the oldest first
        self._long: queue.SimpleQueue[Iterator[Piece]] = queue.SimpleQueue()
        self._back: queue.SimpleQueue[Iterator[Piece]] = queue.SimpleQueue()  # from the thread
        self._thread: threading.Thread | None = None
        self._ended = clock()  # the last call of `advance`

    def start(self, work: Iterator[Piece]) -> None:
        """Take work, which raises nothing, and whose first yield comes at once."""
        self._sort(work, next(work, None))

    def advance(self) -> bool:
        """Run short pieces for a share of the time since the last call; returns True if there are more of them."""
        begin = self._clock()
        until = begin + min(max(SHARE * (begin - self._ended), LEAST_SECONDS), MOST_SECONDS)
        while not self._back.empty():
            self._short.append(self._back.get())
        while self._short:
            work = self._short[0]
            if (piece := next(work, None)) is not Piece.SHORT:
                self._short.popleft()
                self._sort(work, piece)
            if self._clock() >= until:
                break
        self._ended = self._clock()
        return bool(self._short)

    def _sort(self, work: Iterator[Piece], piece: Piece | None) -> None:
        """Put work where its next piece runs, if there is one."""
        if piece is Piece.SHORT:
            self._short.append(work)
        elif piece is Piece.LONG:
            self._long.put(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="long-pieces", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        niceness = os.getpriority(os.PRIO_PROCESS, 0) + NICENESS
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
        while True:
            work = self._long.get()
            while (piece := next(work, None)) is Piece.LONG:
                pass
            if piece is Piece.SHORT:
                self._back.put(work)
                self._wake()
