"""`pagewire chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagewire.cli.console.options import (
    UsageError,
    add_attach_options,
    add_engine_options,
    add_sampling_options,
    sampling_fields,
)
from pagewire.cli.console.terminal import show

if TYPE_CHECKING:
    from pagewire.ipc.wire.media import MediaInfo

COMMANDS = (
    "/image FILE and /audio FILE add a picture or sound to the next message, /reset starts a new conversation, "
    "/exit or Ctrl-D quits, Ctrl-C stops an answer"
)
KINDS = ("image", "audio")


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("chat", help="talk to a model", description=f"Talk to a model. {COMMANDS}.")
    parser.add_argument("--system", metavar="TEXT", help="system message that begins the conversation")
    for kind, thing in zip(KINDS, ("picture", "sound"), strict=True):
        parser.add_argument(
            f"--{kind}",
            metavar="FILE",
            action="append",
            default=[],
            help=f"file or URL of a {thing} that the first message has; may be repeated",
        )
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
        info = engine.info.media
        parts = [media_part(kind, name, info) for kind in KINDS for name in getattr(options, kind)]
        messages: list[dict[str, Any]] = list(system)
        while (text := read_message()) is not None:
            command, _, name = text.partition(" ")
            if text == "/reset":
                messages, parts = list(system), []
                continue
            if command[1:] in KINDS and command.startswith("/"):
                try:
                    parts.append(media_part(command[1:], name.strip(), info))
                except UsageError as error:
                    show(str(error))
                continue
            content = [*parts, {"type": "text", "text": text}] if parts else text
            messages.append({"role": "user", "content": content})
            parts = []
            try:
                prompt = chat_prompt(tokenizer, messages, media=info)
                answer = async_llm.run(stream(engine, prompt, params))
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


def media_part(kind: str, name: str, info: MediaInfo | None) -> dict[str, Any]:
    """A picture or sound as a part of a message. name: of a file, or a URL. info: what the model takes.

    Raises:
        UsageError: the model takes none, or the file cannot be read.
    """
    if info is None or kind not in info.kinds:
        raise UsageError(f"--{kind}: the model takes no {'pictures' if kind == 'image' else 'sounds'}")
    if "://" in name or name.startswith("data:"):
        return {"type": f"{kind}_url", f"{kind}_url": {"url": name}}
    try:
        return {"type": kind, kind: Path(name).expanduser().read_bytes()}
    except OSError as error:
        raise UsageError(f"--{kind}: {name}: {error.strerror}") from None


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
