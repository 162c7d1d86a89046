"""Exceptions about other processes, and how an exception crosses a socket: as its text and the name of its type."""

from __future__ import annotations


class EngineDeadError(RuntimeError):
    """The engine core has ended or does not answer; the text is the cause, as far as it is known."""


class EngineBusyError(RuntimeError):
    """The engine core cannot accept a request or call now: it is shutting down, its queue is full, or, for `sleep`,
    requests are unfinished.
    """


class EngineStalledError(EngineBusyError):
    """A limit of time has passed in which a process got too little of a processor to do its work.

    It says nothing about the request: the same one may be sent again.
    """


class RequestError(RuntimeError):
    """The engine core ended this request with an error; other requests are not affected."""


class NotFiniteError(RequestError):
    """The model computed numbers for this request that are NaN or infinite."""


class RequestCrashedEngineError(RequestError):
    """Two engine cores died with this request in flight, at the last one alone: it is not sent to a third."""


class AdapterCrashedWorkerError(RequestError):
    """Workers were lost while they read this adapter, the last ones with nothing beside it: it is read no more."""


class EngineStoppedError(EngineDeadError):
    """The engine core was stopped, as by SIGTERM. No request is the cause."""


class DetachedError(EngineDeadError):
    """The engine core runs, but has dropped this frontend, which was silent or did not read, and its requests."""


class ProtocolError(RuntimeError):
    """A peer sent something that is not a valid message."""


class ModelNotFoundError(ValueError):
    """The model folder does not exist, or the hub does not have the model or could not be reached."""


MAX_ERROR_CHARACTERS = 4000

# The exceptions that keep their type between processes, by the name that messages carry (`error_type`).
ERROR_TYPES: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        ValueError,
        TypeError,
        KeyError,
        RuntimeError,
        NotImplementedError,
        AttributeError,
        MemoryError,
        OSError,
        PermissionError,
        FileNotFoundError,
        TimeoutError,
        ModelNotFoundError,
        EngineBusyError,
        EngineStalledError,
        EngineDeadError,
        RequestError,
        NotFiniteError,
        RequestCrashedEngineError,
        AdapterCrashedWorkerError,
        ProtocolError,
    )
}


def error_type(error: BaseException) -> str:
    """The name in `ERROR_TYPES` under which an exception is sent: of its class or the nearest base class there.

    "RuntimeError" if there is none.
    """
    for kind in type(error).__mro__:
        if ERROR_TYPES.get(kind.__name__) is kind:
            return kind.__name__
    return RuntimeError.__name__


def error_text(error: BaseException) -> str:
    """The text under which an exception is sent: its message, or the name of its class if it has none.

    At most `MAX_ERROR_CHARACTERS` of it: a message may quote what it is about.
    """
    text = str(error) or type(error).__name__
    return text if len(text) <= MAX_ERROR_CHARACTERS else f"{text[:MAX_ERROR_CHARACTERS]} ..."


def received_error(text: str, name: str | None) -> Exception:
    """The exception that another process sent as this text and type; RuntimeError if the type is unknown."""
    return ERROR_TYPES.get(name or "", RuntimeError)(text)
