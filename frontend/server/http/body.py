"""Bodies of requests: read within limits, and decoded into structs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive, Scope

from pagewire.frontend.server.http.errors import APIError, invalid_field
from pagewire.frontend.server.options import ServerOptions
from pagewire.ipc.bounds import check_field

logger = logging.getLogger("pagewire.server")

T = TypeVar("T")

CLOSE = {"connection": "close"}  # what is left of the body is not read
MAX_NAMED = 16
MAX_NAME = 64


class ClientLeftError(APIError):
    """The client has hung up: nobody will read the answer, but the log tells."""

    def __init__(self) -> None:
        super().__init__(499, "the client left", code="client_left")


class Decoder(Generic[T]):
    """Decodes bodies of one type. Fields it does not know are named in a warning, and ignored.

    fields: the names it knows.
    """

    def __init__(self, kind: type[T]) -> None:
        self.fields: tuple[str, ...] = tuple(field.encode_name for field in msgspec.structs.fields(kind))  # type: ignore[arg-type]
        self._kind: Any = kind
        self._known = frozenset(self.fields)
        self._typed = msgspec.json.Decoder(kind)
        self._names = msgspec.json.Decoder(dict[str, msgspec.Raw])

    def decode(self, body: bytes, request_id: str) -> T:
        """The request.

        Raises:
            msgspec.DecodeError, UnicodeDecodeError, RecursionError: no JSON. msgspec.ValidationError: another type.
            ValueError: a number out of its bounds.
        """
        try:
            request = self._typed.decode(body)
        except msgspec.ValidationError as error:
            self._check_bounds(body, invalid_field(str(error)) or "")
            raise
        if unknown := self._names.decode(body).keys() - self._known:
            logger.warning("request %s: unknown fields are ignored: %s", request_id, shortened(unknown))
        return request

    def _check_bounds(self, body: bytes, name: str) -> None:
        """Refuse a field that is out of its bounds: msgspec's own error would not give the value.

        Raises:
            ValueError: it is.
        """
        try:
            value = msgspec.json.decode(self._names.decode(body)[name])
        except (LookupError, ValueError, RecursionError):
            return  # it is missing, or no JSON
        try:
            check_field(self._kind, name, value)
        except TypeError:
            pass  # of another type, as msgspec says


async def read_request(request: Request, decoder: Decoder[T], options: ServerOptions) -> T:
    """The struct in a request's body.

    Raises:
        APIError, msgspec.DecodeError, ...: as `read_body` and `Decoder.decode`.
    """
    return decoder.decode(await read_body(request.scope, request.receive, options), request.url.path)


def shortened(names: Iterable[str]) -> str:
    """Some of the names, each cut, for a line in the log."""
    some = sorted(names)
    more = ", ..." if len(some) > MAX_NAMED else ""
    return ", ".join(repr(name[:MAX_NAME]) for name in some[:MAX_NAMED]) + more


async def read_body(scope: Scope, receive: Receive, options: ServerOptions) -> bytes:
    """The body of a request, which must be JSON.

    Raises:
        APIError: it is too long, too slow, or of another type; or the client left.
    """
    headers = Headers(scope=scope)
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise APIError(415, f"the body must be JSON: Content-Type: application/json, got {kind or 'none'!r}")
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > options.max_request_bytes:
        raise too_long(options.max_request_bytes)
    try:
        return await asyncio.wait_for(receive_body(receive, options.max_request_bytes), options.body_seconds)
    except asyncio.TimeoutError:
        raise APIError(
            408, f"the body did not arrive within {options.body_seconds:g} s", headers=CLOSE
        ) from None


async def receive_body(receive: Receive, limit: int) -> bytes:
    """All of the body.

    Raises:
        APIError: it is over `limit` bytes, or the client left.
    """
    body, more = bytearray(), True
    while more:
        message: Any = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > limit:
            raise too_long(limit)
    return bytes(body)


def too_long(limit: int) -> APIError:
    """The error for a body over the limit."""
    return APIError(413, f"the body is over {limit} bytes", code="request_too_large", headers=CLOSE)
