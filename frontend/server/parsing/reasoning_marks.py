"""Marks of the reasoning that models write before the answer, and by which texts of a template they are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pagewire.frontend.server.parsing import harmony, messages
from pagewire.frontend.server.parsing.call_formats import Format
from pagewire.frontend.server.parsing.harmony import CHANNEL, END, FINAL, MESSAGE
from pagewire.frontend.server.parsing.parser import Parser
from pagewire.frontend.server.parsing.response_template import REASONING_NAMES, ResponseTemplate


@dataclass(frozen=True)
class ReasoningMarks:
    """How a family of models marks its reasoning.

    open, close: texts around it. begun: a reply begins within it, where the prompt does not say otherwise.
    special: the marks are special tokens, which must be kept in the text.
    answer_begin, answer_end: texts around an answer that is no call.
    template: the description of whole replies that the marks are from.
    reply: returns the parser of replies that are messages, given that of the answer. before: returns the format of
        the messages before it.
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
    template: ResponseTemplate | None = None
    reply: Callable[[Parser], Parser] | None = None
    before: Callable[[], Format] | None = None


THINK = ReasoningMarks("<think>", "</think>", ("</think>",))
COHERE = ReasoningMarks(
    "<|START_THINKING|>", "<|END_THINKING|>", ("<|START_THINKING|>", "<|START_RESPONSE|>"), special=True
)
GPT_OSS = ReasoningMarks(
    f"{CHANNEL}analysis{MESSAGE}",
    END,
    (CHANNEL, MESSAGE),
    special=True,
    answer_begin=FINAL,
    reply=lambda answer: harmony.Harmony(answer=answer),
    before=harmony.before_answer,
)
REASONING = {
    "gpt_oss": GPT_OSS,
    "inkling": ReasoningMarks(
        messages.THINKING,
        messages.END_MESSAGE,
        (messages.THINKING,),
        special=True,
        answer_begin=messages.TEXT,
        reply=lambda answer: messages.InklingReply(answer=answer),
        before=messages.inkling_before,
    ),
    "muse_glimmer": ReasoningMarks(
        "to=self<|message|>",
        messages.END_OF_MESSAGE,
        ("to=self", messages.END_OF_MESSAGE),
        special=True,
        answer_begin=" to=user<|message|>",
        reply=lambda answer: messages.MuseReply(answer=answer),
        before=messages.muse_before,
    ),
    "gemma4": ReasoningMarks("<|channel>thought", "<channel|>", ("<|channel>thought",), special=True),
    "seed_oss": ReasoningMarks("<seed:think>", "</seed:think>", ("<seed:think>",)),
    "mistral": ReasoningMarks("[THINK]", "[/THINK]", ("[THINK]",), special=True),
    "granite": ReasoningMarks(
        "Here is my thought process:", "Here is my response:", ("Here is my thought process:",)
    ),
    "ernie45": replace(
        THINK,
        signs=("<response>\n", "</think>"),
        begun=True,
        answer_begin="<response>",
        answer_end="</response>",
    ),
    "granite_3_3": replace(
        THINK, signs=("<response>", "</think>"), answer_begin="<response>", answer_end="</response>"
    ),
    "minimax_m2": replace(THINK, signs=("minimax:tool_call", "</think>"), begun=True),
    "deepseek_r1": replace(THINK, signs=("<｜Assistant｜>", "</think>"), lacks=("thinking",), begun=True),
    "glm4": replace(THINK, signs=("[gMASK]", "</think>")),
    "kimi_k3": ReasoningMarks(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        ("<|open|>", "<|sep|>", "think"),
        special=True,
        answer_begin="<|open|>response<|sep|>",
        answer_end="<|close|>response<|sep|>",
    ),
    "cohere_command3": replace(COHERE, answer_begin="<|START_RESPONSE|>", answer_end="<|END_RESPONSE|>"),
    "cohere_command4": replace(
        COHERE,
        signs=("<|START_THINKING|>", "<|START_TEXT|>"),
        answer_begin="<|START_TEXT|>",
        answer_end="<|END_TEXT|>",
    ),
    "plamo3": ReasoningMarks(
        "<|plamo:begin_think:plamo|>",
        "<|plamo:end_think:plamo|>",
        ("<|plamo:begin_think:plamo|>",),
        special=True,
    ),
    "minimax_m3": ReasoningMarks("<mm:think>", "</mm:think>", ("<mm:think>",), special=True),
    "k2_horizon": ReasoningMarks("<ifm|think>", "</ifm|think>", ("<ifm|think>",), special=True),
    "hunyuan_a13b": replace(
        THINK, signs=("<answer>", "</think>"), answer_begin="<answer>", answer_end="</answer>"
    ),
    "qwen3": THINK,
}
"""Formats of reasoning by name, in the order in which they are tried. Harmony has a parser for whole replies."""
ALIASES = {
    "deepseek_v3": "qwen3",
    "deepseek_v4": "qwen3",
    "deepseek_v41": "qwen3",
    "glm45": "glm4",
    "glm47": "glm4",
    "granite_thinking_parser": "qwen3",
    "holo2": "qwen3",
    "hy_v3": "qwen3",
    "hy_v4": "qwen3",
    "kimi_k2": "qwen3",
    "ling3": "qwen3",
    "mimo": "qwen3",
    "minicpmv": "qwen3",
    "nemotron_v3": "qwen3",
    "olmo3": "qwen3",
    "openai_gptoss": "gpt_oss",
    "poolside_v1": "qwen3",
    "step3": "deepseek_r1",
    "step3p5": "deepseek_r1",
}
"""Other names for formats of the table, which are vLLM's."""


def marks_named(name: str) -> ReasoningMarks:
    """Return the marks of a format of reasoning.

    Raises:
        ValueError: there is none with that name.
    """
    if (known := ALIASES.get(name, name)) not in REASONING:
        raise ValueError(f"reasoning_parser must be one of {', '.join(REASONING)}, got {name!r}")
    return REASONING[known]


def described_marks(template: ResponseTemplate) -> ReasoningMarks | None:
    """Return the marks of the reasoning that a checkpoint describes; None if they are no texts, or are none."""
    region = template.named(*REASONING_NAMES)
    if region is None or region.open is None or region.close is None:
        return None
    if not region.open.literals or not region.close.literals:
        return None
    opens, closes = region.open.literals[-1].strip(), region.close.literals[-1].strip()
    return ReasoningMarks(opens, closes, (), special=True, template=template)
