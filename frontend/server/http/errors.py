"""Errors of requests, with their HTTP status; `api_shapes.py` writes them."""

from __future__ import annotations

import re

import msgspec

from pagewire.ipc.errors import (
    AdapterCrashedWorkerError,
    EngineBusyError,
    EngineDeadError,
    EngineStalledError,
    RequestCrashedEngineError,
)
from pagewire.ipc.quoting import shortened

RETRY_SECONDS = 1  # Retry-After header when too many requests are waiting
# In messages about prompts over the context length. LiteLLM knows them by the first of these phrases,
# LangChain by "the prompt is too long".
TOO_LONG = re.compile(r"maximum context length|max_model_len|leaves no room")
NO_RETRY = {"x-should-retry": "false"}  # header that OpenAI's clients obey; else they retry every 408


class APIError(Exception):
    """An error with its HTTP status.

    message: shortened, so that neither the answer nor the log repeats all that a client sent. param: field that
    caused it. code: machine-readable name. headers: additional response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.status, self.message, self.param, self.code = status, shortened(message), param, code
        super().__init__(self.message)
        self.headers = headers or {}


def api_error(error: BaseException, fields: tuple[str, ...] = ()) -> APIError:
    """Map any exception to an APIError with its message.

    ValueError and TypeError count as the client's mistakes (400). fields: names of the request's fields; the one
    that the message begins with becomes `param`.
    """
    if isinstance(error, APIError):
        return error
    if isinstance(error, EngineStalledError):
        return APIError(503, str(error), code="engine_stalled", headers={"retry-after": str(RETRY_SECONDS)})
    if isinstance(error, EngineBusyError):
        return APIError(429, str(error), code="engine_busy", headers={"retry-after": str(RETRY_SECONDS)})
    if isinstance(error, EngineDeadError):
        return APIError(503, f"the engine is not available: {error}", code="engine_down")
    if isinstance(error, RequestCrashedEngineError):
        return APIError(500, str(error), code="request_crashed_engine", headers=NO_RETRY)
    if isinstance(error, AdapterCrashedWorkerError):
        return APIError(500, str(error), code="adapter_crashed_worker", headers=NO_RETRY)
    if isinstance(error, msgspec.ValidationError):
        return APIError(422, str(error), param=invalid_field(str(error)))
    if isinstance(error, (msgspec.DecodeError, UnicodeDecodeError, RecursionError)):
        return APIError(400, f"the body is not valid JSON: {error}")
    if isinstance(error, PermissionError) and error.errno is None:  # the core's, not the file system's
        return APIError(403, str(error), code="not_permitted")
    if isinstance(error, (ValueError, TypeError)):
        code = "context_length_exceeded" if TOO_LONG.search(str(error)) else None
        return APIError(400, str(error), param=named_field(str(error), fields), code=code)
    return APIError(500, f"{error}" or type(error).__name__)


def invalid_field(message: str) -> str | None:
    """Return the field named by msgspec: "... - at `$.messages[0].role`", or "missing required field `x`"."""
    match = re.search(r"at `\$\.(\w+)", message) or re.search(r"required field `(\w+)`", message)
    return match[1] if match else None


def named_field(message: str, fields: tuple[str, ...]) -> str | None:
    """Return the field that a message begins with, such as "temperature must be ..."; None if there is none."""
    word = re.match(r"\w+", message)
    return word[0] if word and word[0] in fields else None
