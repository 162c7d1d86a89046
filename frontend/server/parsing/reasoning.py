"""What models think before they answer, between tags.

<think>
The user wants ...
</think>

The answer, with calls or without
"""

from __future__ import annotations

from dataclasses import replace

from pagewire.frontend.server.parsing.choice import ToolUse
from pagewire.frontend.server.parsing.deltas import Content, Delta, Reasoning
from pagewire.frontend.server.parsing.parser import Parser, Reading

OPEN, CLOSE = "<think>", "</think>"
BEGUN = {"deepseek_r1": True, "qwen3": False}  # whether the prompt has opened the tag already


class Text(Parser):
    """An answer without calls."""

    def read(self) -> Reading[None]:
        yield from self.rest()


class Thinking(Parser):
    """Reasoning, and then an answer that `answer` reads. White space around both sets them apart, and is dropped.

    begun: the reply begins within the reasoning, and need not open it.
    """

    def __init__(self, answer: Parser, begun: bool) -> None:
        self.answer, self.begun = answer, begun
        super().__init__()

    def read(self) -> Reading[None]:
        yield from self.space()
        opened = yield from self.accept(OPEN)
        if opened or self.begun:
            yield from self.reasoning()
        while not (yield from self.at_end()) or self.pending:
            self._at = len(self._text)
            self._deltas += self.answer.feed(self.pending)
            self.drop()
        self._deltas += self.answer.finish()

    def reasoning(self) -> Reading[None]:
        """Read the reasoning and the tag that ends it."""
        yield from self.space()
        self.drop()
        self._prose = Reasoning
        closed = yield from self.text_until(CLOSE)
        if not closed:
            self._at = len(self._text)
            self.pass_content()
        self._prose, self._blank = Content, []
        yield from self.accept(CLOSE)
        yield from self.space()
        self.drop()

    def finish(self) -> list[Delta]:
        """The rest, after the last text."""
        self._ended = True
        next(self._reading, None)
        return self._take()


def thinking(tools: ToolUse, parser: str) -> ToolUse:
    """The same use of tools, by a model that thinks before. parser: one of `BEGUN`.

    Raises:
        ValueError: there is none of that name.
    """
    if parser not in BEGUN:
        raise ValueError(f"reasoning_parser must be one of {', '.join(BEGUN)}, got {parser!r}")
    if tools.schema is not None:
        return tools  # the whole output follows it: there is no room for thoughts
    new_answer = tools.new_parser or Text
    return replace(tools, new_parser=lambda: Thinking(new_answer(), BEGUN[parser]))
