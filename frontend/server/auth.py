"""Access by key: every path but /health is closed to who does not show one."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pagewire.frontend.server.errors import APIError
from pagewire.frontend.server.responding import error_response

PUBLIC = frozenset({"/health"})


class KeyCheck:
    """ASGI middleware. keys: of which a request must show one, as `Authorization: Bearer KEY`.

    root_path: the prefix that is not part of the routes' paths.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], root_path: str = "") -> None:
        self.app = app
        self._keys = [key.encode() for key in keys]
        self._public = PUBLIC | {root_path + path for path in PUBLIC}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer 401."""
        if scope["type"] == "lifespan" or scope["path"] in self._public or self._has_key(scope):
            await self.app(scope, receive, send)
            return
        error = APIError(
            401, "give a valid API key", code="invalid_api_key", headers={"www-authenticate": "Bearer"}
        )
        await error_response(error)(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        shown = given.strip().encode("latin-1", "replace")
        # All keys are compared, each in constant time.
        matches = [hmac.compare_digest(shown, key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)
