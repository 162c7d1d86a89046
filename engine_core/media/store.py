"""Makes features of media in threads, and keeps those used last.

    Prompt --submit--> PendingMedia --a thread: name, features, layout--> poll() -> [Features]

The threads check what a frontend says: that a medium has the name of its content, and that the tokens in its place
are its layout. The model's processor runs in processes that may be lost (`processor.py`). Equal media are processed
once, also when they come at the same time.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias
from weakref import WeakValueDictionary

from pagewire.engine_core.media.features import Features
from pagewire.engine_core.media.jobs import Processed
from pagewire.engine_core.media.processor import NUM_PARALLEL, MediaProcessor
from pagewire.engine_core.wings.wing import Wing
from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.fair_queue import FairQueue
from pagewire.ipc.recent import Recent
from pagewire.ipc.shares import Name
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.items import NOTHING, Media, Prompt
from pagewire.ipc.wire.media import (
    TOKEN_TYPE,
    MediaInfo,
    MediaLayout,
    check_kind,
    check_layout,
    media_name,
    uuid_name,
)

logger = logging.getLogger("pagewire.core")

MAX_BYTES = 256 << 20  # features that are kept for later requests
MAX_LIVE_BYTES = 2 << 30  # all features; further requests wait until others have ended
MAX_LAYOUT_BYTES = 32 << 20  # layouts that are kept
MAX_PENDING = 1024  # requests that may wait for a thread; further ones are refused
SECONDS = 120.0  # how long one waits at most
NUM_THREADS = NUM_PARALLEL
NUM_RESERVED = (
    1  # threads that are left to a tenant of which nothing is processed: one medium may take `SECONDS`
)
NICENESS = 5
GRIDS = ("image_grid_thw",)

LayoutKey: TypeAlias = tuple[str, tuple[int, ...], str]


@dataclass(frozen=True)
class MediaLimits:
    """The largest media that the engine can run.

    max_embeddings: of one medium, as its encoder's cache holds them. max_model_len: tokens of a prompt.
    max_tokens: of one medium, where a step must run all of it; 0: no limit.
    """

    max_embeddings: int
    max_model_len: int
    max_tokens: int = 0

    def check(self, features: Features) -> None:
        """Refuse a medium that could never run; raises ValueError."""
        num_tokens = len(features.token_ids)
        check_layout(features.kind, num_tokens, self.max_model_len)
        if features.size > self.max_embeddings:
            raise ValueError(
                f"{features.kind}: it takes {features.size} embeddings, and the engine holds "
                f"{self.max_embeddings}: make it smaller"
            )
        if self.max_tokens and num_tokens > self.max_tokens:
            raise ValueError(
                f"{features.kind}: it takes {num_tokens} tokens, which must run in one step, and a step has "
                f"{self.max_tokens}: make it smaller, or raise max_num_batched_tokens"
            )


class MediaWork(Protocol):
    """Work for a thread, on media of requests."""

    def run(self) -> None:
        """Do it. No input may end the thread."""


class PendingMedia:
    """The media of a prompt, which become features in a thread."""

    def __init__(self, store: MediaStore, prompt: Prompt, deadline: float) -> None:
        self._store, self._prompt, self._deadline = store, prompt, deadline
        self._outcome: list[Features] | Exception | None = None
        self.cancelled = False

    def poll(self) -> list[Features] | None:
        """The features of its pictures and sounds, in order; None while there are some to make.

        Raises:
            ValueError: a medium is refused. EngineBusyError: no process could be had.
        """
        if isinstance(self._outcome, Exception):
            raise type(self._outcome)(*self._outcome.args)
        return self._outcome

    def run(self) -> None:
        """Make them; see `MediaWork`."""
        try:
            self._store.wait_for_room(self._deadline)
            self._outcome = [self._store.features(self._prompt, medium) for medium in self._prompt.encoded]
        except (
            ValueError,
            EngineBusyError,
        ) as error:  # one of its own: that one holds content, by its frames
            self._outcome = type(error)(*error.args)
        except Exception as error:
            logger.exception("media could not be processed")
            self._outcome = ValueError(f"the media of the prompt cannot be processed: {error}")
        self._store.wake()


class PendingLayout:
    """A layout that a frontend has called for.

    done: called with it or an error, on the thread of the core's loop.
    """

    def __init__(
        self, store: MediaStore, key: LayoutKey, done: Callable[[MediaLayout | Exception], None]
    ) -> None:
        self._store, self._key, self._done = store, key, done

    def run(self) -> None:
        """Make it; see `MediaWork`."""
        outcome: MediaLayout | Exception
        try:
            outcome = self._store.make_layout(self._key)
        except Exception as error:
            outcome = error if isinstance(error, ValueError | EngineBusyError) else ValueError(str(error))
        self._store.answer(self._done, outcome)


class MediaStore(Wing):
    """The media of all requests.

    processor: of the model. described: what it takes. info: the same for frontends. wake: wakes the core's loop.

    Attributes:
        num_queries, num_hits: media of requests, and those whose features were there.
    """

    def __init__(
        self,
        processor: MediaProcessor,
        info: MediaInfo,
        limits: MediaLimits,
        wake: Callable[[], None],
        max_bytes: int = MAX_BYTES,
        max_layout_bytes: int = MAX_LAYOUT_BYTES,
    ) -> None:
        self.info, self.wake = info, wake
        self.num_queries = self.num_hits = 0
        self._processor, self._limits = processor, limits
        self._lock = threading.Lock()
        self._kept: Recent[bytes, Features] = Recent(max_bytes)
        self._live: WeakValueDictionary[bytes, Features] = WeakValueDictionary()
        self._making: dict[bytes, threading.Event] = {}
        self._layouts: Recent[LayoutKey, array[int]] = Recent(max_layout_bytes)
        self._answers: deque[Callable[[], None]] = deque()
        self._queue: FairQueue[Any] = FairQueue(num_places=NUM_THREADS, num_reserved=NUM_RESERVED)
        self._threads: list[threading.Thread] = []

    # ------------------------------------------------------------ on the thread of the core's loop

    def submit(self, prompt: Prompt, tenant: Name, frontend: bytes, now: float) -> PendingMedia:
        """Begin to make the features of a prompt's media, in the turn of a tenant of a frontend.

        Raises:
            EngineBusyError: too many requests wait.
        """
        pending = PendingMedia(self, prompt, now + SECONDS)
        self._put(pending, tenant, frontend)
        return pending

    def lay(
        self,
        key: LayoutKey,
        tenant: Name,
        frontend: bytes,
        done: Callable[[MediaLayout | Exception], None],
    ) -> None:
        """Call `done` with the layout of a medium of a kind and shape, now or in `deliver`; turns as for `submit`.

        Raises:
            ValueError: the engine takes no such medium. EngineBusyError: too many requests wait.
        """
        check_kind(self.info, key[0], key[1])
        known = self._known_layout(key)
        if known is not None:
            done(known)
        else:
            self._put(PendingLayout(self, key, done), tenant, frontend)

    def advance(self) -> None:
        """Call those who wait for layouts that were made."""
        while self._answers:
            self._answers.popleft()()

    def reset(self) -> None:
        """Forget the features that no request has."""
        with self._lock:
            self._kept.clear()

    def close(self) -> None:
        """End the processes."""
        self._processor.close()

    @property
    def num_bytes(self) -> int:
        """Memory of all features."""
        return sum(features.num_bytes for features in list(self._live.values()))

    @property
    def num_layout_bytes(self) -> int:
        """Memory of the layouts that are kept."""
        return self._layouts.num_bytes

    def _put(self, work: MediaWork, tenant: Name, frontend: bytes) -> None:
        if self._queue.num_before(tenant, frontend) >= MAX_PENDING:
            raise EngineBusyError(f"{MAX_PENDING} requests with media already wait to be processed")
        self._queue.put(work, tenant, frontend=frontend)
        if len(self._threads) < NUM_THREADS:
            self._threads.append(threading.Thread(target=self._work, name="media", daemon=True))
            self._threads[-1].start()

    # ------------------------------------------------------------ on other threads

    def _work(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while True:
            with self._queue.turn(lambda _: True) as work:
                work.run()
            del work  # not held until the next one comes

    def answer(
        self, done: Callable[[MediaLayout | Exception], None], outcome: MediaLayout | Exception
    ) -> None:
        """Have `deliver` call `done`."""
        self._answers.append(lambda: done(outcome))
        self.wake()

    def make_layout(self, key: LayoutKey) -> MediaLayout:
        """The layout of a kind and shape.

        Raises:
            ValueError: the processor refuses it, or no prompt has room for it. EngineBusyError: as the processor.
        """
        if (known := self._known_layout(key)) is not None:
            return known
        kind, _, options = key
        token_ids = self._processor.lay(*key).token_ids
        check_layout(kind, len(token_ids), self._limits.max_model_len)
        layout = array(TOKEN_TYPE, token_ids)
        with self._lock:
            self._layouts.put(key, layout, len(layout) * layout.itemsize + len(options))
        return MediaLayout(token_ids)

    def _known_layout(self, key: LayoutKey) -> MediaLayout | None:
        with self._lock:
            known = self._layouts.get(key)
        return None if known is None else MediaLayout(known.tolist())

    def wait_for_room(self, deadline: float) -> None:
        """Wait until requests have ended whose features take too much memory.

        Raises:
            EngineBusyError: they have not until the deadline.
        """
        while self.num_bytes > MAX_LIVE_BYTES:
            self.reset()
            if time.monotonic() > deadline:
                raise EngineBusyError("the media of other requests take too much memory: try again later")
            time.sleep(0.05)

    def features(self, prompt: Prompt, medium: Media) -> Features:
        """The features of a medium, checked against the prompt.

        Raises:
            ValueError: its name or its tokens are not its own, or the model's processor or the engine refuses it.
            EngineBusyError: no process could be had.
        """
        self._check_name(prompt, medium)
        with self._in_turn(medium.name):
            found = self._find(medium.name)
            if found is None:
                if not medium.data.data:
                    raise ValueError(f"{medium.kind}: the engine does not have it any more: send its content")
                found = self._made(medium)
        if list(found.token_ids) != prompt.token_ids[medium.start : medium.end]:
            raise ValueError(f"{medium.kind}: the tokens in its place are not those that stand for it")
        return found

    def _check_name(self, prompt: Prompt, medium: Media) -> None:
        if medium.uuid:
            if not prompt.cache_salt:
                raise ValueError("multi_modal_uuids: give a cache_salt as well, beside which they hold")
            expected = uuid_name(medium.kind, prompt.cache_salt, medium.uuid, medium.options)
        else:
            expected = media_name(medium.kind, medium.data, medium.options)
        if medium.name != expected:
            raise ValueError(f"{medium.kind}: its name is not that of its content")

    @contextmanager
    def _in_turn(self, name: bytes):  # type: ignore[no-untyped-def]
        """A context in which no other thread makes this medium."""
        while True:
            with self._lock:
                other = self._making.get(name)
                if other is None:
                    self._making[name] = threading.Event()
                    break
            other.wait()
        try:
            yield
        finally:
            with self._lock:
                self._making.pop(name).set()

    def _find(self, name: bytes) -> Features | None:
        with self._lock:
            self.num_queries += 1
            found = self._live.get(name)
            if found is not None:
                self.num_hits += 1
                self._keep(found)
            return found

    def _made(self, medium: Media) -> Features:
        processed = self._processor.process(medium.kind, medium.data, medium.options)
        features = features_of(medium, processed, self.info.kinds[medium.kind].embedding_id)
        self._limits.check(features)
        with self._lock:
            self._live[medium.name] = features
            self._keep(features)
        return features

    def _keep(self, features: Features) -> None:
        """Keep features for later requests, and let go of those used least recently. Needs the lock."""
        self._kept.put(features.name, features, features.num_bytes)


def features_of(medium: Media, processed: Processed, place_id: int) -> Features:
    """What the processor has made of a medium."""
    tensors = {
        name: Tensor(array.dtype, array.shape, array.data) for name, array in processed.features.items()
    }
    grid = next((tensors[name] for name in GRIDS if name in tensors), NOTHING)
    size = processed.token_ids.count(place_id)
    token_ids = array(TOKEN_TYPE, processed.token_ids)
    return Features(medium.name, medium.kind, token_ids, size, tensors, grid)
