"""Parser for the reasoning that models write before the answer, between tags.

<think>
The user wants ...
</think>

The answer, with calls or without
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pagewire.frontend.server.parsing.call_formats import Format, optional, sequence, tag
from pagewire.frontend.server.parsing.choice import ToolUse
from pagewire.frontend.server.parsing.deltas import CallStart, ContentDelta, Delta, Reasoning
from pagewire.frontend.server.parsing.harmony import CHANNEL, END, FINAL, MESSAGE, Harmony, before_answer
from pagewire.frontend.server.parsing.parser import Parser, PlainText, Reading


@dataclass(frozen=True)
class ReasoningMarks:
    """How a family of models marks its reasoning.

    open, close: texts around it. begun: a reply begins within it, where the prompt does not say otherwise.
    special: the marks are special tokens, which must be kept in the text.
    answer_begin, answer_end: texts around an answer that is no call.
    signs: texts that the chat templates contain, all of them. lacks: texts that they do not contain.
    """

    open: str
    close: str
    signs: tuple[str, ...]
    lacks: tuple[str, ...] = ()
    begun: bool = False
    special: bool = False
    answer_begin: str = ""
    answer_end: str = ""


THINK = ReasoningMarks("<think>", "</think>", ("</think>",))
REASONING = {
    "gpt_oss": ReasoningMarks(
        f"{CHANNEL}analysis{MESSAGE}", END, (CHANNEL, MESSAGE), special=True, answer_begin=FINAL
    ),
    "gemma4": ReasoningMarks("<|channel>thought", "<channel|>", ("<|channel>thought",), special=True),
    "seed_oss": ReasoningMarks("<seed:think>", "</seed:think>", ("<seed:think>",)),
    "mistral": ReasoningMarks("[THINK]", "[/THINK]", ("[THINK]",), special=True),
    "granite": ReasoningMarks(
        "Here is my thought process:", "Here is my response:", ("Here is my thought process:",)
    ),
    "granite_3_3": replace(
        THINK, signs=("<response>", "</think>"), answer_begin="<response>", answer_end="</response>"
    ),
    "minimax_m2": replace(THINK, signs=("minimax:tool_call", "</think>"), begun=True),
    "deepseek_r1": replace(THINK, signs=("<｜Assistant｜>", "</think>"), lacks=("thinking",), begun=True),
    "glm4": replace(THINK, signs=("[gMASK]", "</think>")),
    "qwen3": THINK,
}
"""Formats of reasoning by name, in the order in which they are tried. Harmony has a parser for whole replies."""


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


def thinking(tools: ToolUse, parser: str) -> ToolUse:
    """Return `tools` with reasoning before the answer. parser: a key of `REASONING`.

    Raises:
        ValueError: there is no format with that name.
    """
    if parser not in REASONING:
        raise ValueError(f"reasoning_parser must be one of {', '.join(REASONING)}, got {parser!r}")
    special = tools.marks_are_special or REASONING[parser].special
    return replace(tools, reasoning=parser, marks_are_special=special)


def parser_for(tools: ToolUse, prompt: str, continued: str | None = None) -> Parser | None:
    """Return a new parser of one output; None if it has neither calls nor reasoning.

    prompt, continued: see `begins_within`.
    """
    if tools.reasoning is None:
        return None if tools.new_parser is None else tools.new_parser()
    answer = PlainText() if tools.new_parser is None else tools.new_parser()
    if isinstance(answer, Harmony):
        return answer
    if tools.reasoning == "gpt_oss":
        return Harmony(answer=answer)
    marks = REASONING[tools.reasoning]
    if marks.answer_end:
        answer = Enclosed(answer, marks.answer_begin, marks.answer_end)
    return Thinking(answer, begins_within(tools.reasoning, prompt, continued), marks)


def begins_within(parser: str, prompt: str, continued: str | None = None) -> bool:
    """Return whether the reply to a prompt begins within the reasoning.

    A template may open the reasoning at the end of the prompt, or open and close it to leave it out.

    Args:
        parser: a key of `REASONING`, which decides if the prompt does not.
        prompt: the rendered conversation.
        continued: text of the final message if the reply continues it.
    """
    marks, end = REASONING[parser], prompt.rstrip()
    if end.endswith((marks.open, marks.close)):
        return end.endswith(marks.open)
    if continued is not None:
        return continued.rfind(marks.open) > continued.rfind(marks.close)
    return marks.begun


def reasoning_format(parser: str, prompt: str, continued: str | None = None) -> Format | None:
    """Return the format of the reasoning that comes, or may come, before a constrained answer.

    None: there is none, since the prompt has closed it. Arguments: see `begins_within`.
    """
    if parser == "gpt_oss":
        return before_answer()
    marks = REASONING[parser]
    thought: Format = {"type": "any_text"}
    separator = {"type": "regex", "pattern": r"\s{0,4}"}
    if begins_within(parser, prompt, continued):
        return sequence(tag("", thought, marks.close), separator)
    if prompt.rstrip().endswith(marks.close):
        return None
    return optional(sequence(tag(marks.open, thought, marks.close), separator))
