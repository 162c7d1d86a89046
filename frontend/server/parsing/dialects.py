"""Dialects: how families of models write tool calls, and by which texts in a chat template they are recognized.

A dialect is a row of the table: the signs, the parser of its calls, and the format that constrains them. To add
one, add a row; most need only the marks of `CallMarks` (JSON arguments) or `ParameterMarks` (tagged parameters).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from pagewire.frontend.server.parsing import harmony, llama3_json, mistral
from pagewire.frontend.server.parsing.call_formats import Format, Functions, tags, triggered
from pagewire.frontend.server.parsing.deltas import call_id, short_call_id
from pagewire.frontend.server.parsing.gemma import EscapedCalls, EscapeMarks
from pagewire.frontend.server.parsing.marked_calls import CallMarks, MarkedCalls
from pagewire.frontend.server.parsing.parameter_calls import ParameterCalls, ParameterMarks
from pagewire.frontend.server.parsing.parser import Parser
from pagewire.frontend.server.parsing.pythonic import BARE, Pythonic, PythonicMarks

NewId: TypeAlias = Callable[[], str]
CallsFormat: TypeAlias = Callable[[Functions, bool], Format]


@dataclass(frozen=True)
class Dialect:
    """How a family of models writes tool calls.

    Attributes:
        signs: texts that its chat templates contain, all of them; (): it is not recognized by its template.
        new_parser: returns a parser for calls of some functions, with the ids that a function returns; a flag says
            whether all calls are emitted, or only the first.
        whole_calls: returns the format of calls of some functions and nothing else; the flag as above. It raises
            ValueError if they cannot be written in this dialect.
        text_with_calls: the same for free text in which a call, once begun, is complete and valid.
        marks_are_special: its marks are special tokens, which must be kept in the text.
        new_id: returns an id for a new call. Later requests pass it to the template.
    """

    signs: tuple[str, ...]
    new_parser: Callable[[Functions, NewId, bool], Parser]
    whole_calls: CallsFormat
    text_with_calls: CallsFormat
    marks_are_special: bool = False
    new_id: NewId = call_id


def marked(marks: CallMarks, *signs: str, special: bool = True) -> Dialect:
    """Return the dialect of calls with JSON arguments between marks. signs: the first one begins calls."""
    first = signs[0] if signs else marks.opening or marks.begin
    return tagged(
        lambda _, new_id, parallel: MarkedCalls(marks, new_id, parallel),
        marks.tags,
        first.strip(),
        *signs,
        separator=marks.separator,
        special=special,
    )


def with_parameters(marks: ParameterMarks, *signs: str, special: bool = False) -> Dialect:
    """Return the dialect of calls with parameters between tags."""
    first = marks.opening or marks.call
    return tagged(
        lambda functions, new_id, parallel: ParameterCalls(marks, functions, new_id, parallel),
        marks.tags,
        first.strip(),
        *signs,
        separator=marks.separator,
        special=special,
    )


def pythonic(marks: PythonicMarks, *signs: str, special: bool = True) -> Dialect:
    """Return the dialect of calls in Python syntax between marks."""
    return tagged(
        lambda _, new_id, parallel: Pythonic(marks, new_id, parallel),
        marks.tags,
        marks.begins[0].strip(),
        *signs,
        special=special,
    )


def escaped(marks: EscapeMarks, *signs: str) -> Dialect:
    """Return the dialect of one of Gemma's models."""
    return tagged(
        lambda _, new_id, parallel: EscapedCalls(marks, new_id, parallel),
        marks.tags,
        marks.begin,
        *signs,
        special=True,
    )


def tagged(
    new_parser: Callable[[Functions, NewId, bool], Parser],
    call_tags: Callable[[Functions, bool], list[Format]],
    trigger: str,
    *signs: str,
    separator: str = "",
    special: bool = False,
) -> Dialect:
    """Return a dialect whose calls are tags that begin with `trigger`; without signs, this is its sign."""
    return Dialect(
        signs or (trigger,),
        new_parser,
        lambda functions, parallel: tags(call_tags(functions, parallel), separator, parallel),
        lambda functions, parallel: triggered(call_tags(functions, parallel), [trigger], parallel),
        special,
    )


def bare_pythonic() -> Dialect:
    """Return the dialect of calls in Python syntax that need no mark."""

    def text_with_calls(functions: Functions, parallel: bool) -> Format:
        call_tags = BARE.tags(functions, parallel)
        return triggered(call_tags, [form["begin"] for form in call_tags], parallel)

    return Dialect(
        ("[func_name1(",),
        lambda _, new_id, parallel: Pythonic(BARE, new_id, parallel),
        BARE.whole_calls,
        text_with_calls,
    )


HERMES = CallMarks("<tool_call>\n", "\n</tool_call>", separator="\n")
FUNCTION_TAGS = partial(
    ParameterMarks, "<function=", ">\n", "<parameter=", ">", "</parameter>\n", "</function>\n"
)
XML = FUNCTION_TAGS(opening="<tool_call>\n", closing="</tool_call>", pad="\n")
SEED = FUNCTION_TAGS(opening="<seed:tool_call>\n", closing="</seed:tool_call>")
GLM = ParameterMarks(
    "<tool_call>", "\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>"
)
MINIMAX = ParameterMarks(
    '<invoke name="',
    '">\n',
    '<parameter name="',
    '">',
    "</parameter>\n",
    "</invoke>\n",
    opening="<minimax:tool_call>\n",
    closing="</minimax:tool_call>",
    separator="",
)
DSML = ParameterMarks(
    '<｜DSML｜invoke name="',
    '">\n',
    '<｜DSML｜parameter name="',
    '" string="false">',
    "</｜DSML｜parameter>\n",
    "</｜DSML｜invoke>\n",
    text_key_end='" string="true">',
    opening="<｜DSML｜function_calls>\n",
    closing="</｜DSML｜function_calls>",
    separator="",
)
DEEPSEEK = partial(CallMarks, opening="<｜tool▁calls▁begin｜>", closing="<｜tool▁calls▁end｜>")
DEEPSEEK_V3 = DEEPSEEK(
    "<｜tool▁call▁begin｜>",
    "\n```<｜tool▁call▁end｜>",
    prefix="function<｜tool▁sep｜>",
    middle="\n```json\n",
    separator="\n",
)
DEEPSEEK_V31 = DEEPSEEK("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", middle="<｜tool▁sep｜>")
KIMI = CallMarks(
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    prefix="functions.",
    numbered=True,
    middle="<|tool_call_argument_begin|>",
    opening="<|tool_calls_section_begin|>",
    closing="<|tool_calls_section_end|>",
)
GRANITE = CallMarks("<|tool_call|>", lists=True)
PHI4 = CallMarks("<|tool_call|>", "<|/tool_call|>", lists=True)
INTERN = CallMarks("<|action_start|><|plugin|>\n", "<|action_end|>", arguments="parameters")
JAMBA = CallMarks("<tool_calls>", "</tool_calls>", lists=True)
LFM2 = PythonicMarks(("<|tool_call_start|>",), "<|tool_call_end|>")
OLMO3 = PythonicMarks(("<function_calls>\n",), "", opening="", separator="\n", closing="\n</function_calls>")
FUNCTION_GEMMA = EscapeMarks("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA4 = EscapeMarks("<|tool_call>", "<tool_call|>", '<|"|>')

# In the order in which they are tried: those with longer signs first.
DIALECTS: dict[str, Dialect] = {
    "gpt_oss": Dialect(
        ("<|channel|>", "<|message|>"),
        lambda _, new_id, parallel: harmony.Harmony(new_id, parallel),
        harmony.whole_calls,
        harmony.text_with_calls,
        marks_are_special=True,
    ),
    "kimi_k2": marked(KIMI),
    "deepseek_v32": with_parameters(DSML, "<｜DSML｜", special=True),
    "deepseek_v3": marked(DEEPSEEK_V3, "<｜tool▁calls▁begin｜>", "```json"),
    "deepseek_v31": marked(DEEPSEEK_V31, "<｜tool▁calls▁begin｜>"),
    "minimax_m2": with_parameters(MINIMAX, "minimax:tool_call"),
    "seed_oss": with_parameters(SEED, "seed:tool_call"),
    "glm4_moe": with_parameters(GLM, "<arg_key>"),
    "qwen3_coder": with_parameters(XML, "<tool_call>", "<function="),
    "gemma4": escaped(GEMMA4),
    "functiongemma": escaped(FUNCTION_GEMMA),
    "lfm2": pythonic(LFM2),
    "olmo3": pythonic(OLMO3, special=False),
    "jamba": marked(JAMBA, special=False),
    "phi4_mini": marked(PHI4, "<|tool_call|>", "<|/tool_call|>"),
    "granite": marked(GRANITE),
    "internlm2": marked(INTERN, "<|action_start|>"),
    "hermes": marked(HERMES, special=False),
    "mistral": replace(
        tagged(
            lambda _, new_id, parallel: mistral.Mistral(new_id, parallel),
            mistral.call_tags,
            mistral.MARK,
            special=True,
        ),
        new_id=short_call_id,
    ),
    "pythonic": bare_pythonic(),
    "llama3_json": Dialect(
        ('{"name": ', '"parameters": '),
        lambda _, new_id, parallel: llama3_json.Llama3JSON(new_id, parallel),
        llama3_json.whole_calls,
        llama3_json.text_with_calls,
    ),
}
DIALECTS["json"] = replace(DIALECTS["llama3_json"], signs=())
"""For templates that show tools to the model and say nothing about calls: objects with `name` and `arguments`."""
