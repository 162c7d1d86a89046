"""One call to several cores, and their answers as one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

from pagewire.frontend.route.metrics import relabel_rows
from pagewire.frontend.route.replica import Replica
from pagewire.ipc.errors import EngineDeadError, ProtocolError
from pagewire.ipc.wire.calls import CALLS, HealthReport

logger = logging.getLogger("pagewire.route")

# Calls for monitoring, which a core that hangs must not hold up: seconds after which it is left out.
REPORT_SECONDS = {"metrics": 3.0, "status": 3.0, "requests": 3.0, "check_health": 6.0}
Answers: TypeAlias = Mapping[int, Any]  # by the number of the core
Check: TypeAlias = Callable[[int, Any], Any]


def gather(
    method: str, calls: Mapping[int, Future[Any]], check: Check, merge: Callable[[Answers], Any]
) -> Future[Any]:
    """The merged answers of several cores to a call, as one future.

    A core that is lost meanwhile, or that answers with something of another type, is left out, as long as another
    one answers. In calls for monitoring so is one that hangs or has any other error; else that is the error of all.

    check: returns the answer of a core as it is merged, or raises ProtocolError.
    """
    return Gathering(method, calls, check, merge).merged


class Gathering:
    """Waits for the answers of several cores. merged: gets what they come to."""

    def __init__(
        self, method: str, calls: Mapping[int, Future[Any]], check: Check, merge: Callable[[Answers], Any]
    ) -> None:
        self.merged: Future[Any] = Future()
        self._method, self._check, self._merge = method, check, merge
        seconds = REPORT_SECONDS.get(method)
        self._left_out = (EngineDeadError, ProtocolError) if seconds is None else (Exception,)
        self._answers: dict[int, Any] = {}
        self._error: BaseException | None = None
        self._missing = set(calls)
        self._lock = threading.Lock()
        for number, call in calls.items():
            call.add_done_callback(partial(self._take, number))
        if seconds is not None and not self.merged.done():
            timer = threading.Timer(seconds, self._finish)
            timer.daemon = True
            timer.start()
            self.merged.add_done_callback(lambda _: timer.cancel())

    def _take(self, number: int, done: Future[Any]) -> None:
        with self._lock:
            self._missing.discard(number)
            error = done.exception()
            if error is None:
                try:
                    self._answers[number] = self._check(number, done.result())
                except ProtocolError as wrong:
                    error = wrong
            if error is not None and (self._error is None or isinstance(self._error, self._left_out)):
                self._error = error
            is_over = not self._missing or self._is_known(number)
        if is_over:
            self._finish()

    def _is_known(self, number: int) -> bool:
        """Whether one answer is enough, however long others take: the engine is healthy if a core is, and layouts
        are the same of every core, since they have the same model.
        """
        if self._method == "media_layout":
            return number in self._answers
        return self._method == "check_health" and self._answers.get(number, {}).get("ready", False)

    def _finish(self) -> None:
        with self._lock:
            answers, error = dict(self._answers), self._error
        with suppress(InvalidStateError):  # it is finished, or was cancelled
            if error is not None and not (answers and isinstance(error, self._left_out)):
                self.merged.set_exception(error)
                return
            try:
                self.merged.set_result(self._merge(answers))
            except InvalidStateError:
                raise
            except Exception as failure:  # of any kind: no caller may wait for ever
                self.merged.set_exception(failure)


def check_answer(method: str, replica: Replica, answer: Any) -> Any:
    """The answer of a core to a call, as it is merged with those of others.

    Raises:
        ProtocolError: it is of another type than the call declares, which is logged once.
    """
    try:
        answer = CALLS[method].answer(answer) if method in CALLS else answer
        return relabel_rows(answer, replica.number) if method == "metrics" else answer
    except ProtocolError as error:
        if method not in replica.wrong_answers:
            replica.wrong_answers.add(method)
            logger.error("core %d is left out of answers to %s: %s", replica.number, method, error)
        raise


def merge_answers(method: str, answers: Answers) -> Any:
    """One answer made of those of several cores to a call.

    Lists are joined, truth values hold if they hold everywhere, numbers are added.

    Raises:
        EngineDeadError: no core has answered.
    """
    values = list(answers.values())
    if not values:
        raise EngineDeadError(f"no engine core has answered {method} in time")
    if method == "check_health":
        return merged_health(values)
    if method == "status":
        return merged_status(answers)
    if method == "media_layout":
        return values[0]
    if method == "list_loras":
        return sorted({adapter_id for value in values for adapter_id in value})
    if method == "remove_lora":
        return any(values)
    if all(value is None for value in values):
        return None
    if all(isinstance(value, bool) for value in values):
        return all(values)
    if all(isinstance(value, int) for value in values):
        return sum(values)
    if all(isinstance(value, list) for value in values):
        return [entry for value in values for entry in value]
    return values


def merged_health(reports: list[HealthReport]) -> HealthReport:
    """The health of several cores: alive or ready if one is."""
    ready = any(report["ready"] for report in reports)
    reasons = dict.fromkeys(report["reason"] for report in reports if report["reason"])
    alive = any(report["alive"] for report in reports)
    return HealthReport(alive=alive, ready=ready, reason="" if ready else "; ".join(reasons))


def merged_status(answers: Answers) -> dict[str, Any]:
    """The state of several cores: numbers added, truth values if they hold everywhere, frontends joined.

    Of a value that is of different types in different cores, those of one type count.
    """
    result: dict[str, Any] = {}
    for name in dict.fromkeys(name for answer in answers.values() for name in answer):
        values = [answer[name] for answer in answers.values() if answer.get(name) is not None]
        truths = [value for value in values if isinstance(value, bool)]
        numbers = [value for value in values if isinstance(value, (int, float)) and name != "worker_pid"]
        lists = [value for value in values if isinstance(value, list)]
        if truths:
            result[name] = all(truths)
        elif numbers:
            result[name] = sum(numbers)
        elif lists:
            result[name] = [entry for value in lists for entry in value]
        else:
            result[name] = next(iter(values), None)
    return result
