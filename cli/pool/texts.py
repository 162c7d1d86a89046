"""Texts to pool, one in each line of a file or of standard input."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from pagewire.cli.console.parser import UsageError


@dataclass(frozen=True)
class InputText:
    """A text to pool. line: its number in the input, from 1. prompt: the text, or token ids. id: given with it."""

    line: int
    prompt: str | list[int]
    id: str | int | None = None


class JsonText(msgspec.Struct):
    """A JSON object in a line; its other fields are of no concern here."""

    text: str | list[int]
    id: str | int | None = None


_DECODER = msgspec.json.Decoder(str | list[int] | JsonText)


def add_text_options(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the options by which a command reads texts. what: they are, in the plural."""
    parser.add_argument(
        "file", nargs="?", metavar="FILE", help=f"{what}, one per line; '-' or none: read standard input"
    )
    parser.add_argument(
        "--json-lines",
        action="store_true",
        help="each line is JSON: a text, or an object with 'text' and, if there is one, an 'id', which is in the "
        "output too (default: if FILE ends in .jsonl)",
    )
    parser.add_argument(
        "--truncate-prompt-tokens",
        type=int,
        metavar="INT",
        help="cut texts to this many tokens; -1: to what the model takes (default: refuse those that are longer)",
    )
    parser.add_argument("--no-progress", action="store_true", help="no progress bar, which a terminal gets")


@contextmanager
def opened_texts(options: argparse.Namespace) -> Iterator[IO[bytes]]:
    """Yield the file of texts.

    Raises:
        UsageError: there is no such file, or none is given in a terminal. OSError: it cannot be read.
    """
    if options.file not in (None, "-"):
        if not Path(options.file).exists():
            raise UsageError(f"there is no file {options.file}")
        with Path(options.file).open("rb") as file:
            yield file
        return
    if sys.stdin is None or (options.file is None and sys.stdin.isatty()):
        raise UsageError("give a file of texts, or pipe them in")
    yield sys.stdin.buffer


def read_texts(lines: IO[bytes], options: argparse.Namespace) -> Iterator[InputText]:
    """Yield the text of each line.

    Raises:
        ValueError: a line is empty, or not what it should be; the message says which.
    """
    is_json = options.json_lines or (options.file or "").endswith(".jsonl")
    for number, line in enumerate(lines, start=1):
        try:
            text = read_json(line, number) if is_json else InputText(number, line.decode().rstrip("\r\n"))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"line {number}: {error}") from error
        if not text.prompt:
            raise ValueError(f"line {number} is empty")
        yield text


def read_json(line: bytes, number: int) -> InputText:
    """The text in a line of JSON.

    Raises:
        msgspec.DecodeError: it is not JSON, or something else than a text.
    """
    value = _DECODER.decode(line)
    if isinstance(value, JsonText):
        return InputText(number, value.text, value.id)
    return InputText(number, value)


def count_lines(file: IO[bytes]) -> int | None:
    """How many lines a file has; None if it cannot be read twice."""
    if not file.seekable():
        return None
    total = sum(1 for _ in file)
    file.seek(0)
    return total
