"""Errors of requests, with their HTTP status; `api_shapes.py` writes them."""

from __future__ import annotations

import errno
import re
from collections.abc import Collection, Mapping
from types import MappingProxyType

import msgspec

from pagewire.ipc.errors import (
    AdapterCrashedWorkerError,
    EngineAsleepError,
    EngineBusyError,
    EngineDeadError,
    EngineStalledError,
    FieldError,
    RequestCrashedEngineError,
    WeightsChangedError,
    root_of,
)
from pagewire.ipc.quoting import shortened

RETRY_SECONDS = 1  # Retry-After header when too many requests are waiting
# In messages about prompts over the context length. LiteLLM knows them by the first of these phrases,
# LangChain by "the prompt is too long".
TOO_LONG = re.compile(r"maximum context length|max_model_len|leaves no room")
NO_RETRY = {"x-should-retry": "false"}  # header that OpenAI's clients obey; else they retry every 408
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
NO_ROOM = "the server has as many files and sockets open as it may have; try again"


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


class FieldNames:
    """The names that an API has for the fields of its requests.

    names: by the path of a field as the library or a chat completion has it, in which `[]` is any index. What is
        within a field goes along; of two paths that fit, the longer one counts. Fields without a name here are
        called the same.
    fields: of the requests; None: any.
    """

    def __init__(
        self, names: Mapping[str, str] = MappingProxyType({}), fields: Collection[str] | None = None
    ) -> None:
        self._names, self._fields = names, fields

    def path(self, path: str) -> str:
        """Return the path of a field as the API has it: `tools[0].name` for `tools[0].function.name`."""
        parts = path.replace("]", "[").split("[")
        indices, given = parts[1::2], "[]".join(parts[::2])
        within = [given[:end] for end in range(len(given), 0, -1) if given[end : end + 1] in ("", ".", "[")]
        known = next((name for name in within if name in self._names), None)
        if known is None:
            return path
        first, *rest = (self._names[known] + given[len(known) :]).split("[]")
        kept = indices[len(indices) - len(rest) :]
        return first + "".join(f"[{index}]{part}" for index, part in zip(kept, rest, strict=True))

    def param(self, path: str) -> str | None:
        """Return the field of a request with this path; None: the API has none."""
        field = root_of(self.path(path))
        return field if self._fields is None or field in self._fields else None

    def __call__(self, error: APIError) -> APIError:
        """Return an error of this server with the API's own name of its field."""
        if error.param is None or (path := self.path(error.param)) == error.param:
            return error
        param = root_of(path)
        return APIError(error.status, error.message, param=param, code=error.code, headers=error.headers)


AS_THEY_ARE = FieldNames()


def api_error(error: BaseException, names: FieldNames = AS_THEY_ARE) -> APIError:
    """Map any exception to an APIError with its message.

    ValueError and TypeError count as the client's mistakes (400). names: of the fields of the request.
    """
    if isinstance(error, APIError):
        return names(error)
    if isinstance(error, EngineStalledError):
        return APIError(503, str(error), code="engine_stalled", headers={"retry-after": str(RETRY_SECONDS)})
    if isinstance(error, EngineAsleepError):
        return APIError(503, str(error), code="engine_asleep", headers={"retry-after": str(RETRY_SECONDS)})
    if isinstance(error, OSError) and error.errno in NO_DESCRIPTORS:
        return APIError(503, NO_ROOM, code="server_busy", headers={"retry-after": str(RETRY_SECONDS)})
    if isinstance(error, EngineBusyError):
        return APIError(429, str(error), code="engine_busy", headers={"retry-after": str(RETRY_SECONDS)})
    if isinstance(error, EngineDeadError):
        return APIError(503, f"the engine is not available: {error}", code="engine_down")
    if isinstance(error, RequestCrashedEngineError):
        return APIError(500, str(error), code="request_crashed_engine", headers=NO_RETRY)
    if isinstance(error, AdapterCrashedWorkerError):
        return APIError(500, str(error), code="adapter_crashed_worker", headers=NO_RETRY)
    if isinstance(error, WeightsChangedError):
        return APIError(503, str(error), code="weights_changed", headers={"retry-after": str(RETRY_SECONDS)})
    if isinstance(error, msgspec.ValidationError):
        return APIError(422, str(error), param=invalid_field(str(error)))
    if isinstance(error, (msgspec.DecodeError, UnicodeDecodeError, RecursionError)):
        return APIError(400, f"the body is not valid JSON: {error}")
    if isinstance(error, PermissionError) and error.errno is None:  # the core's, not the file system's
        return APIError(403, str(error), code="not_permitted")
    if isinstance(error, (ValueError, TypeError)):
        code = "context_length_exceeded" if TOO_LONG.search(str(error)) else None
        if isinstance(error, FieldError):
            return APIError(400, error.worded(names.path), param=names.param(error.path), code=code)
        return APIError(400, str(error), code=code)
    return APIError(500, f"{error}" or type(error).__name__)


def invalid_field(message: str) -> str | None:
    """Return the field named by msgspec: "... - at `$.messages[0].role`", or "missing required field `x`"."""
    match = re.search(r"at `\$\.(\w+)", message) or re.search(r"required field `(\w+)`", message)
    return match[1] if match else None
