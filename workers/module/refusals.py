"""The errors for models that are not served; also of what goes wrong in a model's own code while it is loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pagewire.workers.errors import LoadError, first_line

logger = logging.getLogger("pagewire.worker")

REMEDY = (
    ". This is the code of its repository, which runs since nothing else serves the model: register a class or a "
    "table of weights for it (docs/own_models.md), or take a model of a type that is served (docs/models.md)"
)


def refuse(config: Any, reason: str) -> LoadError:
    """The error for an unsupported architecture; for one that runs its repository's code, with what would help."""
    name = (getattr(config, "architectures", None) or [config.model_type])[0]
    remedy = REMEDY if getattr(config, "auto_map", None) else ""
    return LoadError(f"{name} is not supported: {reason}{remedy}")


@contextmanager
def refusals(model_path: str, *, alone: bool) -> Iterator[None]:
    """A context in which an exception of the model's code becomes a `LoadError`, with its traceback in the log.

    Errors of the machine, which another start may not meet, stay as they are.

    alone: the model runs in one worker on the CPU, so that no `RuntimeError` comes from a GPU or another rank.

    Raises:
        LoadError: the model's code fails; the text says how, and what to do.
    """
    try:
        yield
    except (LoadError, OSError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError) and not alone:
            raise
        logger.warning("the code of %s has failed", model_path, exc_info=error)
        raise LoadError(
            f"{model_path} is not supported: its code fails while it is loaded ({type(error).__name__}: "
            f"{first_line(error)}). The worker's log has the traceback; take another version of transformers, or "
            "a model of a type that is served (docs/models.md)"
        ) from error
