"""The OpenAPI document tells of every route, and of nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jsonschema

from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.page import PATHS
from tests.frontend.server.client import Client


def references(value: Any) -> set[str]:
    """All that is referred to."""
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*(references(part) for part in value.values()))
    return set().union(*(references(part) for part in value)) if isinstance(value, list) else set()


def test_it_tells_of_every_route(serve: Callable[..., Client]) -> None:
    client = serve(enable_admin=True, api_key=["k"])
    document = client.get("/openapi.json", authorization="Bearer k").json
    told = {(method.upper(), path) for path, one in document["paths"].items() for method in one}
    routes = [route for route in client.app.routes if isinstance(route, Operation)]
    assert told | {("GET", "/openapi.json")} == {
        (route.method, route.path.replace(":path", "")) for route in routes
    }
    others = {route.path for route in client.app.routes if not isinstance(route, Operation)}
    assert others == PATHS | {"/v1/responses"}  # the files of the page, and a WebSocket
    assert document["security"] == [{"key": []}, {"key_header": []}]
    assert serve(root_path="/llm").get("/llm/openapi.json").json["servers"] == [{"url": "/llm"}]
    assert "securitySchemes" not in serve().get("/openapi.json").json["components"]


def test_its_schemas_hold(client: Client) -> None:
    """Every reference leads somewhere, and real answers are valid."""
    document = client.get("/openapi.json").json
    schemas = document["components"]["schemas"]
    assert {ref.removeprefix("#/components/schemas/") for ref in references(document)} == set(schemas)
    answers = {
        "Completion": client.post("/v1/completions", {"prompt": "w5", "echo": True}),
        "ChatCompletion": client.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "w5"}]}
        ),
        "Response": client.post("/v1/responses", {"input": "w5"}),
        "ModelList": client.get("/v1/models"),
        "TokenizeResponse": client.post("/tokenize", {"prompt": "w5"}),
        "ErrorResponse": client.get("/nothing"),
    }
    for name, answer in answers.items():
        schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(answer.json)
    stream = {"messages": [{"role": "user", "content": "w5"}], "stream": True}
    schema = {"$ref": "#/components/schemas/ChatChunk", "components": document["components"]}
    for event in client.post("/v1/chat/completions", stream).events:
        jsonschema.Draft202012Validator(schema).validate(event)


def test_it_has_the_bounds_of_parameters(serve: Callable[..., Client]) -> None:
    document = serve(enable_admin=True).get("/openapi.json").json
    for kind in ("CompletionRequest", "ChatRequest", "ResponsesRequest"):
        fields = document["components"]["schemas"][kind]["properties"]
        assert {"type": "number", "exclusiveMinimum": 0.0, "maximum": 1.0} in fields["top_p"]["anyOf"], kind
    level, tags, model = document["paths"]["/sleep"]["post"]["parameters"]
    assert [each["name"] for each in (level, tags, model)] == ["level", "tags", "model"]
    assert level["schema"] == {"type": "integer", "minimum": 1, "maximum": 2}
