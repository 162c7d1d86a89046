"""The endpoints under /v1/conversations."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HTTPResponse

from pagewire.frontend.server.http.body import Decoder, read_request
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.json_response import json_response
from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.frontend.server.http.query import ORDER, Query, newest_first, read_number
from pagewire.frontend.server.http.tenants import tenant_of
from pagewire.frontend.server.responses.conversations import (
    ConversationStore,
    StoredConversation,
    conversation_too_large,
)
from pagewire.frontend.server.responses.items import check_metadata, read_input
from pagewire.frontend.server.responses.protocol import InputItems, ItemList
from pagewire.ipc.quoting import quoted

PATH = "/v1/conversations"
LIMIT = Query("limit", Annotated[int, msgspec.Meta(ge=1, le=1000)], "how many, at most (default: 20)")
AFTER = Query("after", str, "those after the one with this id")


class ConversationRequest(msgspec.Struct, kw_only=True):
    """POST /v1/conversations, or /v1/conversations/{conversation_id} for new metadata."""

    items: InputItems | None = None
    metadata: dict[str, str] | None = None


class ConversationItems(msgspec.Struct, kw_only=True):
    """POST /v1/conversations/{conversation_id}/items."""

    items: InputItems


class ConversationObject(msgspec.Struct, kw_only=True):
    """A conversation, without its items."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(msgspec.Struct):
    """Confirmation that a conversation was deleted."""

    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: bool = True


CREATED, ADDED = Decoder(ConversationRequest), Decoder(ConversationItems)


def conversation_routes(options: ServerOptions, store: ConversationStore) -> list[Operation]:
    """Return the routes of the endpoints."""
    endpoints = ConversationEndpoints(options, store)
    one = PATH + "/{conversation_id}"
    items, item = one + "/items", one + "/items/{item_id}"
    made, more = ConversationRequest, ConversationItems
    return [
        Operation(
            "POST", PATH, endpoints.create, "Begin a conversation.", body=made, result=ConversationObject
        ),
        Operation("GET", one, endpoints.show, "Describe a conversation.", result=ConversationObject),
        Operation("POST", one, endpoints.update, "Set its metadata.", body=made, result=ConversationObject),
        Operation("DELETE", one, endpoints.delete, "Delete a conversation.", result=DeletedConversation),
        Operation("POST", items, endpoints.add, "Add items.", body=more, result=ItemList),
        Operation("GET", items, endpoints.list, "List items.", result=ItemList, query=(LIMIT, AFTER, ORDER)),
        Operation("GET", item, endpoints.item, "Get an item.", result=dict[str, Any]),
        Operation("DELETE", item, endpoints.remove, "Remove an item.", result=ConversationObject),
    ]


class ConversationEndpoints:
    """The endpoints of one server. Each sees what the tenant of its request has."""

    def __init__(self, options: ServerOptions, store: ConversationStore) -> None:
        self._options, self._store = options, store

    async def create(self, request: Request) -> HTTPResponse:
        """POST /v1/conversations."""
        fields = await read_request(request, CREATED, self._options)
        check_metadata(fields.metadata)
        items = read_input(fields.items) if fields.items else []
        owner = tenant_of(request.scope).name
        return json_response(describe_conversation(self._store.create(owner, fields.metadata or {}, items)))

    async def show(self, request: Request) -> HTTPResponse:
        """GET /v1/conversations/{conversation_id}."""
        return json_response(describe_conversation(self._conversation(request)))

    async def update(self, request: Request) -> HTTPResponse:
        """POST /v1/conversations/{conversation_id}."""
        fields = await read_request(request, CREATED, self._options)
        check_metadata(fields.metadata)
        if fields.items:
            raise APIError(400, f"items: add them by POST {PATH}/{{id}}/items", param="items")
        conversation = self._conversation(request)
        conversation.metadata = fields.metadata or {}
        self._keep(conversation)
        return json_response(describe_conversation(conversation))

    async def delete(self, request: Request) -> HTTPResponse:
        """DELETE /v1/conversations/{conversation_id}."""
        conversation = self._conversation(request)
        self._store.forget(conversation.id)
        return json_response(DeletedConversation(conversation.id))

    async def add(self, request: Request) -> HTTPResponse:
        """POST /v1/conversations/{conversation_id}/items."""
        fields = await read_request(request, ADDED, self._options)
        conversation = self._conversation(request)
        added = conversation.append(read_input(fields.items))
        self._keep(conversation)
        return json_response(ItemList(data=added, first_id=added[0]["id"], last_id=added[-1]["id"]))

    async def list(self, request: Request) -> HTTPResponse:
        """GET /v1/conversations/{conversation_id}/items."""
        conversation = self._conversation(request)
        ids = conversation.ids
        if newest_first(request):
            ids.reverse()
        after, start = request.query_params.get("after"), 0
        if after is not None:
            conversation.item(after)
            start = ids.index(after) + 1
        end = start + read_number(request, LIMIT, 20)
        page = ids[start:end]
        return json_response(
            ItemList(
                data=[conversation.item(name) for name in page],
                first_id=page[0] if page else None,
                last_id=page[-1] if page else None,
                has_more=end < len(ids),
            )
        )

    async def item(self, request: Request) -> HTTPResponse:
        """GET /v1/conversations/{conversation_id}/items/{item_id}."""
        return json_response(self._conversation(request).item(request.path_params["item_id"]))

    async def remove(self, request: Request) -> HTTPResponse:
        """DELETE /v1/conversations/{conversation_id}/items/{item_id}."""
        conversation = self._conversation(request)
        conversation.remove(request.path_params["item_id"])
        self._keep(conversation)
        return json_response(describe_conversation(conversation))

    def _conversation(self, request: Request) -> StoredConversation:
        return self._store.get(request.path_params["conversation_id"], tenant_of(request.scope).name)

    def _keep(self, conversation: StoredConversation) -> None:
        if not self._store.keep(conversation):
            raise conversation_too_large(self._options.response_store_bytes)


def describe_conversation(conversation: StoredConversation) -> ConversationObject:
    """A conversation as answers have it."""
    return ConversationObject(
        id=conversation.id, created_at=conversation.created_at, metadata=conversation.metadata
    )


def conversation_name(given: str | dict[str, object] | None) -> str | None:
    """The id of the conversation that a request names; None if it names none.

    Raises:
        APIError: it is neither an id nor an object with one.
    """
    name = given.get("id") if isinstance(given, dict) else given
    if given is not None and not isinstance(name, str):
        raise APIError(
            400,
            f"conversation must be an id, or an object with one, got {quoted(given)}",
            param="conversation",
        )
    return name if isinstance(name, str) else None
