"""Detection of a model's dialect of tool calls and its format of reasoning, from its chat template."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from pagewire.frontend.server.parsing.dialects import DIALECTS
from pagewire.frontend.server.parsing.reasoning import REASONING
from pagewire.frontend.text.conversation import variables_of

logger = logging.getLogger("pagewire.server")

OFF = "none"  # value of an option that turns the detection off
# Types of models that have one format, which is theirs even if the template is another one's.
OF_ARCHITECTURE = {"GptOssForCausalLM": "gpt_oss"}


@dataclass(frozen=True)
class ReplyFormats:
    """How the replies of a model are read.

    tools: its dialect of tool calls; None: unknown. reasoning: its format of reasoning; None: it has none.
    auto: requests may leave it to the model whether to call tools.
    """

    tools: str | None = None
    reasoning: str | None = None
    auto: bool = False


def reply_formats(
    template: str,
    architecture: str,
    *,
    tools: str | None = None,
    reasoning: str | None = None,
    auto: bool | None = None,
) -> ReplyFormats:
    """Return how the replies of a model are read, and log what was found.

    template: source of the chat template; "": there is none. architecture: type of the model.
    tools, reasoning, auto: what the operator has set; None: what is found.

    Raises:
        ValueError: calls are to be the model's choice, and its dialect is unknown.
    """
    found = OF_ARCHITECTURE.get(architecture)
    dialect = tools or found or found_dialect(template)
    dialect = None if dialect == OFF else dialect
    thoughts = reasoning or found or found_reasoning(template)
    thoughts = None if thoughts == OFF else thoughts
    if dialect == "gpt_oss":
        thoughts = dialect  # one parser reads both
    if auto and dialect is None:
        raise ValueError(
            "enable_auto_tool_choice needs tool_call_parser: the chat template does not show the format"
        )
    for name, what, given in (
        ("tool_call_parser", dialect, tools),
        ("reasoning_parser", thoughts, reasoning),
    ):
        if what is not None and given is None:
            logger.info("%s: %s, found from the chat template and the model's type", name, what)
    return ReplyFormats(dialect, thoughts, dialect is not None and auto is not False)


def found_dialect(template: str) -> str | None:
    """Return the name of the dialect whose signs a chat template has; None: it has no tools."""
    for name, dialect in DIALECTS.items():
        if dialect.signs and all(sign in template for sign in dialect.signs):
            return name
    return "json" if template and "tools" in variables_of(template) else None


def found_reasoning(template: str) -> str | None:
    """Return the name of the format of reasoning whose signs a chat template has; None: it has none."""
    for name, marks in REASONING.items():
        if all(sign in template for sign in marks.signs) and not any(
            text in template for text in marks.lacks
        ):
            return name
    return None
