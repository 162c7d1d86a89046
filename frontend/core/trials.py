"""Suspects are tried one by one on the core that takes the place of a lost one, before all else goes on there."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from pagewire.frontend.core.blame import TRIALS
from pagewire.frontend.core.custody import Custody
from pagewire.frontend.core.supervisor import EngineClient
from pagewire.frontend.requests.outputs import RequestState
from pagewire.ipc.errors import EngineBusyError, EngineDeadError

logger = logging.getLogger("pagewire.frontend")

TRIAL_SECONDS = 30.0  # for the trials of all suspects after a core was lost, while other requests wait

Failed: TypeAlias = list[tuple[RequestState, Exception]]


class SuspectTrials:
    """Runs each suspect alone on a core, until it has brought enough tokens or any thread ends the wait.

    lock: guards the custody, and all that is called here but `run`, `wait` and `stop_waiting`.
    closing: set once the session is closed. resume: sends requests to a core, with the lock; returns those that it
    cannot get, with the errors. fail: ends requests, without the lock.
    """

    def __init__(
        self,
        lock: AbstractContextManager[Any],
        custody: Custody,
        closing: threading.Event,
        resume: Callable[[EngineClient, list[RequestState]], Failed],
        fail: Callable[[Failed], None],
    ) -> None:
        self._lock, self._custody, self._closing = lock, custody, closing
        self._resume, self._fail = resume, fail
        self._running: tuple[RequestState, int] | None = None  # the suspect, its goal
        self._over = threading.Event()

    # -------------------------------------------------------------- any thread

    def check_progress(self) -> None:
        """End the wait if the suspect has enough tokens."""
        if self._running is not None and self._running[0].num_output_tokens >= self._running[1]:
            self._over.set()

    def drop(self, state: RequestState) -> None:
        """End the wait if this request is the suspect: it has ended."""
        if self._running is not None and self._running[0] is state:
            self._over.set()

    def stop_waiting(self) -> None:
        """End the wait: the core is lost, or the session is closed."""
        self._over.set()

    # -------------------------------------------------------------- on the thread of the connection

    def run(self, client: EngineClient) -> None:
        """Try suspects one by one on a core, also those of another core that is lost meanwhile."""
        give_up = time.monotonic() + TRIAL_SECONDS
        tried: set[int] = set()
        while len(tried) < TRIALS and (suspects := self._untried(tried)):
            text = "requests that were open when the core died are tried alone: %d"
            logger.warning(text, len(suspects))
            self._settle(client)  # a core that dies before its answer dies of something else
            for state in suspects:
                tried.add(state.key)
                if not self._try_alone(client, state, give_up):
                    return

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the trial, or what was begun otherwise, is over."""
        self._over.wait(seconds)

    def _untried(self, tried: Collection[int]) -> list[RequestState]:
        with self._lock:
            return self._custody.suspects(tried)

    def _try_alone(self, client: EngineClient, state: RequestState, give_up: float) -> bool:
        """Run a request alone until it has brought some tokens, then take it back. False: no other can be tried."""
        with self._lock:
            if state.key not in self._custody.held:
                return True  # it has been aborted
            goal = self._custody.goal(state)
            self._running = state, goal
            self._over.clear()
            try:
                failed = self._resume(client, [state])
            except EngineDeadError:
                return False
            self._custody.begin_trial(state)
        self._fail(failed)
        if client.dead is None and not self._closing.is_set():
            self.wait(max(0.0, give_up - time.monotonic()))
        with self._lock:
            self._running = None
            if state.finished:
                return True
            client.abort([state.key])
        self._settle(client)
        with self._lock:
            if client.dead is not None or self._closing.is_set():
                return False  # the request was in flight
            has_time = state.num_output_tokens >= goal
            self._custody.end_trial(state, passed=has_time)
        return has_time

    def _settle(self, client: EngineClient) -> None:
        """Wait for the core's answer to a call, before which it has sent all output of aborted requests."""
        with self._lock:
            self._over.clear()
            try:
                answer = client.call("status")
            except (EngineDeadError, EngineBusyError):
                return
        answer.add_done_callback(lambda _: self._over.set())
        if not self._closing.is_set():
            self.wait()
