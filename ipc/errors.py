"""Errors that cross process boundaries or tell of them."""

from __future__ import annotations


class EngineDeadError(RuntimeError):
    """The engine core is gone or does not answer; carries the one cause that is known."""


class EngineBusyError(RuntimeError):
    """The engine core is draining or asleep, and takes no new requests."""


class RequestError(RuntimeError):
    """The engine core ended one request with an error; other requests are unharmed."""


class ProtocolError(RuntimeError):
    """A peer sent something that is not a message of this protocol."""


class ModelNotFoundError(ValueError):
    """No such model folder, or the hub could not be reached for it."""
