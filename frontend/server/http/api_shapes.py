"""How each API writes errors and streams: OpenAI's, Anthropic's (/v1/messages), Ollama's (/api), /generate,
and requests over a WebSocket.

OpenAI's and Anthropic's have /v1/models in common: a request with the header `anthropic-version` is Anthropic's.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette._utils import get_route_path
from starlette.types import Scope

from pagewire.frontend.server.http import sse
from pagewire.frontend.server.http.errors import APIError

NO_THREADS = "thread_unsupported_request"
"""Code of the error upon which Anthropic's clients send all messages of a conversation themselves."""


class ErrorBody(msgspec.Struct):
    """Details of an error.

    type: class of errors. param: field that caused it, if known. code: machine-readable name of the error.
    """

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct):
    """Body of the response to a failed request."""

    error: ErrorBody


class AnthropicErrorDetails(msgspec.Struct):
    """A change that clients make after an error. error_code: its name. unsupported: fields to leave out."""

    error_code: str
    unsupported: list[str]


class AnthropicErrorBody(msgspec.Struct):
    """Details of an error. type: class of errors."""

    type: str
    message: str
    details: AnthropicErrorDetails | UnsetType = UNSET


class AnthropicError(msgspec.Struct):
    """Body of the response to a failed request of Anthropic's API, and the last event of a failed stream."""

    error: AnthropicErrorBody
    type: Literal["error"] = "error"


class SocketError(msgspec.Struct):
    """An error as a message of a WebSocket. status, headers: those of the HTTP response that it would be."""

    status: int
    error: ErrorBody
    headers: dict[str, str] = {}
    type: Literal["error"] = "error"


class OllamaError(msgspec.Struct):
    """Body of the response to a failed request of Ollama's API, and the last line of a failed stream."""

    error: str


class ApiShape:
    """OpenAI's shape, which all paths have that are in no other API.

    Attributes:
        error: struct of an error's body. types: names of classes of errors, by status; other_type: of all others.
        media: content type of streams. id_headers: headers of responses that have the request's id.
    """

    error: Any = ErrorResponse
    media = "text/event-stream"
    any_content_type = False
    id_headers: ClassVar = [b"x-request-id"]
    types: ClassVar = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        408: "timeout_error",
        429: "rate_limit_error",
        499: "abort_error",
        500: "server_error",
        503: "service_unavailable_error",
    }
    other_type = "invalid_request_error"

    def status(self, error: APIError) -> int:
        """Return the HTTP status of an error."""
        return error.status

    def encode(self, error: APIError) -> bytes:
        """Return the body of an error, as JSON."""
        return msgspec.json.encode(
            ErrorResponse(ErrorBody(error.message, self.type_of(error), error.param, error.code))
        )

    def type_of(self, error: APIError) -> str:
        """Return the name of an error's class."""
        return self.types.get(self.status(error), self.other_type)

    def last_words(self, error: APIError) -> bytes:
        """Return the end of a stream that has failed."""
        return b"data: " + self.encode(error) + b"\n\n" + sse.DONE


class AnthropicShape(ApiShape):
    """Anthropic's shape: classes of errors with its names, and an event `error`."""

    error = AnthropicError
    id_headers: ClassVar = [b"x-request-id", b"request-id"]
    types: ClassVar = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        408: "timeout_error",
        413: "request_too_large",
        429: "rate_limit_error",
        499: "api_error",
        500: "api_error",
        529: "overloaded_error",
    }

    def status(self, error: APIError) -> int:
        """Return the HTTP status of an error: 529 where only later attempts can succeed, 400 for any bad body."""
        if error.status == 503 or error.code == "engine_busy":
            return 529
        return 400 if error.status == 422 else error.status

    def encode(self, error: APIError) -> bytes:
        """Return the body of an error, as JSON."""
        body = AnthropicErrorBody(self.type_of(error), error.message)
        if error.code == NO_THREADS:
            body.details = AnthropicErrorDetails(NO_THREADS, ["thread"])
        return msgspec.json.encode(AnthropicError(body))

    def last_words(self, error: APIError) -> bytes:
        """Return the end of a stream that has failed."""
        return b"event: error\ndata: " + self.encode(error) + b"\n\n"


class OllamaShape(ApiShape):
    """Ollama's shape: an error is a text, and a stream is lines of JSON.

    Its documentation calls it with `curl -d`, and some clients say nothing of their bodies.
    """

    error = OllamaError
    media = "application/x-ndjson"
    any_content_type = True

    def status(self, error: APIError) -> int:
        """Return the HTTP status of an error: 400 for any bad body."""
        return 400 if error.status == 422 else error.status

    def encode(self, error: APIError) -> bytes:
        """Return the body of an error, as JSON."""
        return msgspec.json.encode(OllamaError(error.message))

    def last_words(self, error: APIError) -> bytes:
        """Return the end of a stream that has failed."""
        return self.encode(error) + b"\n"


class DemonstrationShape(ApiShape):
    """The shape of /generate: OpenAI's errors, and a stream of JSON that null characters separate."""

    media = "text/plain"

    def last_words(self, error: APIError) -> bytes:
        """Return the end of a stream that has failed."""
        return self.encode(error) + b"\0"


class SocketShape(ApiShape):
    """The shape of requests over a WebSocket: an error is an event."""

    error = SocketError

    def encode(self, error: APIError) -> bytes:
        """Return the body of an error, as JSON."""
        body = ErrorBody(error.message, self.type_of(error), error.param, error.code)
        return msgspec.json.encode(SocketError(error.status, body, error.headers))

    def last_words(self, error: APIError) -> bytes:
        """Return the end of a stream that has failed."""
        return b"event: error\ndata: " + self.encode(error) + b"\n\n"


OPENAI, ANTHROPIC, SOCKET = ApiShape(), AnthropicShape(), SocketShape()
OTHERS = {
    "/v1/messages": ANTHROPIC,
    "/api": OllamaShape(),
    "/generate": DemonstrationShape(),
}  # by the path that begins theirs
SHARED = "/v1/models"  # of OpenAI's and Anthropic's APIs
SHAPES = (OPENAI, *OTHERS.values())


def api_shape(scope: Scope) -> ApiShape:
    """Return the shape of the API to which an ASGI request belongs."""
    if "socket" in scope:
        return SOCKET
    path = get_route_path(scope)
    if is_below(path, SHARED) and any(name == b"anthropic-version" for name, _ in scope["headers"]):
        return ANTHROPIC
    return shape_at(path)


def shape_at(path: str) -> ApiShape:
    """Return the shape of the API to which a path belongs."""
    return next((shape for root, shape in OTHERS.items() if is_below(path, root)), OPENAI)


def is_below(path: str, root: str) -> bool:
    """Return True if a path is `root`, or below it."""
    return f"{path}/".startswith(f"{root}/")
