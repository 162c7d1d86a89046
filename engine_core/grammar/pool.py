"""Compiles grammars for structured output in threads, and caches them.

    StructuredOutputsParams --submit--> Compilation ...poll--> Grammar --matcher--> Matcher
                               |             ^
                               v             |
         a process of its own: prove --> compile, in a thread

Schemas are untrusted input: references are never fetched, sizes and steps are limited, and a grammar is compiled in
the core only after a process that may be lost has done the same (`prover.py`). Grammars that need much processor
time go to a slow lane of one thread, so that they cannot hold up the others.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import WeakSet

import msgspec

from pagewire.engine_core.grammar.compile import compile_text
from pagewire.engine_core.grammar.matcher import Grammar, GrammarError
from pagewire.engine_core.grammar.prover import Proof, Prover
from pagewire.ipc.confined import JobTimeoutError
from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_BYTES = 192 << 20  # memory of all compiled grammars, in use and cached
MAX_CACHED_BYTES = 32 << 20  # of those that are cached
MAX_CACHED = 1024  # grammars, and reasons of refusals, that are remembered
MAX_PENDING = 1024  # grammars that may wait for a thread; further requests are refused
NUM_THREADS = 2  # of the quick lane; the slow lane has one
QUICK_CPU_SECONDS = 0.5  # processor time after which a grammar must go to the slow lane, and begin again
NICENESS = 10  # of the threads: the core's loop goes first
THREAD_STACK_BYTES = 8 << 20  # of the threads that compile; a grammar was proven within a quarter of it

Lane = queue.PriorityQueue[tuple[int, int, "Compilation"]]


class Compilation:
    """A grammar that is being compiled, or has been.

    submitted: monotonic time of the submission. seconds: time limit for the wait for a thread, and then again for
        the compilation.

    Attributes:
        structure: what to compile; None once there is an outcome. kind: of the structure.
        started: a thread has begun to compile it. outcome: set once, by that thread.
    """

    def __init__(self, structure: StructuredOutputsParams, submitted: float, seconds: float) -> None:
        self.structure: StructuredOutputsParams | None = structure
        self.kind = structure.kind
        self.started = False
        self.outcome: Grammar | Exception | None = None
        self._deadline, self._seconds = submitted + seconds, seconds

    def start(self, now: float) -> bool:
        """Begin to compile; False if it has waited too long for that. Called by the thread that compiles."""
        if self.expired(now):
            return False
        self._deadline, self.started = now + self._seconds, True
        return True

    def postpone(self, now: float) -> None:
        """Wait for a thread again."""
        self._deadline, self.started = now + self._seconds, False

    def finish(self, outcome: Grammar | Exception) -> None:
        """Set the outcome."""
        self.outcome, self.structure = outcome, None

    def expired(self, now: float) -> bool:
        """True if the time limit has passed without an outcome."""
        return self.outcome is None and now > self._deadline

    def abandoned(self, now: float) -> bool:
        """True if it ended for reasons that say nothing about the grammar, such as the lack of a free thread."""
        return isinstance(self.outcome, EngineBusyError) or (self.expired(now) and not self.started)

    def poll(self, now: float) -> Grammar | None:
        """The compiled grammar, or None while it is being compiled.

        Raises:
            GrammarError: the grammar is invalid, or takes too much time or memory to compile.
            EngineBusyError: no thread was free to compile it within the time limit, or no memory.
        """
        if isinstance(self.outcome, EngineBusyError):
            raise EngineBusyError(*self.outcome.args)
        if isinstance(self.outcome, Exception):
            raise GrammarError(*self.outcome.args)
        if self.abandoned(now):
            raise EngineBusyError(f"{self.kind}: waited {self._seconds:g} s for other grammars to compile")
        if self.expired(now):
            raise too_slow(self.kind, self._seconds)
        return self.outcome


def too_slow(kind: str, seconds: float) -> GrammarError:
    """The error of a grammar that takes too long to compile."""
    return GrammarError(
        f"{kind}: not compiled within {seconds:g} s: too complex (limit: PAGEWIRE_GRAMMAR_TIMEOUT_S)"
    )


class Grammars:
    """Compiles grammars in threads, and caches those used most recently.

    load: makes llguidance's tokenizer; called once, for the first grammar. vocab_size: of the model.
    open_prover: makes the prover, once. seconds: time limit of a compilation.
    wake: called in a compiling thread after each compilation.
    max_bytes, max_cached_bytes: memory of all compiled grammars, and of those that are cached.
    capacity: number of outcomes that are cached.

    num_queries, num_hits: calls of `submit`, and those answered from the cache.
    """

    def __init__(
        self,
        load: Callable[[], LLTokenizer],
        vocab_size: int,
        *,
        open_prover: Callable[[], Prover],
        seconds: float,
        wake: Callable[[], None],
        capacity: int = MAX_CACHED,
        max_bytes: int = MAX_BYTES,
        max_cached_bytes: int = MAX_CACHED_BYTES,
    ) -> None:
        self._load, self._vocab_size, self._open_prover = load, vocab_size, open_prover
        self._seconds, self._wake = seconds, wake
        self._capacity, self._max_bytes, self._max_cached_bytes = capacity, max_bytes, max_cached_bytes
        self._lock = threading.Lock()  # of `_known`, `_in_use` and `_reserved`
        self._known: OrderedDict[bytes, Compilation] = OrderedDict()
        self._in_use: WeakSet[Grammar] = WeakSet()
        self._reserved = 0
        self._quick, self._slow = Lane(), Lane()
        self._order = itertools.count()
        self._tokenizer: LLTokenizer | GrammarError | None = None
        self._prover: Prover | None = None
        self._loading = threading.Lock()
        self.num_queries = self.num_hits = 0
        self._threads: list[threading.Thread] = []

    def __len__(self) -> int:
        return len(self._known)

    @property
    def num_bytes(self) -> int:
        """Memory of the grammars that are cached, used by a sequence, or being compiled."""
        return self._reserved + sum(grammar.num_bytes for grammar in self._in_use)

    def submit(self, structure: StructuredOutputsParams, now: float) -> Compilation:
        """The compilation of a grammar: the cached one, or a new one that a thread will run.

        Raises:
            EngineBusyError: too many grammars are waiting.
        """
        encoded = msgspec.msgpack.encode(structure)
        key = hashlib.sha256(encoded).digest()
        with self._lock:
            known = self._known.get(key)
            self.num_queries += 1
            if known is not None and not known.abandoned(now):
                self.num_hits += 1
                self._known.move_to_end(key)
                return known
            if self._quick.qsize() + self._slow.qsize() >= MAX_PENDING:
                raise EngineBusyError(f"{MAX_PENDING} grammars are already waiting to be compiled")
            compilation = self._known[key] = Compilation(structure, now, self._seconds)
            self._known.move_to_end(key)
            if len(self._known) > self._capacity:
                self._known.popitem(last=False)
        self._queue(self._quick, compilation, len(encoded))
        return compilation

    def close(self) -> None:
        """End the process that proves grammars."""
        if self._prover is not None:
            self._prover.close()

    def _queue(self, lane: Lane, compilation: Compilation, size: int) -> None:
        """Let a thread of the lane compile a grammar; short ones go first, and each in order of arrival."""
        lane.put((size.bit_length(), next(self._order), compilation))
        names = [thread.name for thread in self._threads]
        name, limit = ("slow grammars", 1) if lane is self._slow else ("grammars", NUM_THREADS)
        if names.count(name) < limit:
            with self._lock:  # the size of stacks is a setting of the process
                before = threading.stack_size(THREAD_STACK_BYTES)
                thread = threading.Thread(target=self._work, args=(lane,), name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
                threading.stack_size(before)

    def _work(self, lane: Lane) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        slow = lane is self._slow
        while True:
            size, _, compilation = lane.get()
            structure = compilation.structure
            if structure is None or not compilation.start(time.monotonic()):
                continue
            cpu_seconds = self._seconds / 2 if slow else min(QUICK_CPU_SECONDS, self._seconds / 2)
            try:
                outcome = self._compile(structure, cpu_seconds)
            except JobTimeoutError:
                if not slow:
                    compilation.postpone(time.monotonic())
                    self._queue(self._slow, compilation, size)
                    continue
                outcome = too_slow(structure.kind, self._seconds)
            compilation.finish(outcome)
            del compilation, outcome  # not held until the next one comes
            self._limit_cached()
            self._wake()

    def _compile(self, structure: StructuredOutputsParams, cpu_seconds: float) -> Grammar | Exception:
        """Prove a grammar, then compile it here; raises JobTimeoutError."""
        try:
            tokenizer, prover = self._load_tools()
            proof = prover.prove(structure, self._seconds, cpu_seconds)
            return self._compile_proven(structure.kind, proof, tokenizer)
        except JobTimeoutError:
            raise
        # No input may end the thread. An error of its own: what was caught holds, by its frames, the whole grammar.
        except (GrammarError, EngineBusyError) as error:
            return type(error)(*error.args)
        except Exception as error:
            return GrammarError(f"{structure.kind}: {error}")

    def _compile_proven(self, kind: str, proof: Proof, tokenizer: LLTokenizer) -> Grammar:
        """Compile a proven grammar, for which memory is reserved meanwhile; raises EngineBusyError."""
        with self._lock:
            self._make_room(kind, proof.num_bytes)
            self._reserved += proof.num_bytes
        try:
            grammar = compile_text(kind, proof.text, tokenizer, self._vocab_size, proof.num_bytes)
            with self._lock:
                self._in_use.add(grammar)
        finally:
            with self._lock:
                self._reserved -= proof.num_bytes
        return grammar

    def _make_room(self, kind: str, num_bytes: int) -> None:
        """Forget the grammars used least recently until there is memory for another one."""
        while (excess := self.num_bytes + num_bytes - self._max_bytes) > 0:
            if not any(isinstance(known.outcome, Grammar) for known in self._known.values()):
                raise EngineBusyError(
                    f"{kind}: grammars in use take {self.num_bytes >> 20} MiB of memory, this one would take "
                    f"{num_bytes >> 20}, and all may take {self._max_bytes >> 20}: try again later"
                )
            self._forget(excess)

    def _limit_cached(self) -> None:
        """Forget the grammars used least recently until those that are cached take no more than they may."""
        with self._lock:
            outcomes = [known.outcome for known in self._known.values()]
            cached = sum(outcome.num_bytes for outcome in outcomes if isinstance(outcome, Grammar))
            del outcomes
            self._forget(cached - self._max_cached_bytes)

    def _forget(self, num_bytes: int) -> None:
        """Forget cached grammars of at least this size together, those used least recently. Needs the lock."""
        for key, known in list(self._known.items()):
            if num_bytes <= 0:
                break
            if isinstance(known.outcome, Grammar):
                num_bytes -= known.outcome.num_bytes
                del self._known[key]

    def _load_tools(self) -> tuple[LLTokenizer, Prover]:
        with self._loading:
            if self._tokenizer is None:
                try:
                    self._tokenizer = self._load()
                except GrammarError as error:
                    self._tokenizer = GrammarError(*error.args)
            if isinstance(self._tokenizer, GrammarError):
                raise GrammarError(*self._tokenizer.args)
            if self._prover is None:
                self._prover = self._open_prover()
            return self._tokenizer, self._prover
