"""Methods of workers that the operator brings: those of a class, which `collective_rpc` calls by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagewire.ipc.models.registrations import imported
from pagewire.ipc.quoting import shortened
from pagewire.ipc.wire.calls import CALLS
from pagewire.workers.errors import LoadError

MAX_ERROR = 500  # characters of an exception in the error message


class WorkerExtension:
    """An object of the operator's class in this worker.

    path: import path of the class; empty for none. worker: the argument of its constructor, a `Runner`.

    Raises:
        LoadError: the class cannot be imported or made, or has a method with the name of one in `CALLS`.
    """

    def __init__(self, path: str, worker: object) -> None:
        self._object: Any = None
        if not path:
            return
        try:
            self._object = imported(path)(worker)
        except Exception as error:
            cause = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise LoadError(f"worker_extension: {path}: {shortened(cause, MAX_ERROR)}") from error
        if clash := sorted(set(self.names) & CALLS.keys()):
            raise LoadError(f"worker_extension: {path}: workers have a method {clash[0]} already: rename it")

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
