"""Compiles grammars for structured output in threads, and caches them.

    StructuredOutputsParams --submit--> Compilation ...poll--> Grammar --matcher--> Matcher
                               |             ^
                               v             |
         a process of its own: prove --> compile, in a thread

Schemas are untrusted input: references are never fetched, sizes and steps are limited, and a grammar is compiled in
the core only after a process that may be lost has done the same (`prover.py`). Grammars that need much processor
time go to a slow lane, so that they cannot hold up the others. In both lanes the tenant is next that has used least
of the threads' time (`FairQueue`), so that the many grammars of one do not hold up those of others.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import msgspec

from pagewire.engine_core.grammar.compilation import Compilation, too_slow
from pagewire.engine_core.grammar.compile import compile_text
from pagewire.engine_core.grammar.matcher import Grammar
from pagewire.engine_core.grammar.prover import MAX_GRAMMAR_BYTES, Proof, Prover
from pagewire.engine_core.schedule.attachments import GrammarError
from pagewire.engine_core.wings.wing import Wing
from pagewire.ipc.errors import EngineBusyError, EngineStalledError
from pagewire.ipc.fair_queue import FairQueue
from pagewire.ipc.host.confined import JobTimeoutError
from pagewire.ipc.options.structured_outputs import StructuredOutputsConfig
from pagewire.ipc.shares import Name, share_of
from pagewire.ipc.wire.params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    Tools = tuple[LLTokenizer, Prover]

# Memory of all compiled grammars, in use and cached. A tenant may have half of what the others leave (as of the
# memory of unfinished requests, `engine_core.tenants`), so a single one may have the largest grammar.
MAX_BYTES = 2 * MAX_GRAMMAR_BYTES
MAX_CACHED_BYTES = 32 << 20  # of those that are cached
MAX_CACHED = 1024  # grammars, and reasons of refusals, that are remembered
LOAD_SECONDS = 120.0  # that grammars wait for the tokenizer at most
MAX_PENDING = 1024  # grammars that may wait for a thread; further requests are refused
NUM_THREADS = 2  # of each lane; in the slow one, each compiles for another tenant
QUICK_CPU_SECONDS = 0.5  # processor time after which a grammar must go to the slow lane, and begin again
QUICK_SECONDS = 2.0  # the same for its time: where processors are busy, jobs get a small part of one
NICENESS = 10  # of the threads: the core's loop goes first
THREAD_STACK_BYTES = 8 << 20  # of the threads that compile; a grammar was proven within a quarter of it
NO_DEMANDS = StructuredOutputsConfig()
Lane = FairQueue[Compilation]
logger = logging.getLogger("pagewire.core")


class Grammars(Wing):
    """Compiles grammars in threads, and caches those used most recently.

    load: makes llguidance's tokenizer; called once, by `start` or for the first grammar. vocab_size: of the model.
    open_prover: makes the prover, once. seconds: time limit of a compilation.
    wake: called in a compiling thread after each compilation. defaults: hold for every structure.
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
        defaults: StructuredOutputsConfig = StructuredOutputsConfig(),  # noqa: B008 (it is frozen)
        capacity: int = MAX_CACHED,
        max_bytes: int = MAX_BYTES,
        max_cached_bytes: int = MAX_CACHED_BYTES,
    ) -> None:
        self._load, self._vocab_size, self._open_prover = load, vocab_size, open_prover
        self._seconds, self._wake, self._defaults = seconds, wake, defaults
        self._capacity, self._max_bytes, self._max_cached_bytes = capacity, max_bytes, max_cached_bytes
        self._lock = threading.RLock()  # of `_known`, `_in_use` and `_reserved`, and of the lanes
        self._known: OrderedDict[bytes, Compilation] = OrderedDict()
        self._in_use: WeakKeyDictionary[Grammar, Name] = WeakKeyDictionary()
        self._reserved: Counter[Name] = Counter()  # bytes, by tenant
        self._quick, self._slow = Lane(self._lock), Lane(self._lock, num_per_tenant=1)
        self._tools: Tools | Exception | None = None  # an exception: why there are none
        self._prover: Prover | None = None
        self._loading = threading.Lock()
        self._closed = False
        self.num_queries = self.num_hits = 0
        self._threads: dict[Lane, list[threading.Thread]] = {self._quick: [], self._slow: []}

    def __len__(self) -> int:
        return len(self._known)

    @property
    def num_bytes(self) -> int:
        """Memory of the grammars that are cached, used by a sequence, or being compiled."""
        with self._lock:
            return sum(self._bytes_by_tenant().values())

    def start(self) -> None:
        """Load the tokenizer and start the prover now, in a thread."""
        threading.Thread(target=self._load_tools, name="grammars", daemon=True).start()

    def submit(self, structure: StructuredOutputsParams, tenant: Name, now: float) -> Compilation:
        """The compilation of a grammar: the cached one, or a new one that a thread will run.

        Raises:
            EngineBusyError: too many grammars are waiting.
        """
        structure = self._defaults.completed(structure)
        encoded = msgspec.msgpack.encode(structure)
        key = hashlib.sha256(encoded).digest()
        with self._lock:
            known = self._known.get(key)
            self.num_queries += 1
            if known is not None and not known.abandoned(now):
                self.num_hits += 1
                self._known.move_to_end(key)
                if known.lane is None and known.expired(now):
                    known.extend(now)
                if tenant not in known.tenants:
                    known.tenants.add(tenant)
                    if known.lane is not None:
                        self._wait(known, known.lane, [tenant], now)
                return known
            if self._quick.num_before(tenant) + self._slow.num_before(tenant) >= MAX_PENDING:
                raise EngineBusyError(f"{MAX_PENDING} grammars are already waiting to be compiled")
            compilation = self._known[key] = Compilation(structure, len(encoded), tenant, self._seconds)
            self._known.move_to_end(key)
            if len(self._known) > self._capacity:
                self._known.popitem(last=False)
            self._wait(compilation, self._quick, [tenant], now)
        return compilation

    def close(self) -> None:
        """End the process that proves grammars, also while it starts."""
        self._closed = True
        if self._prover is not None:
            self._prover.close()

    def _wait(self, compilation: Compilation, lane: Lane, tenants: Iterable[Name], now: float) -> None:
        """Let a thread of the lane compile a grammar, in the turn of any of these tenants. Needs the lock."""
        compilation.wait(lane, now, LOAD_SECONDS if self._tools is None else 0.0)
        for tenant in tenants:
            lane.put(compilation, tenant, compilation.size)
        threads = self._threads[lane]
        if len(threads) < NUM_THREADS:
            before = threading.stack_size(THREAD_STACK_BYTES)  # a setting of the process
            threads.append(threading.Thread(target=self._work, args=(lane,), name="grammars", daemon=True))
            threads[-1].start()
            threading.stack_size(before)

    def _work(self, lane: Lane) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while True:
            self._load_tools()
            with lane.turn(Compilation.begin) as compilation:
                self._run(compilation, lane)
            del compilation  # not held until the next one comes

    def _run(self, compilation: Compilation, lane: Lane) -> None:
        """Give a compilation its outcome, or let it wait in the slow lane."""
        structure = compilation.structure
        assert structure is not None
        is_slow = lane is self._slow
        seconds, cpu_seconds = self._seconds, self._seconds / 2
        if not is_slow:
            seconds, cpu_seconds = min(QUICK_SECONDS, seconds), min(QUICK_CPU_SECONDS, cpu_seconds)
        try:
            compilation.finish(self._compile(structure, compilation.tenant, seconds, cpu_seconds))
        except (JobTimeoutError, EngineStalledError) as error:
            if not is_slow:
                with self._lock:
                    self._wait(compilation, self._slow, compilation.tenants, time.monotonic())
                return
            is_stalled = isinstance(error, EngineStalledError)
            late = EngineStalledError(f"{structure.kind}: {error}")
            compilation.finish(late if is_stalled else too_slow(structure.kind, cpu_seconds))
        if structure.optional and isinstance(compilation.outcome, GrammarError):
            logger.info("outputs are free whose optional grammar cannot be had: %s", compilation.outcome)
        self._limit_cached()
        self._wake()

    def _compile(
        self, structure: StructuredOutputsParams, tenant: Name, seconds: float, cpu_seconds: float
    ) -> Grammar | Exception:
        """Prove a grammar, then compile it here; raises JobTimeoutError or EngineStalledError."""
        try:
            tools = self._load_tools()
            if isinstance(tools, Exception):
                self._tools = tools if isinstance(tools, GrammarError) else None
                raise tools
            tokenizer, prover = tools
            proof = prover.prove(structure, seconds, cpu_seconds)
            return self._compile_proven(structure.kind, tenant, proof, tokenizer)
        except (JobTimeoutError, EngineStalledError):
            raise
        # No input may end the thread. An error of its own: what was caught holds, by its frames, the whole grammar.
        except (GrammarError, EngineBusyError) as error:
            return type(error)(*error.args)
        except Exception as error:
            return GrammarError(f"{structure.kind}: {error}")

    def _compile_proven(self, kind: str, tenant: Name, proof: Proof, tokenizer: LLTokenizer) -> Grammar:
        """Compile a proven grammar, for which memory is reserved meanwhile; raises EngineBusyError."""
        with self._lock:
            self._make_room(kind, tenant, proof.num_bytes)
            self._reserved[tenant] += proof.num_bytes
        try:
            grammar = compile_text(kind, proof.text, tokenizer, self._vocab_size, proof.num_bytes)
            with self._lock:
                self._in_use[grammar] = tenant
        finally:
            with self._lock:
                self._reserved[tenant] -= proof.num_bytes
                self._reserved += Counter()  # without the tenants that have nothing
        return grammar

    def _bytes_by_tenant(self) -> Counter[Name]:
        """Memory of the grammars that each tenant was the first to submit. Needs the lock."""
        num_bytes = self._reserved.copy()
        for grammar, tenant in list(self._in_use.items()):
            num_bytes[tenant] += grammar.num_bytes
        return num_bytes

    def _make_room(self, kind: str, tenant: Name, num_bytes: int) -> None:
        """Forget the grammars used least recently until a tenant may have another one.

        Raises:
            EngineBusyError: it has too many in use.
        """
        while True:
            all_bytes = self._bytes_by_tenant()
            own = all_bytes[tenant]
            limit = share_of(self._max_bytes, sum(all_bytes.values()), own)
            if own + num_bytes <= limit:
                return
            if not any(isinstance(known.outcome, Grammar) for known in self._known.values()):
                raise EngineBusyError(
                    f"{kind}: it would take {num_bytes >> 20} MiB of memory, and the grammars in use take "
                    f"{own >> 20} of the {limit >> 20} that are this tenant's share now: try again later"
                )
            self._forget(own + num_bytes - limit)

    def tidy(self) -> None:
        """Forget cached grammars, and evict those in use, until all take no more than they may.

        To be called now and then: grammars grow while they are used. Those of the tenant that has most go first,
        and of these the largest.
        """
        self._limit_cached()
        with self._lock:
            by_tenant = self._bytes_by_tenant()
            excess = sum(by_tenant.values()) - self._max_bytes
            if excess <= 0:
                return
            grammars = [
                (by_tenant[tenant], grammar.num_bytes, grammar) for grammar, tenant in self._in_use.items()
            ]
            grammars.sort(key=itemgetter(0, 1), reverse=True)
            for _, num_bytes, grammar in grammars:
                if excess > 0:
                    grammar.evicted = True
                    excess -= num_bytes
            for key, known in list(self._known.items()):
                if isinstance(known.outcome, Grammar) and known.outcome.evicted:
                    del self._known[key]

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

    def _load_tools(self) -> Tools | Exception:
        """Load what all grammars need, unless it is there; then the time limits of those that wait begin.

        Returns an exception if there are no tools; only what is wrong with the tokenizer is remembered.
        """
        with self._loading:
            if self._tools is not None:
                return self._tools
            tools: Tools | Exception
            try:
                tools = self._open_tools()
            except (GrammarError, EngineBusyError) as error:  # without the frames that hold what was read
                tools = type(error)(*error.args)
            except Exception as error:
                tools = RuntimeError(str(error))
            with self._lock:
                self._tools, now = tools, time.monotonic()
                for known in self._known.values():
                    if known.lane is not None:
                        known.wait(known.lane, now)
            return tools

    def _open_tools(self) -> Tools:
        tokenizer = self._load()
        if self._prover is None:
            self._prover = self._open_prover()
        if self._closed:
            self._prover.close()
        self._prover.start()
        return tokenizer, self._prover
