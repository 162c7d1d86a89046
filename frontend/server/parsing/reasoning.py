"""Parser for the reasoning that models write before the answer, between tags.

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
BEGUN = {
    "deepseek_r1": True,
    "qwen3": False,
}  # formats by name; True: the prompt already contains the opening tag


class Text(Parser):
    """Parser for an answer without calls: all text is content."""

    def read(self) -> Reading[None]:
        yield from self.rest()


class Thinking(Parser):
    """Parser for reasoning followed by an answer. White space around both is a separator and is dropped.

    answer: parser of the answer. begun: the reply begins within the reasoning, without an opening tag.
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
        """Read and emit the reasoning, and read the closing tag."""
        yield from self.space()
        self.drop()
        self._prose = Reasoning
        closed = yield from self.text_until(CLOSE)
        if not closed:
            self._at = len(self._text)
            self.emit_content()
        self._prose, self._blank = Content, []
        yield from self.accept(CLOSE)
        yield from self.space()
        self.drop()

    def finish(self) -> list[Delta]:
        """End the reply, and return the remaining deltas."""
        self._ended = True
        next(self._reading, None)
        return self._take()


def thinking(tools: ToolUse, parser: str) -> ToolUse:
    """Return `tools` with a parser that separates reasoning from the answer. parser: a key of `BEGUN`.

    Raises:
        ValueError: there is no format with that name.
    """
    if parser not in BEGUN:
        raise ValueError(f"reasoning_parser must be one of {', '.join(BEGUN)}, got {parser!r}")
    if tools.schema is not None:
        return tools  # the schema constrains the whole output, so there is no reasoning
    new_answer = tools.new_parser or Text
    return replace(tools, new_parser=lambda: Thinking(new_answer(), BEGUN[parser]))
