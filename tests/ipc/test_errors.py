"""The types of exceptions between processes."""

from __future__ import annotations

import copy
import json

import pytest

from pagewire.ipc.errors import (
    ERROR_TYPES,
    EngineBusyError,
    EngineDeadError,
    Field,
    FieldError,
    FieldTypeError,
    FieldValueError,
    ModelNotFoundError,
    error_place,
    error_text,
    error_type,
    received_error,
)


class OwnError(ModelNotFoundError):
    """An error of one process, whose base class all know."""


class RuntimeErrorOfAnother(Exception):
    """An error without a base class that others know."""


RuntimeErrorOfAnother.__name__ = "ValueError"


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (ValueError("x"), "ValueError"),
        (ModelNotFoundError("x"), "ModelNotFoundError"),
        (OwnError("x"), "ModelNotFoundError"),
        (json.JSONDecodeError("x", "", 0), "ValueError"),
        (FileNotFoundError("x"), "FileNotFoundError"),
        (ConnectionResetError("x"), "OSError"),
        (EngineBusyError("x"), "EngineBusyError"),
        (IndexError("x"), "RuntimeError"),
        (KeyboardInterrupt(), "RuntimeError"),
        (RuntimeErrorOfAnother("x"), "RuntimeError"),
    ],
)
def test_an_error_is_sent_as_the_nearest_type_that_all_know(error: BaseException, name: str) -> None:
    assert error_type(error) == name


@pytest.mark.parametrize("kind", ERROR_TYPES.values())
def test_a_known_type_arrives_as_it_was(kind: type[Exception]) -> None:
    received = received_error("why", error_type(kind("why")))
    assert type(received) is kind and received.args == ("why",)


@pytest.mark.parametrize("name", [None, "", "SystemExit", "object", "NoSuchError"])
def test_an_unknown_type_arrives_as_a_runtime_error(name: str | None) -> None:
    received = received_error("ValueError: protocol", name)
    assert type(received) is RuntimeError and str(received) == "ValueError: protocol"


def test_an_error_without_a_text_has_its_name() -> None:
    assert (error_text(EngineDeadError()), error_text(EngineDeadError("why"))) == ("EngineDeadError", "why")


@pytest.mark.parametrize(
    ("error", "text", "param"),
    [
        (FieldValueError("n", "must be at least 1, got 0"), "n must be at least 1, got 0", "n"),
        (FieldTypeError("seed", ": Expected `int`"), "seed: Expected `int`", "seed"),
        (FieldValueError("n", "=9 is over 8"), "n=9 is over 8", "n"),
        (FieldValueError("each of stop", "must be text"), "each of stop must be text", "stop"),
        (
            FieldValueError("tools[3].function.name", "is missing"),
            "tools[3].function.name is missing",
            "tools",
        ),
        (
            FieldValueError("min_tokens", "must be at most ", Field("max_tokens"), "=5, got 9"),
            "min_tokens must be at most max_tokens=5, got 9",
            "min_tokens",
        ),
    ],
)
def test_an_error_of_a_field_crosses_with_it(error: FieldError, text: str, param: str) -> None:
    assert (str(error), error.param) == (text, param)
    for copied in (type(error)(*error.args), copy.copy(error)):
        assert (type(copied), str(copied), copied.place) == (type(error), text, error.place)
    again = received_error(error_text(error), error_type(error), error_place(error))
    assert type(again) is type(error) and isinstance(again, FieldError)
    assert (str(again), again.place) == (text, error.place)


def test_a_place_that_the_text_does_not_begin_with_is_left_out() -> None:
    assert error_place(ValueError("n must be 1")) is None
    for name, place in (("ValueError", "seed"), ("ValueError", ""), ("EngineBusyError", "n"), (None, "n")):
        assert not isinstance(received_error("n must be 1", name, place), FieldError)
