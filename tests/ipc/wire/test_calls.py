"""The table of calls, and the methods that it gives to `LLM`, `LLMEngine` and `AsyncLLM`."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from pagewire.engine_core.calls.adapter_control import AdapterControl
from pagewire.engine_core.calls.control import Control
from pagewire.engine_core.calls.media_control import MediaControl
from pagewire.engine_core.calls.peer_control import PeerControl
from pagewire.engine_core.calls.retention_control import RetentionControl
from pagewire.engine_core.calls.weight_updates import WeightUpdates
from pagewire.engine_core.calls.worker_sleep import WorkerSleep
from pagewire.frontend.api.async_llm import AsyncLLM
from pagewire.frontend.api.calls import AsyncEngineCalls
from pagewire.frontend.api.llm import LLM
from pagewire.frontend.api.llm_engine import LLMEngine
from pagewire.ipc.errors import ProtocolError
from pagewire.ipc.wire.calls import CALLS, Caller, EngineCalls, RunsIn

OWNERS = (Control, WorkerSleep, AdapterControl, MediaControl, RetentionControl, PeerControl, WeightUpdates)
METHODS = [name for name in vars(EngineCalls) if not name.startswith("_")]


@pytest.mark.parametrize("name", METHODS)
def test_every_face_has_every_call_as_it_is_declared(name: str) -> None:
    declared = getattr(EngineCalls, name)
    for face in (LLM, LLMEngine, AsyncLLM):
        method = getattr(face, name)
        assert inspect.signature(method) == inspect.signature(declared)
        assert method.__doc__ == declared.__doc__ and method.__name__ == name
        assert inspect.iscoroutinefunction(method) == (face is AsyncLLM)
    assert name in vars(AsyncEngineCalls)


def test_signatures_are_those_of_ordinary_methods() -> None:
    assert (
        str(inspect.signature(LLM.sleep))
        == "(self, level: 'int' = 1, tags: 'list[str] | None' = None) -> 'None'"
    )


def test_the_core_has_the_calls_it_runs_with_the_arguments_that_are_sent() -> None:
    for call in CALLS.values():
        if call.runs_in is not RunsIn.WORKER:
            owner = next(owner for owner in OWNERS if hasattr(owner, call.name))
            parameters = inspect.signature(getattr(owner, call.name)).parameters
            assert list(parameters)[2:] == list(call.sent.parameters), call.name


class Recorder(EngineCalls):
    """Answers each call with `answer`, and keeps what would be sent."""

    def __init__(self, answer: Any = None) -> None:
        self.answer, self.sent = answer, []

    def _answer(self, call: Any, args: Any, kwargs: Any) -> Any:
        self.sent.append((call.name, *call.pack(args, kwargs)))
        return self.answer


def test_arguments_are_sent_by_position_with_their_defaults() -> None:
    calls = Recorder(True)
    calls.sleep()
    calls.sleep(level=2)
    calls.wake_up(("weights",))  # type: ignore[arg-type]
    calls.pause_generation(clear_cache=False)
    assert calls.sent == [
        ("sleep", 1, None),
        ("sleep", 2, None),
        ("wake_up", ["weights"]),
        ("pause", False, False),
    ]
    calls = Recorder([7])
    assert calls.collective_rpc("ping", 5.0, (1,)) == [7]
    assert calls.sent == [("collective_rpc", "ping", (1,), None)]  # no timeout


@pytest.mark.parametrize(
    ("name", "args", "error", "message"),
    [
        ("sleep", (3,), ValueError, "sleep: level must be 1 or 2, got 3"),
        ("sleep", (True,), TypeError, "sleep: level: expected `int`, got `bool`"),
        ("sleep", (1, None, 2), TypeError, "sleep: too many positional arguments"),
        ("wake_up", ("weights",), TypeError, "wake_up: tags: expected `array"),
        ("wake_up", ([1],), TypeError, "wake_up: tags: expected `str`, got `int`"),
        ("collective_rpc", (), TypeError, "collective_rpc: missing a required argument: 'method'"),
        ("collective_rpc", (print,), TypeError, "code never crosses a socket: give a name"),
        ("abort_any", (5,), TypeError, "abort_request: request_id: expected `str`"),
    ],
)
def test_wrong_arguments(name: str, args: tuple[Any, ...], error: type[Exception], message: str) -> None:
    calls = Recorder()
    with pytest.raises(error) as caught:
        getattr(calls, name)(*args)
    assert message in str(caught.value) and not calls.sent


def test_an_answer_of_another_type() -> None:
    assert Recorder(True).is_sleeping() is True
    assert Recorder("ignored").start_profile() is None  # type: ignore[func-returns-value]
    with pytest.raises(ProtocolError, match="the answer to is_sleeping"):
        Recorder("perhaps").is_sleeping()


def test_a_caller_must_define_how_it_waits() -> None:
    with pytest.raises(NotImplementedError):
        Caller()._answer(CALLS["ping"], (), {})
