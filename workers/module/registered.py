"""Models of one's own in a worker: it takes what the core has registered, and finds the class of a configuration.

Imports no torch itself; the classes do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagewire.ipc.models.plugins import load_plugins
from pagewire.ipc.models.registrations import Registrations, adopt, import_object, model_path
from pagewire.workers.errors import LoadError


def take_registrations(registrations: Registrations) -> None:
    """Load the plugins that the core has loaded, and register its models and families in this process.

    Raises:
        LoadError: a plugin is not installed here, or fails.
    """
    try:
        load_plugins(registrations.plugins)
    except ValueError as error:
        raise LoadError(f"{error}; the core has loaded it, so each of its workers must") from error
    adopt(registrations)


def registered_class(values: Mapping[str, Any]) -> Any:
    """The class that is registered for a config.json, a `PreTrainedModel`; None if there is none.

    Raises:
        LoadError: it cannot be imported, or is no such class.
    """
    if (path := model_path(values)) is None:
        return None
    from transformers import PreTrainedModel

    try:
        own = import_object(path)
    except ValueError as error:
        raise LoadError(str(error)) from error
    if not (isinstance(own, type) and issubclass(own, PreTrainedModel)):
        raise LoadError(
            f"{path} is registered as a model, but is no PreTrainedModel of transformers: derive it from that "
            "class (docs/own_models.md)"
        )
    if getattr(own, "config_class", None) is None:
        raise LoadError(f"{path} has no config_class: name the class of its configuration there")
    return own
