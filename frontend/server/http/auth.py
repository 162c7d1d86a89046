"""API keys: every path requires one, except /health, /ready and the page's files.

A browser cannot send a key when it opens an address, so the page itself is public; it asks the user for the key and
sends it with every call.
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

PUBLIC = PATHS | {"/health", "/ready"}


class KeyCheck:
    """ASGI middleware that requires `Authorization: Bearer KEY` with one of `keys`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self._digests = [digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401."""
        # The same path that the router matches: a path is public only if it is exactly equal.
        if scope["type"] == "lifespan" or get_route_path(scope) in PUBLIC or self._has_key(scope):
            await self.app(scope, receive, send)
            return
        error = APIError(
            401, "give a valid API key", code="invalid_api_key", headers={"www-authenticate": "Bearer"}
        )
        await error_response(error)(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        given_digest = digest(given.strip().encode("latin-1"))
        # Every key is compared in constant time, so that timing reveals nothing about the keys.
        matches = [hmac.compare_digest(given_digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def digest(key: bytes) -> bytes:
    """Hash a key to a fixed length, so that comparing does not reveal the key's length."""
    return hashlib.sha256(key).digest()
