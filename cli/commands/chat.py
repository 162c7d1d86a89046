"""`pagewire chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from pagewire.cli.chat.conversation import KINDS, NAMES, TypedConversation
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
    from pagewire.frontend.server.parsing.parser import Parser
    from pagewire.frontend.text.prompts import TokensPrompt
    from pagewire.ipc.wire.params import SamplingParams

INTRODUCTION = "/help lists commands, Ctrl-C stops an answer, Ctrl-D quits"


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "chat", help=SUMMARIES["chat"], description=f"Talk to a model. {INTRODUCTION}."
    )
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
    from pagewire.cli.chat.lines import Lines
    from pagewire.cli.commands.generate import sampling_params
    from pagewire.cli.console.engine import opened

    fields = sampling_fields(options)
    with opened(options) as engine:
        talk = Talk(engine, sampling_params(engine, fields))
        show(f"{engine.info.model}: {INTRODUCTION}")
        conversation = TypedConversation(options.system or "", engine.info.media, talk.answer, talk.count)
        for kind in KINDS:
            for name in getattr(options, kind):
                conversation.attach(kind, name)
        lines = Lines(NAMES)
        try:
            while (line := lines.read()) not in (None, "/exit", "/quit"):
                conversation.take(str(line))
        finally:
            lines.close()
    return 0


class Talk:
    """Answers of an engine's model, shown while they come.

    Raises:
        UsageError: the model has no chat template.
    """

    def __init__(self, engine: AsyncLLM, params: SamplingParams) -> None:
        import msgspec

        from pagewire.frontend.server.parsing.choice import ToolUse
        from pagewire.frontend.server.parsing.detection import reply_formats
        from pagewire.frontend.server.parsing.reasoning import thinking

        tokenizer = engine.session.intake.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            raise UsageError(f"{engine.info.model} has no chat template")
        self._engine, self._tokenizer = engine, tokenizer
        template = tokenizer.chat_template
        source = template if isinstance(template, str) else str(template.get("default", ""))
        found = reply_formats(source, engine.info.architecture, tools="none").reasoning
        self._formats = ToolUse() if found is None else thinking(ToolUse(), found)
        if self._formats.marks_are_special:
            params = msgspec.structs.replace(params, skip_special_tokens=False)
        self._params = params

    def count(self, messages: list[Any]) -> tuple[int, int]:
        """The number of tokens of a conversation, and the most that there may be."""
        ids = self._prompt(messages)["prompt_token_ids"] if messages else []
        return len(ids), self._engine.info.max_model_len

    def answer(self, messages: list[Any]) -> str | None:
        """Show an answer, and return it; None if there is none, or not the whole."""
        from pagewire.frontend.api import async_llm
        from pagewire.frontend.server.parsing.reasoning import parser_for

        try:
            prompt = self._prompt(messages)
            parser = parser_for(self._formats, prompt.get("prompt", ""))
            return async_llm.run(self._stream(prompt, parser))
        except KeyboardInterrupt:
            return None
        except (
            ValueError
        ) as error:  # the conversation is too long, or the template does not allow these turns
            show(f"cannot send this message: {error}")
            return None

    def _prompt(self, messages: list[Any]) -> TokensPrompt:
        from pagewire.frontend.text.chat_template import chat_prompt

        return chat_prompt(self._tokenizer, messages, media=self._engine.info.media)

    async def _stream(self, prompt: TokensPrompt, parser: Parser | None) -> str:
        from pagewire.cli.chat.screen import new_screen
        from pagewire.frontend.server.parsing.deltas import ContentDelta, Reasoning

        screen, pieces = new_screen(), []
        try:
            async for output in self._engine.generate(prompt, self._params):
                (part,) = output.outputs
                pieces.append(part.text)
                deltas: list[Any] = [ContentDelta(part.text)] if parser is None else parser.feed(part.text)
                if parser is not None and part.finished():
                    deltas += parser.finish()
                for delta in deltas:
                    if isinstance(delta, Reasoning):
                        screen.thought(delta.text)
                    elif isinstance(delta, ContentDelta):
                        screen.text(delta.text)
        finally:
            screen.end()
        return "".join(pieces)
