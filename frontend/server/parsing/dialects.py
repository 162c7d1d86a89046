"""Dialects: how families of models write tool calls, and by which texts in a chat template they are recognized.

A dialect is a row of the table: the signs, the parser of its calls, and the format that constrains them. To add
one, add a row; most need only the marks of `CallMarks` (JSON arguments) or `ParameterMarks` (tagged parameters).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from pagewire.frontend.client import CALL_BEGIN, CALL_END
from pagewire.frontend.server.parsing import harmony, llama3_json, messages, mistral
from pagewire.frontend.server.parsing.call_formats import Format, Functions, tags, trigger_format
from pagewire.frontend.server.parsing.deltas import call_id, short_call_id
from pagewire.frontend.server.parsing.element_calls import MARK, OPENING, ElementCalls, element_tags
from pagewire.frontend.server.parsing.gemma import EscapedCalls, EscapeMarks
from pagewire.frontend.server.parsing.marked_calls import CallMarks, MarkedCalls
from pagewire.frontend.server.parsing.parameter_calls import ParameterCalls, ParameterMarks
from pagewire.frontend.server.parsing.parser import Parser
from pagewire.frontend.server.parsing.pythonic import BARE, Pythonic, PythonicMarks
from pagewire.frontend.server.parsing.response_template import CALLS, ResponseTemplate
from pagewire.frontend.server.parsing.template_parser import TemplateFormat, TemplateParser

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


def marked_dialect(marks: CallMarks, *signs: str, special: bool = True) -> Dialect:
    """Return the dialect of calls with JSON arguments between marks. signs: the first one begins calls."""
    first = signs[0] if signs else marks.opening or marks.begin
    return tagged_dialect(
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
    return tagged_dialect(
        lambda functions, new_id, parallel: ParameterCalls(marks, functions, new_id, parallel),
        marks.tags,
        first.strip(),
        *signs,
        separator=marks.separator,
        special=special,
    )


def pythonic(marks: PythonicMarks, *signs: str, special: bool = True) -> Dialect:
    """Return the dialect of calls in Python syntax between marks."""
    return tagged_dialect(
        lambda _, new_id, parallel: Pythonic(marks, new_id, parallel),
        marks.tags,
        marks.begins[0].strip(),
        *signs,
        special=special,
    )


def escaped_dialect(marks: EscapeMarks, *signs: str) -> Dialect:
    """Return the dialect of one of Gemma's models."""
    return tagged_dialect(
        lambda _, new_id, parallel: EscapedCalls(marks, new_id, parallel),
        marks.tags,
        marks.begin,
        *signs,
        special=True,
    )


def tagged_dialect(
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
        lambda functions, parallel: trigger_format(call_tags(functions, parallel), [trigger], parallel),
        special,
    )


def bare_pythonic() -> Dialect:
    """Return the dialect of calls in Python syntax that need no mark."""

    def text_with_calls(functions: Functions, parallel: bool) -> Format:
        call_tags = BARE.tags(functions, parallel)
        return trigger_format(call_tags, [form["begin"] for form in call_tags], parallel)

    return Dialect(
        ("[func_name1(",),
        lambda _, new_id, parallel: Pythonic(BARE, new_id, parallel),
        BARE.whole_calls,
        text_with_calls,
    )


HERMES = CallMarks(CALL_BEGIN, CALL_END, separator="\n")
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
DSML_V4 = replace(DSML, opening="<｜DSML｜tool_calls>\n", closing="</｜DSML｜tool_calls>")
GCML = ParameterMarks(
    '<｜GCML｜invoke name="',
    '">\n',
    '<｜GCML｜parameter name="',
    '" string="false">',
    "</｜GCML｜parameter>\n",
    "</｜GCML｜invoke>\n",
    text_key_end='" string="true">',
    opening="<｜GCML｜tool_calls>\n",
    closing="</｜GCML｜tool_calls>",
    separator="",
)
DSML_V41 = ParameterMarks(
    '<｜DSML｜ invoke name="',
    '">\n',
    '<｜DSML｜ parameter name="',
    '" string="false">',
    "</｜DSML｜ parameter>\n",
    "</｜DSML｜ invoke>\n",
    text_key_end='" string="true">',
    opening="<｜DSML｜ calls>\n",
    closing="</｜DSML｜ calls>",
    separator="",
)
PAIRS = partial(ParameterMarks, key="<arg_key>", key_end="</arg_key><arg_value>", value_end="</arg_value>")
GLM_47 = PAIRS(call="<tool_call>", name_end="", call_end="</tool_call>")
IQUEST = PAIRS(call="<iquest_tool_call>", name_end="", call_end="</iquest_tool_call>")
HY = partial(
    PAIRS, call="<tool_call>", call_end="</tool_call>", opening="<tool_calls>", closing="</tool_calls>"
)
HY_V3 = HY(name_end="<tool_sep>", separator="")
HY_V4 = HY(name_end="", separator="")
K2_HORIZON = ParameterMarks(
    "<ifm|tool_call>",
    "",
    "<ifm|arg_key>",
    "</ifm|arg_key><ifm|arg_value>",
    "</ifm|arg_value>",
    "</ifm|tool_call>",
    opening="<ifm|tool_calls>",
    closing="</ifm|tool_calls>",
    separator="",
)
DOTS = replace(MINIMAX, opening="<dots_function_call>\n", closing="</dots_function_call>")
STEP3 = ParameterMarks(
    '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
    '">\n',
    '<steptml:parameter name="',
    '">',
    "</steptml:parameter>\n",
    "</steptml:invoke><｜tool_call_end｜>\n",
    opening="<｜tool_calls_begin｜>\n",
    closing="<｜tool_calls_end｜>",
    separator="",
)
MINICPM5 = ParameterMarks(
    '<function name="',
    '">',
    '<param name="',
    '">',
    "</param>",
    "</function>",
    escape=("<![CDATA[", "]]>"),
)
KIMI_K3 = ParameterMarks(
    '<|open|>call tool="',
    '" index="',
    '<|open|>argument key="',
    '" type="',
    "<|close|>argument<|sep|>",
    "<|close|>call<|sep|>",
    index_end='"<|sep|>',
    type_end='"<|sep|>',
    opening="<|open|>tools<|sep|>",
    closing="<|close|>tools<|sep|>",
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
LONGCAT = CallMarks("<longcat_tool_call>", "</longcat_tool_call>", separator="\n")
GRANITE_20B = CallMarks("<function_call> ", separator="\n")
COHERE = CallMarks(
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    lists=True,
    name="tool_name",
    arguments="parameters",
    labels=("tool_call_id",),
)
APERTUS = CallMarks("<|tools_prefix|>", "<|tools_suffix|>", lists=True, keyed=True)
GIGACHAT3 = CallMarks("function call<|role_sep|>\n", others=("<|function_call|>",))
PLAMO3 = CallMarks(
    "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>",
    "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>",
    middle="<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|>"
    "<|plamo:constrain|>json<|plamo:msg|>",
    opening="<|plamo:begin_tool_requests:plamo|>",
    closing="<|plamo:end_tool_requests:plamo|>",
)
LFM2 = PythonicMarks(("<|tool_call_start|>",), "<|tool_call_end|>")
OLMO3 = PythonicMarks(("<function_calls>\n",), "", opening="", separator="\n", closing="\n</function_calls>")
FUNCTION_GEMMA = EscapeMarks("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA4 = EscapeMarks("<|tool_call>", "<tool_call|>", '<|"|>')

# In the order in which they are tried: those with longer signs first.
DIALECTS: dict[str, Dialect] = {
    "gpt_oss": Dialect(
        ("<|channel|>", "<|message|>"),
        lambda _, new_id, parallel: harmony.Harmony(new_id, parallel),
        harmony.harmony_calls,
        harmony.harmony_text,
        marks_are_special=True,
    ),
    "inkling": Dialect(
        (messages.INVOKE,),
        lambda _, new_id, parallel: messages.InklingReply(
            MarkedCalls(messages.INKLING_CALLS, new_id, parallel)
        ),
        messages.inkling_calls,
        messages.inkling_text,
        marks_are_special=True,
    ),
    "muse_glimmer": Dialect(
        ("<atem:function_calls>", "to=self"),
        lambda functions, new_id, parallel: messages.MuseReply(
            ParameterCalls(messages.ATEM_CALLS, functions, new_id, parallel)
        ),
        messages.muse_calls,
        messages.muse_text,
        marks_are_special=True,
    ),
    "kimi_k2": marked_dialect(KIMI),
    "kimi_k3": with_parameters(KIMI_K3, "<|open|>", "<|sep|>", "argument key", special=True),
    "deepseek_v41": with_parameters(DSML_V41, "<｜DSML｜ calls>", special=True),
    "deepseek_v4": with_parameters(DSML_V4, "<｜DSML｜tool_calls>", special=True),
    "gigachat35": with_parameters(GCML, "<｜GCML｜", special=True),
    "gigachat3": marked_dialect(GIGACHAT3, "function call<|role_sep|>"),
    "plamo3": marked_dialect(PLAMO3),
    "step3": with_parameters(STEP3, "steptml:invoke", special=True),
    "cohere_command": marked_dialect(COHERE),
    "apertus": marked_dialect(APERTUS),
    "longcat": marked_dialect(LONGCAT, special=False),
    "dots": with_parameters(DOTS, "dots_function_call"),
    "minicpm5": with_parameters(MINICPM5, '<function name="', '<param name="'),
    "k2_horizon": with_parameters(K2_HORIZON, "<ifm|arg_key>", special=True),
    "iquest_q1": with_parameters(IQUEST, "iquest_tool_call"),
    "deepseek_v32": with_parameters(DSML, "<｜DSML｜", special=True),
    "deepseek_v3": marked_dialect(DEEPSEEK_V3, "<｜tool▁calls▁begin｜>", "```json"),
    "deepseek_v31": marked_dialect(DEEPSEEK_V31, "<｜tool▁calls▁begin｜>"),
    "minimax_m3": tagged_dialect(
        lambda functions, new_id, parallel: ElementCalls(functions, new_id, parallel),
        element_tags,
        OPENING,
        MARK,
        special=True,
    ),
    "minimax_m2": with_parameters(MINIMAX, "minimax:tool_call"),
    "seed_oss": with_parameters(SEED, "seed:tool_call"),
    "hy_v3": with_parameters(HY_V3, "<tool_calls>", "<tool_sep>", "<arg_key>", special=True),
    "hy_v4": with_parameters(HY_V4, "<tool_calls>", "<arg_key>", special=True),
    "glm47": with_parameters(GLM_47, "</arg_key><arg_value>"),
    "glm4_moe": with_parameters(GLM, "<arg_key>"),
    "qwen3_coder": with_parameters(XML, "<tool_call>", "<function="),
    "gemma4": escaped_dialect(GEMMA4),
    "functiongemma": escaped_dialect(FUNCTION_GEMMA),
    "lfm2": pythonic(LFM2),
    "olmo3": pythonic(OLMO3, special=False),
    "jamba": marked_dialect(JAMBA, special=False),
    "phi4_mini": marked_dialect(PHI4, "<|tool_call|>", "<|/tool_call|>"),
    "granite": marked_dialect(GRANITE),
    "granite_20b_fc": marked_dialect(GRANITE_20B, "<function_call>", special=False),
    "internlm2": marked_dialect(INTERN, "<|action_start|>"),
    "hermes": marked_dialect(HERMES, special=False),
    "mistral": replace(
        tagged_dialect(
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
DIALECTS["xlam"] = Dialect(
    (),
    lambda _, new_id, parallel: llama3_json.ListedJSON(new_id, parallel),
    llama3_json.whole_list,
    llama3_json.text_with_list,
)
JSON, PROMPTED = "json", "prompted"
DIALECTS[JSON] = replace(DIALECTS["llama3_json"], signs=())
"""For templates that show tools, and no form of calls: objects with `name` and `arguments`."""
DIALECTS[PROMPTED] = replace(DIALECTS["hermes"], signs=())
"""Our own, for templates that show no tools: `tool_prompts.py` puts them, and how to call one, into the prompt."""
ALIASES = {
    "cohere_command3": "cohere_command",
    "cohere_command4": "cohere_command",
    "ernie45": "hermes",
    "glm45": "glm4_moe",
    "granite-20b-fc": "granite_20b_fc",
    "granite4": "hermes",
    "hunyuan_a13b": "jamba",
    "internlm": "internlm2",
    "ling3": "glm47",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "mimo": "qwen3_coder",
    "nemotron_v3": "qwen3_coder",
    "openai": "gpt_oss",
    "phi4_mini_json": "phi4_mini",
    "poolside_v1": "glm47",
    "qwen3_json": "hermes",
    "qwen3_xml": "qwen3_coder",
    "spark25": "glm47",
    "step3p5": "qwen3_coder",
    "trinity": "hermes",
}
"""Other names for dialects of the table: those of vLLM and SGLang, and families that write as another does."""


def dialect_named(name: str) -> Dialect:
    """Return a dialect.

    Raises:
        ValueError: there is none with that name.
    """
    if (known := ALIASES.get(name, name)) not in DIALECTS:
        raise ValueError(f"tool_call_parser must be one of {', '.join(DIALECTS)}, got {name!r}")
    return DIALECTS[known]


def described_dialect(template: ResponseTemplate) -> Dialect | None:
    """Return the dialect that a checkpoint describes; None if it has no calls."""
    region = template.named(CALLS)
    if region is None or region.open is None:
        return None
    form = TemplateFormat(region)
    return Dialect(
        (),
        lambda functions, new_id, parallel: TemplateParser(template, functions, new_id, parallel),
        lambda functions, parallel: tags(form.tags(functions, parallel), "\n", parallel),
        lambda functions, parallel: trigger_format(form.tags(functions, parallel), [form.trigger], parallel),
        marks_are_special=True,
    )
