"""Exceptions about other processes, and those that are sent between processes by name."""

from __future__ import annotations


class EngineDeadError(RuntimeError):
    """The engine core has ended or does not answer; the text is the cause, as far as it is known."""


class EngineBusyError(RuntimeError):
    """The engine core cannot accept the request now: it is shutting down, asleep, or its queue is full."""


class RequestError(RuntimeError):
    """The engine core ended this request with an error; other requests are not affected."""


class ProtocolError(RuntimeError):
    """A peer sent something that is not a valid message."""


class ModelNotFoundError(ValueError):
    """The model folder does not exist, or the hub does not have the model or could not be reached."""
