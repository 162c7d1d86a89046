"""Methods of workers that the operator brings: those of a class, which `collective_rpc` calls by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagewire.ipc.models.registrations import import_object
from pagewire.ipc.quoting import shortened
from pagewire.ipc.wire.calls import CALLS
from pagewire.workers.errors import LoadError

MAX_ERROR = 500  # characters of an exception in the error message


class WorkerExtension:
    """An object of the operator's class in this worker. None: there is no such class."""

    def __init__(self, own: Any) -> None:
        self._object = own

    @property
    def names(self) -> list[str]:
        """Names of its methods; those that begin with an underscore are not among them."""
        return [
            name
            for name in dir(self._object)
            if self._object is not None and not name.startswith("_") and callable(getattr(self._object, name))
        ]

    def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call one of the methods by name.

        Raises:
            whatever it raises.
        """
        return getattr(self._object, name)(*args, **kwargs)


class ExtensionClass:
    """The operator's class.

    path: its import path; empty for none.

    Raises:
        LoadError: it cannot be imported.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._class = import_object(path) if path else None
        except Exception as error:
            raise self._refusal(error) from error

    def of(self, worker: object) -> WorkerExtension:
        """Its object for a worker that is whole.

        worker: the argument of its constructor, a `Runner`.

        Raises:
            LoadError: it cannot be made, or has a method with the name of one in `CALLS`.
        """
        if self._class is None:
            return WorkerExtension(None)
        try:
            extension = WorkerExtension(self._class(worker))
        except Exception as error:
            raise self._refusal(error) from error
        if clash := sorted(set(extension.names) & CALLS.keys()):
            raise LoadError(
                f"worker_extension: {self._path}: workers have a method {clash[0]} already: rename it"
            )
        return extension

    def _refusal(self, error: Exception) -> LoadError:
        cause = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        return LoadError(f"worker_extension: {self._path}: {shortened(cause, MAX_ERROR)}")
