"""Engine options on the command line and in a YAML file, made from their one definition."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from pagewire.ipc.options import NOT_SUPPORTED_YET, EngineArgs, unknown_option
from pagewire.ipc.params import SamplingParams


class UsageError(ValueError):
    """A mistake on the command line; told without a traceback."""


class Parser(argparse.ArgumentParser):
    """Tells a mistake in one line, not under the usage of every option, and knows what may have been meant."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse, leaving nothing over. Sub-commands are parsed by this, too."""
        parsed, extra = super().parse_known_args(args, namespace or argparse.Namespace())
        for argument in extra:
            if argument.startswith("--"):
                self.error(unknown_option(argument.split("=")[0], set(self._option_string_actions)))
        if extra:
            self.error(f"unexpected argument {extra[0]!r}")
        return parsed, extra

    def error(self, message: str) -> NoReturn:
        """End with status 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def flag(name: str) -> str:
    """`max_model_len` as `--max-model-len`."""
    return "--" + name.replace("_", "-")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add every option of `EngineArgs`, in its groups, and `--config`."""
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of options; the command line goes before it"
    )
    add_options_of(parser, EngineArgs)
    for name, default in NOT_SUPPORTED_YET.items():  # the engine says which values it takes meanwhile
        hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        if isinstance(default, bool):
            parser.add_argument(flag(name), action=argparse.BooleanOptionalAction, **hidden)
        else:
            parser.add_argument(flag(name), type=json_or_text, **hidden)


def add_options_of(parser: argparse.ArgumentParser, kind: Any, only: tuple[str, ...] | None = None) -> None:
    """Add an option for each field of a dataclass whose fields are made by `option`, in its groups.

    only: the groups to add, if not all.
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
    """Add one option. Nothing is stored unless it is given, so that a file can stand behind it."""
    text = field.metadata["help"].replace("%", "%%")
    default = None if field.default is dataclasses.MISSING else field.default
    if default not in (None, ""):
        text += f" (default: {default})"
    common: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text}
    kinds = {hint} if hint == list[str] else set(get_args(hint)) or {hint}
    if hint is bool:
        group.add_argument(flag(field.name), action=argparse.BooleanOptionalAction, **common)
    elif get_origin(hint) is dict:
        group.add_argument(flag(field.name), type=json_object, metavar="JSON", **common)
    elif field.metadata["choices"]:
        kind: type = int if isinstance(default, int) else str
        group.add_argument(flag(field.name), type=kind, choices=field.metadata["choices"], **common)
    elif bool in kinds:
        group.add_argument(flag(field.name), type=true_or_text, metavar="STR", **common)
    elif list[str] in kinds:
        group.add_argument(flag(field.name), nargs="+", action="extend", metavar="NAME", **common)
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


def json_or_text(text: str) -> Any:
    """A value given as JSON, or else as plain text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def true_or_text(text: str) -> str | bool:
    """`True` for "true"; other text as it is."""
    return True if text.lower() == "true" else text


def positive(text: str) -> int:
    """A whole number from 1."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def seconds(text: str) -> float:
    """A span of time."""
    if not (value := float(text)) >= 0:  # nor is NaN
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text}")
    return value


def given_options(options: argparse.Namespace) -> dict[str, Any]:
    """The engine options that stood on the command line."""
    names = {field.name for field in dataclasses.fields(EngineArgs)} | set(NOT_SUPPORTED_YET)
    return {name: value for name, value in vars(options).items() if name in names}


def engine_args(options: argparse.Namespace) -> EngineArgs:
    """The engine's options: command line over file over default.

    Raises:
        UsageError: the file cannot be read, or an option is unknown or bad.
    """
    config = dataclasses.asdict(read_config(options.config))
    try:
        return EngineArgs.from_kwargs(config | given_options(options))
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error


def read_config(path: str | None) -> EngineArgs:
    """The engine options in a YAML file.

    Raises:
        UsageError: no such file, not a mapping, or an option is unknown or bad.
    """
    return check_config(path, read_file(path))


def check_config(path: str | None, values: dict[str, Any]) -> EngineArgs:
    """The engine options among a file's values.

    Raises:
        UsageError: one is unknown or bad.
    """
    try:
        return EngineArgs.from_kwargs(values)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path}: {error}") from error


def read_file(path: str | None) -> dict[str, Any]:
    """The options in a YAML file by name, which may have dashes or underscores; none, without a file.

    Raises:
        UsageError: no such file, or not a mapping.
    """
    if path is None:
        return {}
    import yaml

    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 (a path as the user typed it)
            values = yaml.safe_load(file)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UsageError(f"{path} must hold a mapping of option names to values")
    return {str(name).replace("-", "_"): values[name] for name in values}


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

    def number(name: str, kind: type, text: str, default: int | None = None) -> None:
        group.add_argument(name, type=kind, metavar=kind.__name__.upper(), default=default, help=text)

    number("--max-tokens", int, "most tokens (default: %(default)s)", max_tokens)
    number("--temperature", float, "0 is greedy (default: the model's, else 1)")
    number("--top-p", float, "nucleus, in (0, 1]")
    number("--top-k", int, "only so many most likely tokens; 0: all")
    number("--min-p", float, "relative to the most likely token, in [0, 1]")
    number("--repetition-penalty", float, "over 1 discourages repetition")
    group.add_argument("--stop", action="append", metavar="TEXT", help="ends the output; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on past the end")


def sampling_fields(options: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given, the engine's `--seed` among them.

    Raises:
        UsageError: a value out of range. It is told before an engine is started.
    """
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
    given = {name: getattr(options, name, None) for name in (*names, "seed")}
    fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    try:
        SamplingParams(**fields)
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
    return fields
