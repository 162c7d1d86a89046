"""Errors of the worker that another start with the same configuration would repeat."""


class LoadError(ValueError):
    """The model cannot be loaded, or the device not used; the text is shown to users."""


class MemoryShortageError(LoadError):
    """The model does not fit into the memory that is available now; there may be more later."""


def first_line(error: BaseException) -> str:
    """The first line of an error message that may be pages long."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
