"""The types of exceptions between processes."""

from __future__ import annotations

import json

import pytest

from pagewire.ipc.errors import (
    ERROR_TYPES,
    EngineBusyError,
    EngineDeadError,
    ModelNotFoundError,
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
