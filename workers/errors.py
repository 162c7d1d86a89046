"""Errors of the worker. Another start with the same configuration would repeat most of them."""


class LoadError(ValueError):
    """The model cannot be loaded, or the device not used; the text is shown to users."""


class MemoryShortageError(LoadError):
    """The model does not fit into the memory that is available now; there may be more later."""


class DisprovenError(LoadError):
    """The model as it was transformed has other logits, which all ranks of the group have found."""


class IndivisibleError(LoadError):
    """A model cannot be divided over the ranks of a group, which all of them find by its configuration."""


class LostRankError(RuntimeError):
    """This rank has failed while the others of its group wait for it. Its worker ends, and so all are replaced."""


def first_line(error: BaseException) -> str:
    """The first line of an error message that may be pages long."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
