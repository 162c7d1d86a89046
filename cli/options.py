"""Engine options on the command line and in a YAML file, made from their one definition."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any, get_args, get_type_hints

from pagewire.ipc.options import LATER, EngineArgs, unknown_option


class UsageError(ValueError):
    """A mistake on the command line; told without a traceback."""


def flag(name: str) -> str:
    """`max_model_len` as `--max-model-len`."""
    return "--" + name.replace("_", "-")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add every option of `EngineArgs`, in its groups, and `--config`."""
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of options; the command line goes before it"
    )
    groups: dict[str, Any] = {}
    hints = get_type_hints(EngineArgs)
    for field in dataclasses.fields(EngineArgs):
        title = field.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(f"{title} options")
        add_option(groups[title], field, hints[field.name])


def add_option(group: Any, field: dataclasses.Field[Any], hint: Any) -> None:
    """Add one option. Nothing is stored unless it is given, so that a file can stand behind it."""
    text = field.metadata["help"].replace("%", "%%")
    default = {} if field.default is dataclasses.MISSING else field.default
    if default not in (None, {}):
        text += f" (default: {default})"
    common: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text}
    kinds = set(get_args(hint)) or {hint}
    if hint is bool:
        group.add_argument(flag(field.name), action=argparse.BooleanOptionalAction, **common)
    elif isinstance(default, dict):
        group.add_argument(flag(field.name), type=json_object, metavar="JSON", **common)
    elif field.metadata["choices"]:
        kind: type = int if isinstance(default, int) else str
        group.add_argument(flag(field.name), type=kind, choices=field.metadata["choices"], **common)
    elif list[str] in kinds:
        group.add_argument(flag(field.name), nargs="+", metavar="NAME", **common)
    else:
        kind = next((k for k in (int, float) if k in kinds), str)
        group.add_argument(flag(field.name), type=kind, metavar=kind.__name__.upper(), **common)


def json_object(text: str) -> dict[str, Any]:
    """A JSON object given as text."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def engine_args(options: argparse.Namespace) -> EngineArgs:
    """The engine's options: command line over file over default.

    Raises:
        UsageError: the file cannot be read, or an option is unknown or bad.
    """
    names = {field.name for field in dataclasses.fields(EngineArgs)}
    given = {name: value for name, value in vars(options).items() if name in names}
    try:
        return EngineArgs.from_kwargs(read_config(options.config) | given)
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error


def read_config(path: str | None) -> dict[str, Any]:
    """The options in a YAML file, with dashes or underscores in their names.

    Raises:
        UsageError: no such file, or not a mapping.
    """
    if path is None:
        return {}
    import yaml

    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 (a path as the user typed it)
            values = yaml.safe_load(file) or {}
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} must hold a mapping of option names to values")
    return {str(name).replace("-", "_"): value for name, value in values.items()}


def refuse_unknown(extra: list[str], known: set[str]) -> None:
    """Say what is wrong with arguments that no option took.

    Raises:
        UsageError: always, if there are any.
    """
    for argument in extra:
        if argument.startswith("--"):
            name = argument[2:].split("=")[0].replace("-", "_")
            if name in LATER:
                raise UsageError(f"{flag(name)} is not supported yet")
            raise UsageError(unknown_option(flag(name), {flag(k) for k in known}))
    if extra:
        raise UsageError(f"unexpected argument {extra[0]!r}")


def add_attach_options(parser: argparse.ArgumentParser) -> None:
    """Options of commands that may use a running core instead of their own."""
    group = parser.add_argument_group("Attaching")
    group.add_argument("--attach", metavar="ADDRESS", help="use the core at ipc://... or tcp://... instead")
    add_curve_options(group)


def add_curve_options(group: Any) -> None:
    """A frontend's CURVE certificates."""
    group.add_argument("--curve-secret", metavar="FILE", help="this frontend's NAME.key_secret, for CURVE")
    group.add_argument("--curve-server", metavar="FILE", help="the core's NAME.key, for CURVE")


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """The usual sampling parameters."""
    group = parser.add_argument_group("Sampling options")
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, help="most tokens (default: %(default)s)"
    )
    group.add_argument("--temperature", type=float, help="0 is greedy (default: the model's, else 1)")
    group.add_argument("--top-p", type=float, help="nucleus, in (0, 1]")
    group.add_argument("--top-k", type=int, help="only so many most likely tokens; 0: all")
    group.add_argument("--min-p", type=float, help="relative to the most likely token, in [0, 1]")
    group.add_argument("--repetition-penalty", type=float, help="over 1 discourages repetition")
    group.add_argument("--stop", action="append", metavar="TEXT", help="ends the output; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on past the end")


def sampling_fields(options: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given, the engine's `--seed` among them."""
    names = (
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "stop",
        "ignore_eos",
    )
    fields = {name: getattr(options, name, None) for name in (*names, "seed")}
    return {name: value for name, value in fields.items() if value is not None}
