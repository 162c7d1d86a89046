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
from pagewire.frontend.server.parsing.messages import MessageReply
from pagewire.frontend.server.parsing.parser import Parser, PlainText, Reading
from pagewire.frontend.server.parsing.reasoning_marks import THINK, ReasoningMarks, marks_named
from pagewire.frontend.server.parsing.template_parser import TemplateParser


class Enclosed(Parser):
    """Parser for an answer between tags, which are left out; an answer without tags is read as it is.

    answer: parser of what stands between them. begin, end: the tags.
    """

    def __init__(self, answer: Parser, begin: str, end: str) -> None:
        self.answer, self._begin, self._end = answer, begin, end
        self.call_marks = answer.call_marks
        super().__init__()

    def read(self) -> Reading[None]:
        yield from self.space()
        if (yield from self.accept(self._begin)):
            yield from self.space()
            self.drop()
        while True:
            place = self._text.find(self._end, self._at)
            self._at = len(self._text) - self._held([self._end]) if place < 0 else place
            self.pass_on()
            if place >= 0:
                yield from self.accept(self._end)
                yield from self.space()
                self.drop()
            elif not (yield from self.more()):
                break
        self._at = len(self._text)
        self.pass_on()
        self._deltas += self.answer.finish()

    def pass_on(self) -> None:
        """Give the pending text to the answer's parser."""
        self._deltas += self.answer.feed(self.pending)
        self.drop()

    def finish(self) -> list[Delta]:
        """End the reply, and return the remaining deltas."""
        self._ended = True
        next(self._reading, None)
        return self.feed("")


class Thinking(Parser):
    """Parser for reasoning followed by an answer. White space around both is a separator and is dropped.

    A call within the reasoning is a part of it. If the reasoning never ends, though, the text from a mark of calls
    on is the answer, provided that there is a call in it; until that is certain, this text is held back.

    answer: parser of the answer. begun: the reply begins within the reasoning, without an opening tag.
    """

    def __init__(self, answer: Parser, begun: bool, marks: ReasoningMarks = THINK) -> None:
        self.answer, self.begun, self.marks = answer, begun, marks
        super().__init__()

    def read(self) -> Reading[None]:
        yield from self.space()
        opened = yield from self.accept(self.marks.open)
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
        close = self.marks.close
        mark = yield from self.text_until(close, *self.answer.call_marks)
        if mark != close:
            closed = bool(mark) and (yield from self.hold_until(close))
            self._at = self._at if closed else len(self._text)
            if closed or not self.emit_calls():
                self.emit_content()
        self._prose, self._blank = ContentDelta, []
        yield from self.accept(close)
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
        return self.feed("")


def thinking(tools: ToolUse, parser: str | ReasoningMarks) -> ToolUse:
    """Return `tools` with reasoning before the answer. parser: its marks, or a key of `REASONING`.

    Raises:
        ValueError: there is no format with that name.
    """
    marks = marks_named(parser) if isinstance(parser, str) else parser
    return replace(tools, reasoning=marks, marks_are_special=tools.marks_are_special or marks.special)


def parser_for(tools: ToolUse, prompt: str, continued: str | None = None) -> Parser | None:
    """Return a new parser of one output; None if it has neither calls nor reasoning.

    prompt, continued: see `begins_within`.
    """
    marks = tools.reasoning
    answer = None if tools.new_parser is None else tools.new_parser()
    if answer is None and marks is not None:
        answer = PlainText() if marks.template is None else TemplateParser(marks.template)
    if isinstance(answer, TemplateParser):
        return answer.after(prompt)
    if marks is None or answer is None or isinstance(answer, MessageReply):
        return answer
    if marks.reply is not None:
        return marks.reply(answer)
    if marks.answer_end:
        answer = Enclosed(answer, marks.answer_begin, marks.answer_end)
    return Thinking(answer, begins_within(marks, prompt, continued), marks)


def begins_within(marks: ReasoningMarks, prompt: str, continued: str | None = None) -> bool:
    """Return whether the reply to a prompt begins within the reasoning.

    A template may open the reasoning at the end of the prompt, or open and close it to leave it out.

    Args:
        marks: of the reasoning; they decide if the prompt does not.
        prompt: the rendered conversation.
        continued: text of the final message if the reply continues it.
    """
    end = prompt.rstrip()
    if end.endswith((marks.open, marks.close)):
        return end.endswith(marks.open)
    if continued is not None:
        return continued.rfind(marks.open) > continued.rfind(marks.close)
    return marks.begun


def reasoning_format(marks: ReasoningMarks, prompt: str, continued: str | None = None) -> Format | None:
    """Return the format of the reasoning that comes, or may come, before a constrained answer.

    None: there is none, since the prompt has closed it. Arguments: see `begins_within`.
    """
    if marks.before is not None:
        return marks.before()
    thought: Format = {"type": "any_text"}
    separator = {"type": "regex", "pattern": r"\s{0,4}"}
    if begins_within(marks, prompt, continued):
        return sequence(tag("", thought, marks.close), separator)
    if prompt.rstrip().endswith(marks.close):
        return None
    return optional(sequence(tag(marks.open, thought, marks.close), separator))
