"""Arguments in the query of a URL."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from starlette.requests import Request

from pagewire.frontend.server.http.errors import APIError
from pagewire.ipc.bounds import convert_value, meta_of, plain
from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.calls import CALLS

TRUE, FALSE = ("true", "1", "yes"), ("false", "0", "no")


class Query(NamedTuple):
    """A parameter in the query, as the OpenAPI document shows it and `read_number` checks it.

    kind: its type, with bounds if it has any. text: what it does.
    """

    name: str
    kind: Any
    text: str


ORDER = Query("order", Literal["asc", "desc"], "asc: the oldest first; desc (default): the newest")


def read_flag(request: Request, name: str, default: bool) -> bool:
    """Return a boolean parameter of the query.

    Raises:
        APIError: the value is not a boolean.
    """
    text = request.query_params.get(name, str(default)).lower()
    if text not in TRUE + FALSE:
        raise APIError(400, f"{name} must be true or false, got {quoted(text)}", param=name)
    return text in TRUE


def newest_first(request: Request) -> bool:
    """Return what a request wants of `ORDER`.

    Raises:
        APIError: the value is no order.
    """
    order = request.query_params.get(ORDER.name, "desc")
    if order not in ("asc", "desc"):
        raise APIError(400, f"order must be asc or desc, got {quoted(order)}", param=ORDER.name)
    return order == "desc"


def read_number(request: Request, query: Query, default: int) -> int:
    """Return an integer parameter of the query.

    Raises:
        APIError: the value is not an integer, or out of the bounds of the parameter's type.
    """
    name = query.name
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        raise APIError(400, f"{name} must be an integer, got {quoted(text)}", param=name) from None
    return within_bounds(name, value, query.kind)


def queries_of(call: str) -> tuple[Query, ...]:
    """Return the arguments of one of `CALLS` as parameters of a query. A list may be repeated."""
    return tuple(
        Query(name, kind if plain(kind) in (bool, int) else str, meta_of(kind).description or "")
        for name, kind in CALLS[call].types.items()
        if name in CALLS[call].sent.parameters
    )


def arguments_of(request: Request, call: str) -> dict[str, Any]:
    """Return the arguments of one of `CALLS` that a request's query has, by name.

    Raises:
        APIError: a value has another type, or is out of its bounds.
    """
    arguments: dict[str, Any] = {}
    for query in queries_of(call):
        name = query.name
        if name not in request.query_params:
            continue
        if plain(query.kind) is bool:
            arguments[name] = read_flag(request, name, False)
        elif plain(query.kind) is int:
            arguments[name] = read_number(request, query, 0)
        else:
            arguments[name] = request.query_params.getlist(name)
    return arguments


def within_bounds(name: str, value: int, kind: Any) -> int:
    """Return a value that has been checked against the bounds of its type.

    Raises:
        APIError: the value is out of the bounds.
    """
    try:
        convert_value(name, value, kind)
    except ValueError as error:
        raise APIError(400, str(error), param=name) from None
    return value
