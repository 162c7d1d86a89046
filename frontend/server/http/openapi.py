"""Routes that declare their parameters, bodies and results, and the OpenAPI document built from them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pagewire.frontend.server.http.api_shapes import SHAPES, shape_at
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.json_response import json_response
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.frontend.server.http.query import Query
from pagewire.ipc.version import __version__

REFERENCE = "#/components/schemas/{name}"
FAILURES = {
    "400": "a value in the request is invalid or not supported",
    "401": "the API key is missing or invalid",
    "403": "the key has no right to this, Host or Origin is not allowed, or the header for operators is missing",
    "404": "the model or path does not exist",
    "408": "the request's deadline has passed, or its body arrived too slowly",
    "413": "the body is too large",
    "415": "the Content-Type is not that of the body",
    "422": "a field is missing or has the wrong type",
    "429": "too many requests are waiting",
    "499": "the request was aborted",
    "500": "the engine failed to process this request",
    "503": "the engine is not available, or a limit of time passed while the machine had too little processor time",
    "529": "too many requests are waiting, or the engine is not available",
}
# Error statuses of every operation, and further ones of operations with a body or a query.
EVERY_OPERATION = ("401", "403", "503")
WITH_INPUT = ("400", "404", "408", "413", "415", "422", "429", "499", "500")


class Operation(Route):
    """A route for one HTTP method, with its entry in the OpenAPI document.

    Args:
        endpoint: a function (request) -> response, or an ASGI application.
        body, result: structs of the request's and the response's JSON; None: no such body.
        body_media: the content type of a request's body, which may be a form.
        others: structs of responses in the shapes of other APIs, which a header asks for.
        streams: struct of the events of a streamed response.
        media: media type of a response that is not JSON.
        failures: statuses of errors, beside those that its input and the server's state can have.
    """

    def __init__(
        self,
        method: str,
        path: str,
        endpoint: Any,
        summary: str,
        *,
        body: Any = None,
        body_media: str = "application/json",
        result: Any = None,
        others: Sequence[Any] = (),
        streams: Any = None,
        media: str | None = None,
        query: Sequence[Query] = (),
        failures: Sequence[str] = (),
    ) -> None:
        super().__init__(path, endpoint, methods=[method])
        self.method, self.summary = method, summary
        self.query, self.failures = tuple(query), tuple(failures)
        self.body, self.streams, self.media = body, streams, media
        self.body_media = body_media
        self.results = () if result is None else (result, *others)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, and name this route to `TrafficCount`."""
        scope.get("handlers", []).append(self.path_format)
        await super().handle(scope, receive, send)


def document_route(operations: Sequence[Operation], options: ServerOptions) -> Operation:
    """Return the route of /openapi.json, which describes `operations`."""
    encoded = json_response(openapi_document(operations, options))

    async def openapi(request: Request) -> Response:
        return encoded

    return Operation("GET", "/openapi.json", openapi, "Get this document.", result=dict[str, Any])


def openapi_document(operations: Sequence[Operation], options: ServerOptions) -> dict[str, Any]:
    """Build the OpenAPI 3.1 document of some operations."""
    kinds = [
        kind
        for operation in operations
        for kind in (operation.body, *operation.results, operation.streams)
        if kind is not None
    ]
    kinds += [shape.error for shape in SHAPES]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
    schema_of = dict(zip(map(repr, kinds), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        path = re.sub(r"{(\w+):\w+}", r"{\1}", operation.path)
        paths.setdefault(path, {})[operation.method.lower()] = describe_operation(operation, schema_of)
    components = {"schemas": components}
    if options.keyed:
        in_header = {"type": "apiKey", "in": "header", "name": "X-API-Key"}
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}, "key_header": in_header}
    return {
        "openapi": "3.1.0",
        "info": {"title": "pagewire", "version": __version__},
        "servers": [{"url": options.root_path or "/"}],
        "paths": paths,
        "components": components,
        "security": [{"key": []}, {"key_header": []}] if options.keyed else [],
    }


def describe_operation(operation: Operation, schema_of: dict[str, Any]) -> dict[str, Any]:
    """Return the OpenAPI object of one operation. schema_of: JSON schemas by the repr of their struct."""

    def schema(kind: Any) -> dict[str, Any]:
        return {"schema": schema_of[repr(kind)]}

    shape = shape_at(operation.path)
    content: dict[str, Any] = {}
    if operation.results:
        schemas = [schema(kind)["schema"] for kind in operation.results]
        content["application/json"] = {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}
    if operation.streams is not None:
        content[shape.media] = {
            "schema": {"type": "string"},
            "x-event": schema(operation.streams)["schema"],
        }
    if operation.media is not None:
        content[operation.media] = {"schema": {"type": "string"}}
    failures = EVERY_OPERATION + operation.failures
    if operation.body is not None or operation.query:
        failures += WITH_INPUT
    if "{" in operation.path:
        failures += ("400", "404")
    answer: dict[str, Any] = {"description": operation.summary} | ({"content": content} if content else {})
    error_content = {"application/json": schema(shape.error)}
    codes = {str(shape.status(APIError(int(code), ""))) for code in failures}
    description: dict[str, Any] = {
        "summary": operation.summary,
        "parameters": parameters(operation),
        "responses": {"200": answer}
        | {code: {"description": FAILURES[code], "content": error_content} for code in sorted(codes)},
    }
    if operation.body is not None:
        description["requestBody"] = {
            "required": True,
            "content": {operation.body_media: schema(operation.body)},
        }
    return description


def parameters(operation: Operation) -> list[dict[str, Any]]:
    """Return the OpenAPI objects of the path and query parameters."""
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in operation.param_convertors
    ]
    in_query = [
        {"name": name, "in": "query", "schema": query_schema(kind), "description": text}
        for name, kind, text in operation.query
    ]
    return in_path + in_query


def query_schema(kind: Any) -> dict[str, Any]:
    """The JSON schema of a parameter's type; it is described beside it."""
    schema = msgspec.json.schema(kind)
    schema.pop("description", None)
    return schema
