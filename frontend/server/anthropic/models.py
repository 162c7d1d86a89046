"""/v1/models in the shape of Anthropic's API, for requests with its header `anthropic-version`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.timestamps import timestamp
from pagewire.frontend.server.openai.protocol import ModelCard
from pagewire.ipc.quoting import quoted

Limit = Annotated[int, msgspec.Meta(ge=1, le=1000)]

DEFAULT_LIMIT = 20


class MessageModel(msgspec.Struct, kw_only=True):
    """A name of the served model, or an adapter, as Anthropic's API describes it.

    created_at: the start of the server. max_input_tokens, max_tokens: limit of prompt and output together; null:
    known once the model has been loaded.
    """

    id: str
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    max_input_tokens: int | None
    max_tokens: int | None
    lifecycle: Literal["active"] = "active"
    capabilities: None = None
    line: None = None
    deprecated_at: None = None
    retires_at: None = None


class MessageModelPage(msgspec.Struct, kw_only=True):
    """A page of models. first_id, last_id: of the page; null if it is empty. has_more: it is not the last one."""

    data: list[MessageModel]
    first_id: str | None
    last_id: str | None
    has_more: bool


def message_model(card: ModelCard) -> MessageModel:
    """Return a description in the shape of Anthropic's API."""
    return MessageModel(
        id=card.id,
        display_name=card.id,
        created_at=timestamp(card.created),
        max_input_tokens=card.max_model_len,
        max_tokens=card.max_model_len,
    )


def models_page(cards: list[ModelCard], query: Mapping[str, str], limit: int) -> MessageModelPage:
    """Return the page of models that a query asks for: `after_id` or `before_id`, and at most `limit`.

    Raises:
        APIError: there is no model with that id, or both are given.
    """
    names = [card.id for card in cards]
    after, before = query.get("after_id"), query.get("before_id")
    if after is not None and before is not None:
        raise APIError(400, "after_id and before_id exclude each other")
    for name, given in (("after_id", after), ("before_id", before)):
        if given is not None and given not in names:
            raise APIError(400, f"{name}: there is no model {quoted(given)}", param=name)
    if before is not None:
        end = names.index(before)
        start = max(0, end - limit)
        has_more = start > 0
    else:
        start = 0 if after is None else names.index(after) + 1
        end = min(len(names), start + limit)
        has_more = end < len(names)
    page = [message_model(card) for card in cards[start:end]]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return MessageModelPage(data=page, first_id=first, last_id=last, has_more=has_more)
