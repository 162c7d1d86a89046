"""`pagewire chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import sys

from pagewire.cli.options import (
    UsageError,
    add_attach_options,
    add_engine_options,
    add_sampling_options,
    sampling_fields,
)

COMMANDS = "/reset begins anew, /exit or Ctrl-D ends, Ctrl-C stops an answer"


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("chat", help="talk to a model", description=f"Talk to a model. {COMMANDS}.")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    add_attach_options(parser)
    add_sampling_options(parser, max_tokens=512)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Ask and answer until the user has enough."""
    from pagewire.cli.commands.generate import sampling_params, stream
    from pagewire.cli.engine import opened
    from pagewire.frontend import async_llm
    from pagewire.frontend.text.chat_template import chat_prompt

    fields = sampling_fields(options)
    system = [{"role": "system", "content": options.system}] if options.system else []
    with opened(options) as engine:
        tokenizer = engine.session.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            raise UsageError(f"{engine.info.model} has no chat template")
        params = sampling_params(engine, fields)
        print(f"{engine.info.model}: {COMMANDS}")
        messages = list(system)
        while (text := ask()) is not None:
            if text == "/reset":
                messages = list(system)
                continue
            messages.append({"role": "user", "content": text})
            try:
                answer = async_llm.run(stream(engine, chat_prompt(tokenizer, messages), params))
            except KeyboardInterrupt:
                messages.pop()
            except ValueError as error:  # too long by now, or a template that wants other turns
                messages.pop()
                print(f"cannot be asked: {error}", end="")
            else:
                messages.append({"role": "assistant", "content": answer})
            print()
    return 0


def ask() -> str | None:
    """The user's next line that says something; None at the end."""
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
