"""`pagewire chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import sys

from pagewire.cli.commands import SUMMARIES
from pagewire.cli.console.options import (
    add_attach_options,
    add_engine_options,
    add_sampling_options,
    sampling_fields,
)
from pagewire.cli.console.parser import UsageError
from pagewire.cli.console.terminal import show

COMMANDS = "/reset starts a new conversation, /exit or Ctrl-D quits, Ctrl-C stops an answer"


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("chat", help=SUMMARIES["chat"], description=f"Talk to a model. {COMMANDS}.")
    parser.add_argument("--system", metavar="TEXT", help="system message that begins the conversation")
    add_attach_options(parser)
    add_sampling_options(parser, max_tokens=512)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Read messages and print answers until the user quits."""
    from pagewire.cli.commands.generate import sampling_params, stream
    from pagewire.cli.console.engine import opened
    from pagewire.frontend.api import async_llm
    from pagewire.frontend.text.chat_template import chat_prompt

    fields = sampling_fields(options)
    system = [{"role": "system", "content": options.system}] if options.system else []
    with opened(options) as engine:
        tokenizer = engine.session.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            raise UsageError(f"{engine.info.model} has no chat template")
        params = sampling_params(engine, fields)
        show(f"{engine.info.model}: {COMMANDS}")
        messages = list(system)
        while (text := read_message()) is not None:
            if text == "/reset":
                messages = list(system)
                continue
            messages.append({"role": "user", "content": text})
            try:
                answer = async_llm.run(stream(engine, chat_prompt(tokenizer, messages), params))
            except KeyboardInterrupt:
                messages.pop()
            except (
                ValueError
            ) as error:  # the conversation is too long, or the template does not allow these turns
                messages.pop()
                show(f"cannot send this message: {error}", end="")
            else:
                messages.append({"role": "assistant", "content": answer})
            print()
    return 0


def read_message() -> str | None:
    """Return the user's next line that is not empty; None when the user quits."""
    while sys.stdin is not None:
        try:
            text = input("> ").strip()
        except EOFError:
            print()
            return None
        if text in ("/exit", "/quit"):
            return None
        if text:
            return text
    return None
