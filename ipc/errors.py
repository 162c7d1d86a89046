"""Exceptions about other processes, and how an exception crosses a socket: as its text and the name of its type."""

from __future__ import annotations

from collections.abc import Callable


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


class EngineAsleepError(EngineBusyError):
    """The engine sleeps. Call `wake_up` before a call that needs its workers.

    Requests get this error, too, if the engine was started with `while_asleep="refuse"`; else they wait.
    """


class RequestError(RuntimeError):
    """The engine core ended this request with an error; other requests are not affected."""


class NotFiniteError(RequestError):
    """The model computed numbers for this request that are NaN or infinite."""


class RequestCrashedEngineError(RequestError):
    """Two engine cores died with this request in flight, at the last one alone: it is not sent to a third."""


class AdapterCrashedWorkerError(RequestError):
    """Workers were lost while they read this adapter, the last ones with nothing beside it: it is read no more."""


class WeightsChangedError(RequestError):
    """The model got other weights while this request ran (`update_weights` with requests="abort")."""


class EngineStoppedError(EngineDeadError):
    """The engine core was stopped, as by SIGTERM. No request is the cause."""


class DetachedError(EngineDeadError):
    """The engine core runs, but has dropped this frontend, which was silent or did not read, and its requests."""


class ProtocolError(RuntimeError):
    """A peer sent something that is not a valid message."""


class ModelNotFoundError(ValueError):
    """The model folder does not exist, or the hub does not have the model or could not be reached."""


class Field(str):
    """A field, or what it may be, as the library has it in the text of an error: an API may call it otherwise."""

    __slots__ = ()


class FieldError(Exception):
    """A field of a request is not what it may be; raised as `FieldValueError` or `FieldTypeError`.

    Attributes:
        place: the field, as the library has it, with which the text begins: `max_tokens`, `tools[0].function.name`,
            `each of stop_token_ids`.
        problem: the rest of the text, in parts, of which each `Field` is a further field.
    """

    def __init__(self, place: str, *problem: str) -> None:
        super().__init__(place, *problem)
        self.place, self.problem = place, problem

    @property
    def path(self) -> str:
        """The path of the field: the last word of the place."""
        return self.place.rpartition(" ")[2]

    @property
    def param(self) -> str:
        """The name of the field, without what is within it."""
        return root_of(self.path)

    def worded(self, name: Callable[[str], str]) -> str:
        """The text, with other names of fields. name: returns an API's name of one of ours."""
        before = self.place.removesuffix(self.path)
        rest = "".join(name(part) if isinstance(part, Field) else part for part in self.problem)
        return f"{before}{name(self.path)}{'' if rest[:1] in ':=.[,' else ' '}{rest}"

    def __str__(self) -> str:
        return self.worded(str)


class FieldValueError(FieldError, ValueError):
    """A field of a request has a value that it may not have."""


class FieldTypeError(FieldError, TypeError):
    """A field of a request has a value of another type."""


def root_of(path: str) -> str:
    """The field of a request at which a path begins: `tools` of `tools[0].function.name`."""
    return path.partition(".")[0].partition("[")[0]


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
        EngineAsleepError,
        EngineDeadError,
        RequestError,
        NotFiniteError,
        RequestCrashedEngineError,
        AdapterCrashedWorkerError,
        WeightsChangedError,
        ProtocolError,
    )
}


# Those that say which field of a request they are about, by the type under which they cross.
FIELD_ERRORS: dict[type[Exception], type[FieldError]] = {
    ValueError: FieldValueError,
    TypeError: FieldTypeError,
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


def error_place(error: BaseException) -> str | None:
    """The place of the field that an exception is about; None: about none."""
    return error.place if isinstance(error, FieldError) else None


def received_error(text: str, name: str | None, place: str | None = None) -> Exception:
    """The exception that another process sent as this text and type; RuntimeError if the type is unknown.

    place: what `error_place` returned there.
    """
    kind = ERROR_TYPES.get(name or "", RuntimeError)
    if place and text.startswith(place) and kind in FIELD_ERRORS:
        return FIELD_ERRORS[kind](place, text[len(place) :].removeprefix(" "))
    return kind(text)
