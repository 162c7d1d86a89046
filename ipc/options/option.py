"""An option: the field of a dataclass, from which `--help`, the checks and the YAML file are made."""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

import msgspec

from pagewire.ipc.compatibility import refuse_value


def option(
    default: Any, group: str, text: str, *, choices: tuple[Any, ...] = (), make: Any = None, short: str = ""
) -> Any:
    """A field of a dataclass of options; its metadata is used by `--help` and the checks.

    make: creates the default, if that is mutable. short: another name on the command line, such as "-q".
    """
    metadata = {"group": group, "help": text, "choices": choices, "short": short}
    if make is not None:
        return dataclasses.field(default_factory=make, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check_types(options: Any) -> None:
    """Check types and choices of a dataclass whose fields are made by `option`.

    Raises:
        TypeError: a value of a wrong type. ValueError: a value that is not one of the choices, or is absent.
    """
    hints = get_type_hints(type(options))
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        refuse_value(field.name, value)
        try:
            msgspec.convert(value, hints[field.name])
        except msgspec.ValidationError as error:
            choices = field.metadata["choices"]
            expected = f"one of {', '.join(map(repr, choices))}" if choices else str(error)
            kind = ValueError if choices else TypeError
            raise kind(f"{field.name}: {expected}; got {value!r}") from None
        choices = field.metadata["choices"]
        if choices and value is not None and value not in choices:
            raise ValueError(f"{field.name} must be one of {', '.join(map(str, choices))}, got {value!r}")
