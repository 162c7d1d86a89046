"""Detection of a model's dialect of tool calls and its format of reasoning.

The operator's word comes first, then the model's type, then what the checkpoint says of its replies, then its chat
template.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from pagewire.frontend.client import knowledge_of
from pagewire.frontend.server.parsing.dialects import (
    DIALECTS,
    JSON,
    PROMPTED,
    Dialect,
    described_dialect,
    dialect_named,
)
from pagewire.frontend.server.parsing.reasoning_marks import (
    REASONING,
    ReasoningMarks,
    described_marks,
    marks_named,
)
from pagewire.frontend.server.parsing.response_template import (
    NAME,
    ResponseTemplate,
    load_response_template,
)

logger = logging.getLogger("pagewire.server")

OFF = "none"  # value of an option that turns the detection off
REASONS = {
    NAME: "as the checkpoint's response_template describes it",
    PROMPTED: "since the chat template shows no tools: functions, calls and results are put into its messages",
    JSON: "since the chat template shows tools, and no known form of calls",
}
FOUND = "found from the chat template and the model's type"
# Types of models that have one format, which is theirs even if the template is another one's.
OF_ARCHITECTURE = {"GptOssForCausalLM": "gpt_oss"}


@dataclass(frozen=True)
class ReplyFormats:
    """How the replies of a model are read.

    tools: name of its dialect of tool calls; None: unknown. reasoning: name of its format of reasoning; None: none.
    auto: requests may leave it to the model whether to call tools. described: what the checkpoint says of replies.
    """

    tools: str | None = None
    reasoning: str | None = None
    auto: bool = False
    described: ResponseTemplate | None = None

    @property
    def prompts_tools(self) -> bool:
        """True if what the template does not know of tools is put into the messages of a conversation."""
        return self.tools in (JSON, PROMPTED)

    @property
    def dialect(self) -> Dialect | None:
        """The dialect of tool calls; None: it is unknown."""
        if self.tools == NAME and self.described is not None:
            return described_dialect(self.described)
        return None if self.tools is None else dialect_named(self.tools)

    @property
    def marks(self) -> ReasoningMarks | None:
        """The marks of the reasoning; None: it has none."""
        if self.reasoning == NAME and self.described is not None:
            return described_marks(self.described)
        return None if self.reasoning is None else marks_named(self.reasoning)


def reply_formats(
    template: str,
    architecture: str,
    *,
    tools: str | None = None,
    reasoning: str | None = None,
    auto: bool | None = None,
    response_template: Any = None,
) -> ReplyFormats:
    """Return how the replies of a model are read, and log what was found.

    template: source of the chat template; "": there is none. architecture: type of the model.
    tools, reasoning, auto: what the operator has set; None: what is found. response_template: of the checkpoint.

    Raises:
        ValueError: calls are to be the model's choice, and there is no template, or `tools` turns them off; or the
            operator wants the checkpoint's description to be used, and it has none, or a bad one.
    """
    described = read_description(
        response_template, {"--tool-call-parser": tools, "--reasoning-parser": reasoning}
    )
    found = OF_ARCHITECTURE.get(architecture)
    of_tools = NAME if described is not None and described_dialect(described) is not None else None
    of_thoughts = NAME if described is not None and described_marks(described) is not None else None
    dialect = tools or found or of_tools or found_dialect(template)
    dialect = None if dialect == OFF else dialect
    thoughts = reasoning or found or of_thoughts or found_reasoning(template)
    thoughts = None if thoughts == OFF else thoughts
    if dialect is not None and dialect != NAME and dialect_named(dialect) is DIALECTS["gpt_oss"]:
        thoughts = "gpt_oss"  # one parser reads both
    if auto and dialect is None:
        raise ValueError(
            "enable_auto_tool_choice needs a chat template, or a tool_call_parser other than 'none'"
        )
    for option, wanted, has in (
        ("--tool-call-parser", tools, of_tools),
        ("--reasoning-parser", reasoning, of_thoughts),
    ):
        if wanted == NAME and has is None:
            raise ValueError(f"{option} {NAME}: the checkpoint's response_template has no such field")
    for name, what, given in (
        ("tool_call_parser", dialect, tools),
        ("reasoning_parser", thoughts, reasoning),
    ):
        if what is not None and given is None:
            logger.info("%s: %s, %s", name, what, REASONS.get(what, FOUND))
    return ReplyFormats(dialect, thoughts, dialect is not None and auto is not False, described)


def read_description(given: Any, wanted: dict[str, str | None]) -> ResponseTemplate | None:
    """Return what a checkpoint says of its replies; None if it says nothing, or, with a warning, nothing of use.

    wanted: the formats that the operator has set, by option.

    Raises:
        ValueError: the operator wants it to be used, and it is missing or bad.
    """
    option = next((option for option, name in wanted.items() if name == NAME), None)
    if given is None:
        if option is not None:
            raise ValueError(
                f"{option} {NAME} needs a response_template in the checkpoint's tokenizer_config.json"
            )
        return None
    try:
        return load_response_template(given)
    except ValueError as error:
        if option is not None:
            raise
        logger.warning("the checkpoint's description of replies is not used: %s", error)
        return None


def found_dialect(template: str) -> str | None:
    """Return the name of a template's dialect, one of ours if it has no signs; None: there is no template."""
    if not template:
        return None
    if not knowledge_of(template).shows_tools:
        return PROMPTED
    return next((name for name, dialect in DIALECTS.items() if has_signs(dialect, template)), JSON)


def has_signs(dialect: Dialect, template: str) -> bool:
    """Return True if a chat template has all the signs of a dialect, which has some."""
    return bool(dialect.signs) and all(sign in template for sign in dialect.signs)


def found_reasoning(template: str) -> str | None:
    """Return the name of the format of reasoning whose signs a chat template has; None: it has none."""
    for name, marks in REASONING.items():
        if (
            marks.signs
            and all(sign in template for sign in marks.signs)
            and not any(text in template for text in marks.lacks)
        ):
            return name
    return None
