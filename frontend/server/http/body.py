"""Request bodies: read within limits of size, time and memory of all together, and decoded into structs."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive, Scope

from pagewire.frontend.server.http.api_shapes import api_shape
from pagewire.frontend.server.http.errors import RETRY_SECONDS, APIError, invalid_field
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.frontend.server.http.warnings import warn_client
from pagewire.ipc.bounds import check_field
from pagewire.ipc.compatibility import REQUEST_FIELDS, needs_warning
from pagewire.ipc.quoting import quoted
from pagewire.ipc.tenants import current_tenant
from pagewire.ipc.wire.budget import MAX_CONTAINERS

T = TypeVar("T")
Read = TypeVar("Read", covariant=True)

CLOSE = {"connection": "close"}  # for errors that leave a part of the body unread
SMALL_BODY_BYTES = 64 << 10  # of each body, which are not counted: small requests pass when large ones cannot
LARGE_BODIES = 16  # bodies of `max_request_bytes` that may arrive at the same time
TENANT_QUARTERS = 3  # of what the others leave of the memory for bodies
MAX_NAMED = 16  # unknown fields named in a warning: the client chooses how many it sends
MAX_NAME = 64  # characters of each of these names
# Of a field that is out of its bounds; of a larger one the error does not give the value.
MAX_CHECKED_BYTES = 1 << 20


class ClientLeftError(APIError):
    """The client has disconnected. The response has no reader; the status is for the log."""

    def __init__(self) -> None:
        super().__init__(499, "the client left", code="client_left")


class IncomingBodies:
    """Memory of the bodies that are not decoded yet, and the turn of large ones to be.

    A tenant, who has a key, may have three quarters of what the others leave, so that none locks others out.

    limit: bytes of all together, beside a small part of each.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.num_bytes = limit, 0
        self._by_tenant: Counter[str] = Counter()
        self._decoding = asyncio.Lock()

    @contextmanager
    def body(self) -> Iterator[bytearray]:
        """A body, empty yet, which is counted until the block ends."""
        body, tenant = bytearray(), current_tenant.get()
        try:
            yield body
        finally:
            self._add(tenant, -counted_bytes(len(body)))

    @contextmanager
    def counted(self, num_bytes: int) -> Iterator[None]:
        """Count what has become of a body until the block ends. Raises APIError: there is no room."""
        tenant = current_tenant.get()
        self.grow(0, num_bytes)
        try:
            yield
        finally:
            self._add(tenant, -counted_bytes(num_bytes))

    @asynccontextmanager
    async def turn(self, num_bytes: int) -> AsyncIterator[None]:
        """Decode a large body alone, and leave as much time to everything else afterwards; small ones do not wait.

        A body of 16 MB holds up the event loop for a tenth of a second and more, and a client may send many.
        """
        if num_bytes <= SMALL_BODY_BYTES:
            yield
            return
        async with self._decoding:
            begin = time.monotonic()
            try:
                yield
            finally:
                await asyncio.sleep(time.monotonic() - begin)

    def grow(self, before: int, after: int) -> None:
        """Count a body of `current_tenant` that grows from one size to another.

        Raises:
            APIError: there is no room: for nobody (503), or for this tenant (429).
        """
        tenant, num_bytes = current_tenant.get(), counted_bytes(after) - counted_bytes(before)
        own = self._by_tenant[tenant] + num_bytes
        share = (self.limit - self.num_bytes + self._by_tenant[tenant]) * TENANT_QUARTERS // 4
        if self.num_bytes + num_bytes > self.limit:
            raise self._refusal(503, f"requests of over {self.limit} bytes in all are arriving")
        if tenant and own > share:
            raise self._refusal(
                429, f"requests of over {share} bytes of this key, its share now, are arriving"
            )
        self._add(tenant, num_bytes)

    def _add(self, tenant: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._by_tenant[tenant] += num_bytes
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]

    @staticmethod
    def _refusal(status: int, why: str) -> APIError:
        headers = CLOSE | {"retry-after": str(RETRY_SECONDS)}
        return APIError(status, f"{why}; try again", code="too_many_bodies", headers=headers)


def counted_bytes(num_bytes: int) -> int:
    """The bytes of a body that count."""
    return max(0, num_bytes - SMALL_BODY_BYTES)


class AbsentFields:
    """The fields of a struct type that `ipc.compatibility` knows as absent."""

    def __init__(self, kind: type) -> None:
        names = (field.encode_name for field in msgspec.structs.fields(kind))
        rows = ((name, REQUEST_FIELDS.get(f"{kind.__name__}.{name}")) for name in names)
        self._absent = [(name, absent) for name, absent in rows if absent is not None]

    def settle(self, request: Any) -> None:
        """Warn of those that a request has, without their values, which may be a client's text.

        Raises:
            ValueError: one would have an effect.
        """
        for name, absent in self._absent:
            if needs_warning(name, getattr(request, name), absent):
                warn_client(absent.warning(name))


class BodyDecoder(Protocol[Read]):
    """Reads bodies of one type.

    Attributes:
        fields: names of its fields.
    """

    fields: tuple[str, ...]

    async def read(self, scope: Scope, receive: Receive, options: ServerOptions) -> Read:
        """Read and decode a request's body. Raises APIError, ValueError, or errors of msgspec."""


class Decoder(Generic[T]):
    """Decodes bodies into one struct type.

    Unknown fields are ignored, and named in a warning (of a large body only the first). Those that
    `ipc.compatibility` has for the type are refused, or ignored with a warning.

    Attributes:
        fields: names of the struct's fields.
    """

    def __init__(self, kind: type[T]) -> None:
        self.fields: tuple[str, ...] = tuple(field.encode_name for field in msgspec.structs.fields(kind))  # type: ignore[arg-type]
        self._kind: Any = kind
        self._known = frozenset(self.fields)
        self._absent = AbsentFields(kind)
        self._typed = msgspec.json.Decoder(kind)
        raw = [(name, msgspec.Raw, msgspec.Raw()) for name in self.fields]
        self._raw = msgspec.json.Decoder(msgspec.defstruct("Fields", raw))
        self._strict = msgspec.json.Decoder(msgspec.defstruct("Fields", raw, forbid_unknown_fields=True))
        self._names = msgspec.json.Decoder(dict[str, msgspec.Raw])

    def decode(self, body: bytes | bytearray) -> T:
        """Decode a body; warns of fields without effect.

        Raises:
            APIError: the body has too many arrays and objects.
            msgspec.DecodeError, UnicodeDecodeError: the body is not JSON, or nested too deeply.
            msgspec.ValidationError: the JSON does not match the struct.
            ValueError: a number is out of its bounds, or a field is not supported.
        """
        if (number := body.count(b"{") + body.count(b"[")) > MAX_CONTAINERS:
            message = f"the body has {number} opening brackets; at most {MAX_CONTAINERS} are allowed"
            raise APIError(413, message, code="request_too_large")
        try:
            request = self._typed.decode(body)
        except msgspec.ValidationError as error:
            self._check_bounds(body, invalid_field(str(error)) or "")
            raise
        except RecursionError as error:
            raise msgspec.DecodeError(str(error)) from None
        if unknown := self._unknown(body):
            warn_client(f"unknown fields are ignored: {shorten_names(unknown)}")
        self._absent.settle(request)
        return request

    async def read(self, scope: Scope, receive: Receive, options: ServerOptions) -> T:
        """Read and decode a request's body. Raises as `decoded_body`."""
        return await decoded_body(scope, receive, self, options)

    def _unknown(self, body: bytes | bytearray) -> set[str]:
        """Names of unknown fields: of a large body, which may have a million of them, only the first."""
        if len(body) <= SMALL_BODY_BYTES:
            return self._names.decode(body).keys() - self._known
        try:
            self._strict.decode(body)
        except msgspec.ValidationError as error:
            return {str(error).partition("`")[2].removesuffix("`")}
        return set()

    def _check_bounds(self, body: bytes | bytearray, name: str) -> None:
        """Refuse a field that is out of its bounds: msgspec's own error would not give the value.

        Raises:
            ValueError: it is.
        """
        try:
            raw = getattr(self._raw.decode(body), name)
            if memoryview(raw).nbytes > MAX_CHECKED_BYTES:
                return
            value = msgspec.json.decode(raw)
        except (AttributeError, ValueError, RecursionError):
            return  # it is missing, or no JSON
        try:
            check_field(self._kind, name, value)
        except TypeError:
            pass  # of another type, as msgspec says


async def read_request(request: Request, decoder: Decoder[T], options: ServerOptions) -> T:
    """Read and decode a request's body.

    Raises:
        Exceptions of `read_body` and `Decoder.decode`.
    """
    return await decoded_body(request.scope, request.receive, decoder, options)


async def decoded_body(scope: Scope, receive: Receive, decoder: Decoder[T], options: ServerOptions) -> T:
    """Read and decode a request's body, in its turn if it is large.

    Raises:
        Exceptions of `read_body` and `Decoder.decode`.
    """
    bodies: IncomingBodies = scope["app"].state.incoming_bodies
    with bodies.body() as body:
        await read_body(scope, receive, options, bodies, body)
        async with bodies.turn(len(body)):
            return decoder.decode(body)


def shorten_names(names: Iterable[str]) -> str:
    """Return a list of names for a warning: at most `MAX_NAMED`, each of at most `MAX_NAME` characters."""
    some = sorted(names)
    more = ", ..." if len(some) > MAX_NAMED else ""
    return ", ".join(repr(name[:MAX_NAME]) for name in some[:MAX_NAMED]) + more


async def read_body(
    scope: Scope, receive: Receive, options: ServerOptions, bodies: IncomingBodies, body: bytearray
) -> None:
    """Read the body of a request, whose content type must be JSON, into `body`, which is one of `bodies`.

    Raises:
        APIError: the body is too large, too slow or of another type, or the client disconnected.
    """
    headers = Headers(scope=scope)
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = kind == "application/json" or kind.endswith("+json")
    if not (is_json or api_shape(scope).any_content_type):
        raise APIError(
            415, f"the body must be JSON: Content-Type: application/json, got {quoted(kind or 'none')}"
        )
    await receive_within(scope, receive, options, options.max_request_bytes, bodies, body)


async def receive_within(
    scope: Scope,
    receive: Receive,
    options: ServerOptions,
    limit: int,
    bodies: IncomingBodies,
    body: bytearray,
) -> None:
    """Read the body of a request, of at most `limit` bytes, into `body`, which is one of `bodies`.

    Raises:
        APIError: the body is too large or too slow, or the client disconnected.
    """
    length = Headers(scope=scope).get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise body_too_long(limit)
    arrival = receive_body(receive, limit, bodies, body)
    try:
        await asyncio.wait_for(arrival, options.body_seconds)
    except asyncio.TimeoutError:
        raise APIError(
            408, f"the body did not arrive within {options.body_seconds:g} s", headers=CLOSE
        ) from None


async def receive_body(receive: Receive, limit: int, bodies: IncomingBodies, body: bytearray) -> None:
    """Read the whole body into `body`.

    Raises:
        APIError: it has more than `limit` bytes, or there is no room left, or the client disconnected.
    """
    more = True
    while more:
        message: Any = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        part = message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) + len(part) > limit:
            raise body_too_long(limit)
        bodies.grow(len(body), len(body) + len(part))
        body += part


def body_too_long(limit: int) -> APIError:
    """Return the error for a body of more than `limit` bytes."""
    return APIError(413, f"the body is over {limit} bytes", code="request_too_large", headers=CLOSE)
