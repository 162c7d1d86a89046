"""Compiles grammars for structured output in threads, and caches them.

    StructuredOutputsParams --Grammars.submit--> Compilation ...poll--> Grammar --matcher--> Matcher

Schemas are untrusted input: references are never fetched, sizes and steps are limited, compilations run at low
priority and must end within a time limit.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from pagewire.engine_core.grammar.compile import compile_grammar
from pagewire.engine_core.grammar.matcher import Grammar, GrammarError
from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLTokenizer

CACHED = 128  # compiled grammars that are kept
MAX_PENDING = 1024  # grammars that may wait for a thread; further requests are refused
NUM_THREADS = 2  # so that one slow schema does not hold up all others
NICENESS = 10  # of the threads: the core's loop goes first


class Compilation:
    """A grammar that is being compiled, or has been.

    submitted: monotonic time of the submission. seconds: time limit for the wait for a thread, and then again for
        the compilation.

    Attributes:
        started: a thread has begun to compile it. outcome: set once, by that thread.
    """

    def __init__(self, structure: StructuredOutputsParams, submitted: float, seconds: float) -> None:
        self.structure = structure
        self.started = False
        self.outcome: Grammar | Exception | None = None
        self._deadline, self._seconds = submitted + seconds, seconds

    def start(self, now: float) -> bool:
        """Begin to compile; False if it has waited too long for that. Called by the thread that compiles."""
        if self.expired(now):
            return False
        self._deadline, self.started = now + self._seconds, True
        return True

    def expired(self, now: float) -> bool:
        """True if the time limit has passed without an outcome."""
        return self.outcome is None and now > self._deadline

    def abandoned(self, now: float) -> bool:
        """True if the time limit has passed before a thread was free: that says nothing about the grammar."""
        return self.expired(now) and not self.started

    def poll(self, now: float) -> Grammar | None:
        """The compiled grammar, or None while it is being compiled.

        Raises:
            GrammarError: the grammar is invalid, or took too long to compile.
            EngineBusyError: no thread was free to compile it within the time limit.
        """
        if isinstance(self.outcome, Exception):
            raise GrammarError(*self.outcome.args)
        if self.abandoned(now):
            raise EngineBusyError(
                f"{self.structure.kind}: waited {self._seconds:g} s for other grammars to compile"
            )
        if self.expired(now):
            raise GrammarError(f"{self.structure.kind}: not compiled within {self._seconds:g} s: too complex")
        return self.outcome


class Grammars:
    """Compiles grammars in threads, and caches the most recently used `capacity` of them.

    load: makes llguidance's tokenizer; called once, for the first grammar. vocab_size: of the model.
    seconds: time limit of a compilation. wake: called in a compiling thread after each compilation.

    num_queries, num_hits: calls of `submit`, and those answered from the cache.
    """

    def __init__(
        self,
        load: Callable[[], LLTokenizer],
        vocab_size: int,
        *,
        seconds: float,
        wake: Callable[[], None],
        capacity: int = CACHED,
    ) -> None:
        self._load, self._vocab_size = load, vocab_size
        self._seconds, self._wake, self._capacity = seconds, wake, capacity
        self._known: OrderedDict[bytes, Compilation] = OrderedDict()
        self._pending: queue.SimpleQueue[Compilation] = queue.SimpleQueue()
        self._tokenizer: LLTokenizer | GrammarError | None = None
        self._loading = threading.Lock()
        self.num_queries = self.num_hits = 0
        self._threads: list[threading.Thread] = []

    def __len__(self) -> int:
        return len(self._known)

    def submit(self, structure: StructuredOutputsParams, now: float) -> Compilation:
        """The compilation of a grammar: the cached one, or a new one that a thread will run.

        Raises:
            EngineBusyError: too many grammars are waiting.
        """
        key = msgspec.msgpack.encode(structure)
        known = self._known.get(key)
        self.num_queries += 1
        if known is not None and not known.abandoned(now):
            self.num_hits += 1
            self._known.move_to_end(key)
            return known
        if self._pending.qsize() >= MAX_PENDING:
            raise EngineBusyError(f"{MAX_PENDING} grammars are already waiting to be compiled")
        compilation = self._known[key] = Compilation(structure, now, self._seconds)
        if len(self._known) > self._capacity:
            self._known.popitem(last=False)
        self._pending.put(compilation)
        if len(self._threads) < NUM_THREADS:
            thread = threading.Thread(target=self._work, name="grammars", daemon=True)
            self._threads.append(thread)
            thread.start()
        return compilation

    def _work(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while True:
            compilation = self._pending.get()
            if compilation.start(time.monotonic()):
                compilation.outcome = self._compile(compilation.structure)
                self._wake()

    def _compile(self, structure: StructuredOutputsParams) -> Grammar | Exception:
        try:
            tokenizer = self._load_tokenizer()
            return compile_grammar(structure, tokenizer, self._vocab_size)
        except Exception as error:  # no input may end the thread
            return error if isinstance(error, GrammarError) else GrammarError(f"{structure.kind}: {error}")

    def _load_tokenizer(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                try:
                    self._tokenizer = self._load()
                except GrammarError as error:
                    self._tokenizer = error
        if isinstance(self._tokenizer, GrammarError):
            raise self._tokenizer
        return self._tokenizer
