"""Wishes of OpenAI's APIs that a prompt stays cached, as the engine takes them, and what is said of the outcome."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from pagewire.frontend.client import PromptType
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.warnings import warn_client
from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.items import RETAINED_SECONDS, RetainedPrefix, Retention

SECONDS = {"in_memory": RETAINED_SECONDS, "in-memory": RETAINED_SECONDS, "24h": 86_400.0}


class RetentionFields(Protocol):
    """The fields of a request that say how long its prompt stays cached."""

    prompt_cache_key: str | None
    prompt_cache_retention: str | None
    session_id: str | None


def wishes_of(request: RetentionFields) -> list[Retention]:
    """The wish of a request: a time (`prompt_cache_retention`), or a session (`session_id`), which has a default.

    A `prompt_cache_key` alone keeps nothing: it names what a time is given for. The output is kept as well, since
    the next turn of a conversation has it in its prompt.

    Raises:
        APIError: the time is none that is known.
    """
    given = request.prompt_cache_retention
    if given is None and not request.session_id:
        return []
    if given is not None and given not in SECONDS:
        message = f"prompt_cache_retention must be one of {', '.join(SECONDS)}, got {quoted(given)}"
        raise APIError(400, message, param="prompt_cache_retention")
    seconds = RETAINED_SECONDS if given is None else SECONDS[given]
    return [Retention(seconds, request.session_id or request.prompt_cache_key or "", with_output=True)]


def keep_prompt(prompt: PromptType, wishes: list[Retention]) -> PromptType:
    """The prompt with wishes that it stays cached; unchanged if there are none."""
    if not wishes:
        return prompt
    given: Any = prompt
    if isinstance(given, str):
        given = {"prompt": given}
    elif isinstance(given, list):
        given = {"prompt_token_ids": given}
    return {**given, "cache_retention": wishes}  # type: ignore[return-value]


def warn_of_refusals(retained: Iterable[RetainedPrefix]) -> None:
    """Warn the client of what is not kept."""
    for each in retained:
        if each.refusal:
            warn_client(f"only {each.num_tokens} tokens of the prompt are kept in the cache: {each.refusal}")
