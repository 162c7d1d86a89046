"""One call to several cores: their answers as one, and cores that do not answer."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from pagewire.frontend.route.gathering import REPORT_SECONDS, Check, gather, merge_answers
from pagewire.ipc.errors import EngineDeadError, ProtocolError
from tests.frontend.conftest import PATIENCE


def answered(value: Any) -> Future[Any]:
    """A call that is answered already."""
    future: Future[Any] = Future()
    if isinstance(value, BaseException):
        future.set_exception(value)
    else:
        future.set_result(value)
    return future


def gathered(method: str, *calls: Future[Any], check: Check = lambda number, answer: answer) -> Future[Any]:
    """What calls to several cores come to."""
    return gather(method, dict(enumerate(calls)), check, lambda answers: merge_answers(method, answers))


def test_answers_of_several_cores_come_as_one() -> None:
    def of(method: str, *answers: Any) -> Any:
        return gathered(method, *map(answered, answers)).result(PATIENCE)

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


def test_a_core_that_hangs_is_left_out_of_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REPORT_SECONDS, "metrics", 0.01)
    hanging: Future[Any] = Future()
    report = gathered("metrics", answered([1]), hanging)
    assert report.result(PATIENCE) == [1]
    hanging.set_result([2])  # too late, and harmless
    nothing: Future[Any] = Future()
    with pytest.raises(EngineDeadError, match="no engine core has answered metrics in time"):
        gathered("metrics", nothing).result(PATIENCE)


def test_a_layout_is_known_as_soon_as_one_core_has_said_it() -> None:
    slow: Future[Any] = Future()
    layout = gathered("media_layout", slow, answered({"token_ids": [1]}))
    assert layout.result(PATIENCE) == {"token_ids": [1]}
    slow.set_exception(ValueError("too late, and harmless"))
    with pytest.raises(ValueError, match="no room"):
        gathered("media_layout", *(answered(ValueError("no room")) for _ in range(2))).result(PATIENCE)


def test_the_health_is_known_as_soon_as_one_core_is_ready() -> None:
    healthy, hanging = {"alive": True, "ready": True, "reason": ""}, Future[Any]()
    calls = [hanging, answered({"alive": False, "ready": False, "reason": "x"}), answered(healthy), hanging]
    report = gathered("check_health", *calls)
    assert report.done() and report.result() == healthy


def test_an_answer_of_another_type_is_left_out() -> None:
    def check(number: int, answer: Any) -> Any:
        if not isinstance(answer, bool):
            raise ProtocolError(f"core {number} answers {answer!r}")
        return answer

    assert gathered("is_paused", answered(7), answered(True), check=check).result(PATIENCE) is True
    with pytest.raises(ProtocolError, match="core 0 answers 'yes'"):
        gathered("is_paused", answered("yes"), check=check).result(PATIENCE)


def test_an_error_of_one_core_hides_no_report_of_others() -> None:
    refused, sleeping = answered(PermissionError("no")), answered([{"request_id": "r"}])
    assert gathered("requests", refused, sleeping).result(PATIENCE) == [{"request_id": "r"}]
    with pytest.raises(PermissionError):
        gathered("requests", refused).result(PATIENCE)
    with pytest.raises(PermissionError):
        gathered("sleep", refused, answered(None)).result(PATIENCE)


def test_values_of_several_types_do_not_hide_a_status() -> None:
    status = [{"running": "many", "paused": 3}, {"running": 2, "paused": False, "clients": [1]}, {}]
    assert gathered("status", *map(answered, status)).result(PATIENCE) == {
        "running": 2,
        "paused": False,
        "clients": [1],
    }
