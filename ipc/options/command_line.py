"""Options as arguments of a command: argparse gets one for each field of a dataclass of options.

`pagewire`'s own commands are made of it, and programs that call `EngineArgs.add_cli_args`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any, get_args, get_origin, get_type_hints

from pagewire.ipc.compatibility import OPTIONS


def flag(name: str) -> str:
    """Return the command line option of a field: `--max-model-len` for `max_model_len`."""
    return "--" + name.replace("_", "-")


def add_options_of(parser: argparse.ArgumentParser, kind: Any, only: tuple[str, ...] | None = None) -> None:
    """Add an option for each field of a dataclass whose fields are declared with `ipc.options.option`.

    only: the groups to add; None for all.
    """
    groups: dict[str, Any] = {}
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        title = field.metadata["group"]
        if only is not None and title not in only:
            continue
        if title not in groups:
            groups[title] = parser.add_argument_group(f"{title} options")
        add_option(groups[title], field, hints[field.name])


def add_option(group: Any, field: dataclasses.Field[Any], hint: Any) -> None:
    """Add the option of one field. It is stored only if it is given, so that a file's value is not overwritten."""
    text = field.metadata["help"].replace("%", "%%")
    default = None if field.default is dataclasses.MISSING else field.default
    if default not in (None, ""):
        text += f" (default: {default})"
    common: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text}
    names = [flag(field.name), *filter(None, [field.metadata["short"]])]
    kinds = {hint} if hint == list[str] else set(get_args(hint)) or {hint}
    if kinds <= {bool, type(None)}:
        group.add_argument(*names, action=argparse.BooleanOptionalAction, **common)
    elif get_origin(hint) is dict:
        group.add_argument(*names, type=json_object, metavar="JSON", **common)
    elif field.metadata["choices"]:
        kind: type = type(field.metadata["choices"][0])
        choices = ",".join(
            map(str, field.metadata["choices"])
        )  # `check_types` says why another value is none
        group.add_argument(*names, type=kind, metavar=f"{{{choices}}}", **common)
    elif bool in kinds:
        group.add_argument(*names, type=true_or_text, metavar="STR", **common)
    elif list[str] in kinds:
        group.add_argument(*names, nargs="+", action=ExtendGiven, metavar="NAME", **common)
    else:
        kind = next((k for k in (int, float) if k in kinds), str)
        group.add_argument(*names, type=kind, metavar=kind.__name__.upper(), **common)


class ExtendGiven(argparse.Action):
    """Collects values of an option that may be repeated; unlike argparse's "extend", without its default."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Add the values to those that were given before."""
        before = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, [*([] if before is self.default else before or []), *values])


def add_absent_options(parser: argparse.ArgumentParser) -> None:
    """Add vLLM's options that pagewire does not have, hidden from `--help`; `settle` is to judge their values.

    One that the parser has already stays.
    """
    for name, absent in OPTIONS.items():
        if flag(name) in parser._option_string_actions:
            continue
        hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        if any(isinstance(value, bool) for value in absent.silent):
            parser.add_argument(flag(name), action=argparse.BooleanOptionalAction, **hidden)
        else:
            parser.add_argument(flag(name), type=json_or_text, **hidden)


def set_defaults_of(parser: argparse.ArgumentParser, kind: Any) -> None:
    """Let parsed arguments have all options of a dataclass, and the absent ones, also those that are not given."""
    absent = {name: row.silent[0] if row.silent else None for name, row in OPTIONS.items()}
    parser.set_defaults(**absent | dataclasses.asdict(kind()))


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object (an argparse type)."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def json_or_text(text: str) -> Any:
    """Parse JSON; text that is not JSON is returned unchanged."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def true_or_text(text: str) -> str | bool:
    """Return True for "true" in any case; other text unchanged."""
    return True if text.lower() == "true" else text
