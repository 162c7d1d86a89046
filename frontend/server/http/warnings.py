"""Warnings of what has no effect: in the log, and for the client in headers `Warning: 299 pagewire "..."`.

The code that notices it, on the event loop, may be far from the response, so the warnings belong to the context.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from dataclasses import dataclass, field

from pagewire.ipc.quoting import shortened

logger = logging.getLogger("pagewire.server")

MAX_WARNINGS = 8  # of a response: clients and proxies limit the size of all headers, some to 8 KiB
MAX_TEXT = 500  # characters of each


@dataclass
class RequestWarnings:
    """The warnings about one request so far. request_id: for the log."""

    request_id: str
    texts: list[str] = field(default_factory=list)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers of the response."""
        return [(b"warning", b'299 pagewire "' + quotable(text) + b'"') for text in self.texts[:MAX_WARNINGS]]


_current: ContextVar[RequestWarnings] = ContextVar("request_warnings")


def begin_warnings(request_id: str) -> RequestWarnings:
    """Begin to collect the warnings about a request, which is handled in the present context."""
    warnings = RequestWarnings(request_id)
    _current.set(warnings)
    return warnings


def warn_client(text: str) -> None:
    """Warn the client whose request is handled, and log it; once for each text."""
    warnings = _current.get()
    if (text := shortened(text, MAX_TEXT)) not in warnings.texts:
        warnings.texts.append(text)
        logger.warning("request %s: %s", warnings.request_id, text)


def quotable(text: str) -> bytes:
    r"""Return a text as it may stand between quotes in a header: in ASCII, with `"` and `\` escaped."""
    plain = "".join(character if " " <= character <= "~" else "?" for character in text)
    return plain.replace("\\", "\\\\").replace('"', '\\"').encode()
