"""Parser for the reasoning that models write before the answer, between tags.

<think>
The user wants ...
</think>

The answer, with calls or without
"""

from __future__ import annotations

from dataclasses import replace

from pagewire.frontend.server.parsing.call_formats import Format, optional, sequence, tag
from pagewire.frontend.server.parsing.choice import ToolUse
from pagewire.frontend.server.parsing.deltas import CallStart, ContentDelta, Delta, Reasoning
from pagewire.frontend.server.parsing.parser import Parser, Reading

OPEN, CLOSE = "<think>", "</think>"
# Formats by name. True: a reply begins within the reasoning, where the prompt does not say otherwise.
BEGUN = {"deepseek_r1": True, "qwen3": False}


class PlainText(Parser):
    """Parser for an answer without calls: all text is content."""

    def read(self) -> Reading[None]:
        yield from self.rest()


class Thinking(Parser):
    """Parser for reasoning followed by an answer. White space around both is a separator and is dropped.

    A call within the reasoning is a part of it. If the reasoning never ends, though, the text from a mark of calls
    on is the answer, provided that there is a call in it; until that is certain, this text is held back.

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
        mark = yield from self.text_until(CLOSE, *self.answer.call_marks)
        if mark != CLOSE:
            closed = bool(mark) and (yield from self.hold_until(CLOSE))
            self._at = self._at if closed else len(self._text)
            if closed or not self.emit_calls():
                self.emit_content()
        self._prose, self._blank = ContentDelta, []
        yield from self.accept(CLOSE)
        yield from self.space()
        self.drop()

    def emit_calls(self) -> bool:
        """Emit the pending text, the last of the reply, as the answer if it has calls; return whether it does."""
        deltas = [*self.answer.feed(self.pending), *self.answer.finish()]
        has_calls = any(isinstance(delta, CallStart) for delta in deltas)
        if has_calls:
            self._deltas += deltas
            self.drop()
        return has_calls

    def finish(self) -> list[Delta]:
        """End the reply, and return the remaining deltas."""
        self._ended = True
        next(self._reading, None)
        return self._take()


def thinking(tools: ToolUse, parser: str) -> ToolUse:
    """Return `tools` with reasoning before the answer. parser: a key of `BEGUN`.

    Raises:
        ValueError: there is no format with that name.
    """
    if parser not in BEGUN:
        raise ValueError(f"reasoning_parser must be one of {', '.join(BEGUN)}, got {parser!r}")
    return replace(tools, reasoning=parser)


def parser_for(tools: ToolUse, prompt: str, continued: str | None = None) -> Parser | None:
    """Return a new parser of one output; None if it has neither calls nor reasoning.

    prompt, continued: see `begins_within`.
    """
    if tools.reasoning is None:
        return None if tools.new_parser is None else tools.new_parser()
    answer = PlainText() if tools.new_parser is None else tools.new_parser()
    return Thinking(answer, begins_within(tools.reasoning, prompt, continued))


def begins_within(parser: str, prompt: str, continued: str | None = None) -> bool:
    """Return whether the reply to a prompt begins within the reasoning.

    A template may open the reasoning at the end of the prompt, or open and close it to leave it out.

    Args:
        parser: a key of `BEGUN`, which decides if the prompt does not.
        prompt: the rendered conversation.
        continued: text of the final message if the reply continues it.
    """
    end = prompt.rstrip()
    if end.endswith((OPEN, CLOSE)):
        return end.endswith(OPEN)
    if continued is not None:
        return continued.rfind(OPEN) > continued.rfind(CLOSE)
    return BEGUN[parser]


def reasoning_format(parser: str, prompt: str, continued: str | None = None) -> Format | None:
    """Return the format of the reasoning that comes, or may come, before a constrained answer.

    None: there is none, since the prompt has closed it. Arguments: see `begins_within`.
    """
    separator = {"type": "regex", "pattern": r"\s{0,4}"}
    if begins_within(parser, prompt, continued):
        return sequence(tag("", {"type": "any_text"}, CLOSE), separator)
    if prompt.rstrip().endswith(CLOSE):
        return None
    return optional(sequence(tag(OPEN, {"type": "any_text"}, CLOSE), separator))
