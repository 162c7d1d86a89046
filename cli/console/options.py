"""Options on the command line and in a YAML file, both generated from the dataclasses that define them."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from pagewire.cli.console.parser import UsageError
from pagewire.ipc.compatibility import OPTIONS, settle
from pagewire.ipc.options.command_line import add_absent_options, add_options_of
from pagewire.ipc.options.engine_args import EngineArgs
from pagewire.ipc.wire.params import SamplingParams


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add `--config` and an option for every field of `EngineArgs`, in groups."""
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of options; the command line overrides it"
    )
    add_options_of(parser, EngineArgs)
    add_absent_options(parser)  # `given_options` warns of a value, or refuses it


def positive(text: str) -> int:
    """Parse an integer of at least 1 (an argparse type)."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def seconds(text: str) -> float:
    """Parse a duration in seconds, 0 or more (an argparse type)."""
    if not (value := float(text)) >= 0:  # written so that NaN fails, too
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text}")
    return value


def given_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the engine options that were given on the command line, by field name.

    Those that pagewire does not have are not among them: a warning says so.

    Raises:
        UsageError: an option that pagewire does not have would have an effect.
    """
    given = vars(options)
    try:
        for name in OPTIONS.keys() & given.keys():
            settle(name, given[name], OPTIONS[name])
    except ValueError as error:
        raise UsageError(str(error)) from error
    return {field.name: given[field.name] for field in dataclasses.fields(EngineArgs) if field.name in given}


def engine_args(options: argparse.Namespace) -> EngineArgs:
    """Build the engine's options. The command line overrides the file, and the file the defaults.

    Raises:
        UsageError: the file cannot be read, or an option is unknown or has a bad value.
    """
    config = dataclasses.asdict(read_config(options.config))
    try:
        return EngineArgs.from_kwargs(config | given_options(options))
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error


def read_config(path: str | None) -> EngineArgs:
    """Build the engine's options from a YAML file alone.

    Raises:
        UsageError: the file cannot be read or is not a mapping, or an option is unknown or has a bad value.
    """
    return check_config(path, read_file(path))


def check_config(path: str | None, values: dict[str, Any]) -> EngineArgs:
    """Build the engine's options from the values read from the file at `path`.

    Raises:
        UsageError: an option is unknown or has a bad value.
    """
    try:
        return EngineArgs.from_kwargs(values)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path}: {error}") from error


def read_file(path: str | None, *, dashes: bool = True) -> dict[str, Any]:
    """Read a YAML file of options and return its values by field name; names may be written with dashes.

    dashes: they stand for underscores; else names are as they are.

    Without a file, the result is empty.

    Raises:
        UsageError: the file cannot be read, or is not a mapping.
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
    return {str(name).replace("-", "_") if dashes else str(name): values[name] for name in values}


def add_attach_options(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add the options of commands that can use a running core instead of spawning one.

    several: cores of different models may be used; then `attach` is a list, or None.
    """
    group = parser.add_argument_group("Attaching")
    more = "; may be repeated, for cores of different models" if several else ""
    group.add_argument(
        "--attach",
        metavar="ADDRESS",
        action="append" if several else "store",
        help=f"use the running core at ipc://... or tcp://... instead of starting one{more}",
    )
    add_peer_options(group)


def add_peer_options(group: Any) -> None:
    """Add the options by which a frontend recognizes its core, and proves which frontend it is."""
    group.add_argument(
        "--peer-uid",
        type=int,
        metavar="UID",
        help="user id that the core at an ipc address must have (default: your own, or root's)",
    )
    group.add_argument(
        "--curve-secret", metavar="FILE", help="CURVE encryption: this frontend's NAME.key_secret"
    )
    group.add_argument("--curve-server", metavar="FILE", help="CURVE encryption: the core's NAME.key")


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """Add the common sampling parameters."""
    group = parser.add_argument_group("Sampling options")

    def number(name: str, kind: type, text: str, default: int | None = None) -> None:
        group.add_argument(name, type=kind, metavar=kind.__name__.upper(), default=default, help=text)

    number("--max-tokens", int, "maximum number of tokens to generate (default: %(default)s)", max_tokens)
    number(
        "--temperature",
        float,
        "sampling temperature; 0 is greedy (default: the model's; where it recommends nothing, 0.8, with top-k 40, "
        "top-p 0.95 and min-p 0.05)",
    )
    number(
        "--top-p",
        float,
        "nucleus sampling: keep the most likely tokens with this total probability, in (0, 1]",
    )
    number("--top-k", int, "keep this many of the most likely tokens; 0: all")
    number("--min-p", float, "drop tokens below this share of the highest probability, in [0, 1]")
    number(
        "--repetition-penalty",
        float,
        "divide the logits of tokens already used by this; above 1 discourages repetition",
    )
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="stop when this text appears; may be repeated"
    )
    group.add_argument(
        "--ignore-eos", action="store_true", default=None, help="do not stop at the end-of-sequence token"
    )


def sampling_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters that were given, including the engine's `--seed`.

    Called before an engine is started, so that a mistake costs no model load.

    Raises:
        UsageError: a value is out of range.
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
