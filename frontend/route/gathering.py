"""One call to several cores, and their answers as one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

from pagewire.ipc.errors import EngineDeadError

# Calls for monitoring, which a core that hangs must not hold up: seconds after which it is left out.
REPORT_SECONDS = {"metrics": 3.0, "status": 3.0, "requests": 3.0, "check_health": 6.0}
Answers: TypeAlias = Mapping[int, Any]  # by the number of the core


def gather(
    calls: Mapping[int, Future[Any]], merge: Callable[[Answers], Any], seconds: float | None
) -> Future[Any]:
    """The merged answers of several cores, as one future.

    A core that is lost meanwhile is left out, as long as another one answers. Any other error of a core is that of
    all. seconds: cores that have not answered by then are left out, too; None: there is no limit.
    """
    return Gathering(calls, merge, seconds).merged


class Gathering:
    """Waits for the answers of several cores. merged: gets what they come to."""

    def __init__(
        self, calls: Mapping[int, Future[Any]], merge: Callable[[Answers], Any], seconds: float | None
    ) -> None:
        self.merged: Future[Any] = Future()
        self._merge = merge
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
            if (error := done.exception()) is None:
                self._answers[number] = done.result()
            elif self._error is None or isinstance(self._error, EngineDeadError):
                self._error = error
            is_last = not self._missing
        if is_last:
            self._finish()

    def _finish(self) -> None:
        with self._lock:
            answers, error = dict(self._answers), self._error
        with suppress(InvalidStateError):  # it is finished, or was cancelled
            if error is not None and not (answers and isinstance(error, EngineDeadError)):
                self.merged.set_exception(error)
                return
            try:
                self.merged.set_result(self._merge(answers))
            except InvalidStateError:
                raise
            except Exception as failure:  # of any kind: no caller may wait for ever
                self.merged.set_exception(failure)


def merged(method: str, answers: Answers) -> Any:
    """What the answers of several cores to a call come to.

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


def merged_health(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """The health of several cores: alive or ready if one is."""
    alive, ready = (any(report[name] for report in reports) for name in ("alive", "ready"))
    reasons = dict.fromkeys(report["reason"] for report in reports if report["reason"])
    return {"alive": alive, "ready": ready, "reason": "" if ready else "; ".join(reasons)}


def merged_status(answers: Answers) -> dict[str, Any]:
    """The state of several cores: numbers added, truth values if they hold everywhere, frontends joined."""
    first = next(iter(answers.values()))
    result: dict[str, Any] = {}
    for name, value in first.items():
        values = [answer.get(name) for answer in answers.values()]
        if isinstance(value, bool):
            result[name] = all(values)
        elif isinstance(value, (int, float)) and name != "worker_pid":
            result[name] = sum(each for each in values if each is not None)
        elif isinstance(value, list):
            result[name] = [entry for each in values for entry in each]
        else:
            result[name] = value
    return result
