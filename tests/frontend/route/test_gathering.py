"""One call to several cores: their answers as one, and cores that do not answer."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from pagewire.frontend.route.gathering import gather, merged
from pagewire.ipc.errors import EngineDeadError

from ..conftest import PATIENCE


def answered(value: Any) -> Future[Any]:
    """A call that is answered already."""
    future: Future[Any] = Future()
    if isinstance(value, BaseException):
        future.set_exception(value)
    else:
        future.set_result(value)
    return future


def test_answers_of_several_cores_come_as_one() -> None:
    def of(method: str, *answers: Any, seconds: float | None = None) -> Any:
        calls = {number: answered(answer) for number, answer in enumerate(answers)}
        return gather(calls, lambda answers: merged(method, answers), seconds).result(PATIENCE)

    assert of("is_paused", True, False) is False
    assert of("abort_request", 1, 2) == 3
    assert of("collective_rpc", ["a"], ["b"]) == ["a", "b"]
    assert of("resume", None, None) is None
    assert of("list_loras", [1, 3], [2, 3]) == [1, 2, 3]
    assert of("remove_lora", True, False) is True  # one core may not have been able to load it
    assert of("is_sleeping", True, EngineDeadError("lost")) is True  # the lost one is left out
    with pytest.raises(ValueError, match="no"):
        of("sleep", None, ValueError("no"), EngineDeadError("lost"))
    with pytest.raises(EngineDeadError):
        of("sleep", EngineDeadError("lost"))
    health = [
        {"alive": True, "ready": False, "reason": "asleep"},
        {"alive": False, "ready": False, "reason": "x"},
    ]
    assert of("check_health", *health) == {"alive": True, "ready": False, "reason": "asleep; x"}
    status = [{"model": "m", "running": 1, "paused": True, "clients": [1]}] * 2
    assert of("status", *status) == {"model": "m", "running": 2, "paused": True, "clients": [1, 1]}


def test_a_core_that_hangs_is_left_out_of_reports() -> None:
    hanging: Future[Any] = Future()
    report = gather({0: answered([1]), 1: hanging}, lambda answers: merged("metrics", answers), 0.01)
    assert report.result(PATIENCE) == [1]
    hanging.set_result([2])  # too late, and harmless
    nothing: Future[Any] = Future()
    with pytest.raises(EngineDeadError, match="no engine core has answered metrics in time"):
        gather({0: nothing}, lambda answers: merged("metrics", answers), 0.01).result(PATIENCE)
