"""Access by key: every path is closed to who does not show one, but /health and the files of the page.

A browser cannot show a key when it opens an address: the page asks for it, and shows it in every call it makes.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.json_response import error_response
from pagewire.frontend.server.page import PATHS

PUBLIC = PATHS | {"/health"}


class KeyCheck:
    """ASGI middleware. keys: of which a request must show one, as `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self._digests = [digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer 401."""
        # The path is what the routes will see: one that is not exactly a public one is none.
        if scope["type"] == "lifespan" or get_route_path(scope) in PUBLIC or self._shows_key(scope):
            await self.app(scope, receive, send)
            return
        error = APIError(
            401, "give a valid API key", code="invalid_api_key", headers={"www-authenticate": "Bearer"}
        )
        await error_response(error)(scope, receive, send)

    def _shows_key(self, scope: Scope) -> bool:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        shown = digest(given.strip().encode("latin-1"))
        # All are compared, in constant time.
        matches = [hmac.compare_digest(shown, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def digest(key: bytes) -> bytes:
    """Of a length that tells nothing of the key's."""
    return hashlib.sha256(key).digest()
