"""`pagewire generate`: complete a prompt, streaming to the terminal."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagewire.cli.commands import SUMMARIES
from pagewire.cli.console.options import (
    add_attach_options,
    add_engine_options,
    add_sampling_options,
    sampling_fields,
)
from pagewire.cli.console.parser import UsageError
from pagewire.cli.console.terminal import show

if TYPE_CHECKING:
    from pagewire.frontend.api.async_llm import AsyncLLM
    from pagewire.frontend.text.prompts import PromptType
    from pagewire.ipc.wire.params import SamplingParams


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "generate",
        help=SUMMARIES["generate"],
        description="Complete a prompt, given as an argument, in a file, or on standard input; the text is "
        "printed as it is generated.",
    )
    parser.add_argument("prompt", nargs="?", help="text to complete; '-' or none: read standard input")
    parser.add_argument("--file", type=Path, metavar="FILE", help="read the prompt from a file")
    add_attach_options(parser)
    add_sampling_options(parser, max_tokens=256)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the completion of the prompt."""
    from pagewire.cli.console.engine import opened
    from pagewire.frontend.api import async_llm

    fields = sampling_fields(options)
    prompt = read_prompt(options)
    with opened(options) as engine:
        params = sampling_params(engine, fields)
        async_llm.run(stream(engine, prompt, params))
    print()
    return 0


def read_prompt(options: argparse.Namespace) -> str:
    """Return the prompt from the argument, the file or standard input.

    Raises:
        UsageError: two prompts are given, or none, or the file cannot be read.
    """
    if options.file is not None:
        if options.prompt is not None:
            raise UsageError("give a prompt or --file, not both")
        try:
            return str(options.file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read {options.file}: {error}") from error
    if options.prompt not in (None, "-"):
        return str(options.prompt)
    if sys.stdin is None or (options.prompt is None and sys.stdin.isatty()):
        raise UsageError('give a prompt: pagewire generate "Once upon a time"')
    return sys.stdin.read()


def sampling_params(engine: AsyncLLM, fields: dict[str, Any]) -> SamplingParams:
    """Return the parameters of a model in a terminal with `fields` replaced, for output in deltas.

    Raises:
        UsageError: a value is out of range.
    """
    import msgspec

    from pagewire.frontend.requests.checked_params import local_sampling_params
    from pagewire.ipc.wire.params import RequestOutputKind

    try:
        return msgspec.structs.replace(
            local_sampling_params(engine.info), output_kind=RequestOutputKind.DELTA, **fields
        )
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error


async def stream(engine: AsyncLLM, prompt: PromptType, params: SamplingParams) -> str:
    """Print the output as it is generated and return the whole text."""
    pieces = []
    async for output in engine.generate(prompt, params):
        for completion in output.outputs:
            pieces.append(completion.text)
            show(completion.text, end="")
    return "".join(pieces)
