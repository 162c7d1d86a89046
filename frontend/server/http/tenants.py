"""For whom a request is served: its name, its rights, its part of the prefix cache, and what it has in flight.

KeyCheck --> scope["tenant"] --> Exchange: `Lease` counts the request and its tokens until it ends, however it ends
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from pagewire.frontend.client import Prepared
from pagewire.frontend.server.http.errors import RETRY_SECONDS, APIError
from pagewire.frontend.server.http.key_file import Rights
from pagewire.ipc.wire.pooling import PoolingParams

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]

RETRY = {"retry-after": str(RETRY_SECONDS)}


class ApiTenant:
    """The owner of one or several API keys.

    Attributes:
        name: for logs, metrics and the engine; "" without keys. rights: what it may do.
        salt: keeps its cached prefixes apart from those of others; None: they are shared.
        shows_cached: whether it sees how much of a prompt was cached, which shows the prompts of others if
            prefixes are shared.
        num_requests, num_tokens: in flight.
    """

    def __init__(
        self, name: str, rights: Rights, salt: str | None = None, *, shows_cached: bool = True
    ) -> None:
        self.name, self.rights, self.salt, self.shows_cached = name, rights, salt, shows_cached
        self.num_requests = self.num_tokens = 0

    @property
    def admin(self) -> bool:
        """True if it may use the endpoints for operators."""
        return self.rights.admin

    def apply(self, request: Any, *, by_priority: bool) -> None:
        """Give a request of one of the API's types the priority and the cache salt that it has as this tenant's.

        by_priority: its engine schedules by priority; on another one, a tenant's requests have none.

        Raises:
            APIError: it asks for a better priority than it may have.
        """
        if by_priority:
            self._apply_priority(request)
        if self.salt is not None and request.cache_salt != "":
            given = "" if request.cache_salt is None else "." + request.cache_salt
            request.cache_salt = hashlib.sha256((self.salt + given).encode("utf-8", "replace")).hexdigest()

    def _apply_priority(self, request: Any) -> None:
        if request.priority is None:
            request.priority = self.rights.priority or None
        best = self.rights.best_priority
        if best is not None and (request.priority or 0) < best:
            message = (
                f"priority={request.priority or 0} is better than this key may ask for (best_priority={best})"
            )
            raise APIError(403, message, param="priority", code="priority_not_allowed")


ANYONE = ApiTenant("", Rights(admin=True))  # of a server without keys


def tenant_of(scope: Mapping[str, Any]) -> ApiTenant:
    """The tenant of an ASGI request whose key was checked."""
    tenant: ApiTenant = scope.get("tenant", ANYONE)
    return tenant


def require_admin(endpoint: Endpoint) -> Endpoint:
    """Return an endpoint that only tenants with the right `admin` may call; others get status 403."""

    async def checked(request: Request) -> Response:
        if not tenant_of(request.scope).admin:
            raise APIError(403, "this key has no right to this path (admin)", code="admin_required")
        return await endpoint(request)

    return checked


def secret_salt(digest: bytes) -> str:
    """A cache salt made of the digest of a key: only who knows the key can give it."""
    return hmac.new(digest, b"pagewire cache salt", hashlib.sha256).hexdigest()


class Lease:
    """The part of its tenant's limits that one HTTP request takes.

    `end` may be called more than once, and gives back everything.
    """

    def __init__(self, tenant: ApiTenant) -> None:
        self._tenant = tenant
        self._counted = self._kept = False
        self._num_tokens = 0

    def begin(self) -> None:
        """Count the request.

        Raises:
            APIError: the tenant has as many in flight as it may.
        """
        tenant, limit = self._tenant, self._tenant.rights.max_requests
        if limit is not None and tenant.num_requests >= limit:
            message = (
                f"{tenant.num_requests} requests of this key are in flight (limit: max_requests={limit})"
            )
            raise APIError(429, message, code="rate_limit_exceeded", headers=RETRY)
        tenant.num_requests += 1
        self._counted = True

    def admit(self, prepared: Sequence[Prepared]) -> None:
        """Count the tokens of what the request is about to submit, and make it the tenant's.

        What it submitted before has ended: beam search submits step by step.

        Raises:
            APIError: these are more tokens than the tenant may have in flight; nothing is counted.
        """
        tenant, rank, num_tokens = self._tenant, 0, 0
        for item in prepared:
            request = item.request
            request.tenant, request.rank = tenant.name, rank
            num_tokens += len(request.prompt.token_ids)
            if isinstance(request.task, PoolingParams):
                rank += 1
            else:
                rank += request.params.n
                num_tokens += request.params.n * (request.params.max_tokens or 0)
        self._release_tokens()
        if (limit := tenant.rights.max_tokens) is not None and tenant.num_tokens + num_tokens > limit:
            self._refuse(num_tokens, limit)
        self._num_tokens = num_tokens
        tenant.num_tokens += num_tokens

    def _refuse(self, num_tokens: int, limit: int) -> None:
        text = f"the prompts and max_tokens of this request are {num_tokens} tokens"
        if num_tokens > limit:
            message = f"{text}, more than this key may have in flight (limit: max_tokens={limit})"
            raise APIError(400, message, param="max_tokens")
        message = (
            f"{text}, and {self._tenant.num_tokens} are in flight with this key (limit: max_tokens={limit})"
        )
        raise APIError(429, message, code="rate_limit_exceeded", headers=RETRY)

    def keep_until(self, task: asyncio.Task[None]) -> None:
        """Go on counting until a task in the background is done, though the HTTP request ends before."""
        self._kept = True
        task.add_done_callback(lambda _: self._release())

    def end(self) -> None:
        """Give back what was counted, unless a task keeps it."""
        if not self._kept:
            self._release()

    def _release(self) -> None:
        self._release_tokens()
        if self._counted:
            self._counted = False
            self._tenant.num_requests -= 1

    def _release_tokens(self) -> None:
        self._tenant.num_tokens -= self._num_tokens
        self._num_tokens = 0
