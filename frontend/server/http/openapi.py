"""Routes that know what they take and give, and the OpenAPI document made of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagewire.frontend.server.http.errors import ErrorResponse
from pagewire.frontend.server.http.json_response import json_response
from pagewire.frontend.server.http.query import Query
from pagewire.frontend.server.options import ServerOptions
from pagewire.ipc.version import __version__

REFERENCE = "#/components/schemas/{name}"
FAILURES = {
    "400": "the request is refused",
    "401": "no valid key",
    "404": "no such model or path",
    "408": "the deadline has passed, or the body came too slowly",
    "413": "the body is too large",
    "415": "the body is not declared as JSON",
    "422": "a field is missing or of a wrong type",
    "429": "too many requests wait",
    "499": "the request was aborted",
    "500": "the engine failed at this request",
    "503": "the engine is down",
}
OF_EVERY = ("401", "503")
OF_BODIES = ("400", "404", "408", "413", "415", "422", "429", "499", "500")


class Operation(Route):
    """A route of one method, described.

    endpoint: a function (request) -> response, or an ASGI application.
    body, result: structs of the request's and the answer's JSON; no result: nothing is said.
    streams: struct of a streamed answer's events. media: of an answer that is not JSON.
    """

    def __init__(
        self,
        method: str,
        path: str,
        endpoint: Any,
        summary: str,
        *,
        body: Any = None,
        result: Any = None,
        streams: Any = None,
        media: str | None = None,
        query: Sequence[Query] = (),
    ) -> None:
        super().__init__(path, endpoint, methods=[method])
        self.method, self.summary, self.query = method, summary, tuple(query)
        self.body, self.result, self.streams, self.media = body, result, streams, media


def document_route(operations: Sequence[Operation], options: ServerOptions) -> Operation:
    """The route of the document on all these operations."""
    encoded = json_response(document(operations, options))

    async def openapi(request: Request) -> Response:
        return encoded

    return Operation("GET", "/openapi.json", openapi, "This document.", result=dict[str, Any])


def document(operations: Sequence[Operation], options: ServerOptions) -> dict[str, Any]:
    """The OpenAPI document, version 3.1."""
    kinds = [kind for one in operations for kind in (one.body, one.result, one.streams) if kind is not None]
    schemas, components = msgspec.json.schema_components([*kinds, ErrorResponse], ref_template=REFERENCE)
    schema_of = dict(zip(map(repr, [*kinds, ErrorResponse]), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        path = re.sub(r"{(\w+):\w+}", r"{\1}", one.path)
        paths.setdefault(path, {})[one.method.lower()] = described(one, schema_of)
    components = {"schemas": components}
    if options.keys():
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "pagewire", "version": __version__},
        "servers": [{"url": options.root_path or "/"}],
        "paths": paths,
        "components": components,
        "security": [{"key": []}] if options.keys() else [],
    }


def described(one: Operation, schema_of: dict[str, Any]) -> dict[str, Any]:
    """One operation."""

    def schema(kind: Any) -> dict[str, Any]:
        return {"schema": schema_of[repr(kind)]}

    content = {} if one.result is None else {"application/json": schema(one.result)}
    if one.streams is not None:
        content["text/event-stream"] = {
            "schema": {"type": "string"},
            "x-event": schema(one.streams)["schema"],
        }
    if one.media is not None:
        content[one.media] = {"schema": {"type": "string"}}
    failures: tuple[str, ...] = OF_EVERY if one.body is None and not one.query else OF_EVERY + OF_BODIES
    if "{" in one.path:
        failures += ("400", "404")
    answer: dict[str, Any] = {"description": one.summary} | ({"content": content} if content else {})
    told = {"application/json": schema(ErrorResponse)}
    told_of: dict[str, Any] = {
        "summary": one.summary,
        "parameters": parameters(one),
        "responses": {"200": answer}
        | {code: {"description": FAILURES[code], "content": told} for code in sorted(set(failures))},
    }
    if one.body is not None:
        told_of["requestBody"] = {"required": True, "content": {"application/json": schema(one.body)}}
    return told_of


def parameters(one: Operation) -> list[dict[str, Any]]:
    """What stands in the path and in the query."""
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in one.param_convertors
    ]
    in_query = [
        {"name": name, "in": "query", "schema": query_schema(kind), "description": text}
        for name, kind, text in one.query
    ]
    return in_path + in_query


def query_schema(kind: Any) -> dict[str, Any]:
    """The JSON schema of a parameter's type; it is described beside it."""
    schema = msgspec.json.schema(kind)
    schema.pop("description", None)
    return schema
