"""API keys: every path requires one, except /health, /ready and the page's files.

A browser cannot send a key when it opens an address, so the page itself is public; it asks the user for the key and
sends it with every call.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.json_response import error_response
from pagewire.frontend.server.http.key_file import (
    KeyEntry,
    Rights,
    check_entries,
    key_digest,
    read_key_file,
    signature_of,
)
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.frontend.server.http.tenants import ApiTenant, secret_salt
from pagewire.ipc.tenants import current_tenant

logger = logging.getLogger("pagewire.server")

PUBLIC = frozenset({"/health", "/ready"})


class ApiKeys:
    """The keys of a server: those of its options, named key-1, key-2, ..., and those of its key file.

    The file is read again when it has changed, so a key is withdrawn by deleting its line; requests that are open
    go on. A file that became unreadable or malformed changes nothing, and is logged.

    Args:
        options: those of the server. priorities: the engine schedules by priority.

    Raises:
        ValueError: the file cannot be read, or is not safe or malformed.
    """

    def __init__(self, options: ServerOptions, *, priorities: bool) -> None:
        self._path, self._priorities = options.api_key_file, priorities
        self._own = [
            KeyEntry(f"key-{number}", key_digest(key.encode()), Rights(admin=True))
            for number, key in enumerate(options.keys(), 1)
        ]
        several = self._path is not None or len(self._own) > 1
        self._salted = several if options.cache_salt_by_key is None else options.cache_salt_by_key
        self._shows_cached = self._salted or not several
        self._by_name: dict[str, ApiTenant] = {}
        self._by_digest: dict[bytes, ApiTenant] = {}
        self._signature: tuple[int, ...] = ()
        try:
            if self._path is not None:
                self._signature = signature_of(self._path)
            self._read()
        except OSError as error:
            raise ValueError(f"api_key_file: {error}") from None

    def tenant(self, key: bytes) -> ApiTenant | None:
        """The tenant that has this key; None if no tenant has it.

        Keys are looked up by their digest: the time that this takes reveals nothing about a key.
        """
        if self._path is not None:
            self._refresh(self._path)
        return self._by_digest.get(key_digest(key))

    def _refresh(self, path: str) -> None:
        """Read the file again if it has changed; a failure is logged once."""
        try:
            signature = signature_of(path)
        except OSError:
            signature = ()
        if signature == self._signature:
            return
        self._signature = signature
        try:
            self._read()
            logger.info("read the API keys in %s again: %d keys", path, len(self._by_digest))
        except (OSError, ValueError) as error:
            logger.error("the API keys stay as they were: %s", error)

    def _read(self) -> None:
        """Read the file, and take over what its tenants have in flight."""
        entries = list(self._own)
        if self._path is not None:
            read = read_key_file(self._path)
            own = {entry.name for entry in self._own}
            if taken := sorted(own & {entry.name for entry in read}):
                raise ValueError(f"{self._path}: the name {taken[0]} is that of a key of --api-key")
            entries += read
            check_entries(entries)
        self._check_priorities(entries)
        by_name: dict[str, ApiTenant] = {
            name: tenant for name, tenant in self._by_name.items() if tenant.num_requests
        }
        self._by_digest = {}
        for entry in entries:
            if entry.name not in by_name:
                by_name[entry.name] = ApiTenant(entry.name, entry.rights)
            self._by_digest[entry.digest] = by_name[entry.name]
        for entry in reversed(entries):  # so that the first line of a name gives the salt
            tenant = by_name[entry.name]
            tenant.rights, tenant.shows_cached = entry.rights, self._shows_cached
            tenant.salt = secret_salt(entry.digest) if self._salted else None
        self._by_name = by_name

    def _check_priorities(self, entries: list[KeyEntry]) -> None:
        for entry in entries:
            if not self._priorities and (entry.rights.priority or entry.rights.best_priority is not None):
                raise ValueError(
                    f"{self._path}: {entry.name} has a priority, but the engine schedules in order of arrival: "
                    "start it with --scheduling-policy priority"
                )


class KeyCheck:
    """ASGI middleware that requires a key, and puts its tenant into the scope.

    A key is sent as `Authorization: Bearer KEY`, or as `X-API-Key: KEY`, as Anthropic's clients do.

    files: paths of files that tell nothing of the engine, and need no key.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, files: Collection[str] = ()) -> None:
        self.app, self._keys = app, keys
        self._public = PUBLIC.union(files)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401."""
        # The same path that the router matches: a path is public only if it is exactly equal.
        if scope["type"] == "lifespan" or get_route_path(scope) in self._public:
            await self.app(scope, receive, send)
            return
        # A request of the server itself, such as one of a batch, has its tenant: no client can put one there.
        tenant = scope.get("tenant") or self._tenant(scope)
        if tenant is not None:
            current_tenant.set(tenant.name)
            await self.app({**scope, "tenant": tenant}, receive, send)
            return
        error = APIError(
            401, "give a valid API key", code="invalid_api_key", headers={"www-authenticate": "Bearer"}
        )
        await error_response(error, scope)(scope, receive, send)

    def _tenant(self, scope: Scope) -> ApiTenant | None:
        headers = Headers(scope=scope)
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = (bearer if scheme.lower() == "bearer" else None, headers.get("x-api-key"))
        tenants = (self._keys.tenant(key.strip().encode("latin-1")) for key in given if key is not None)
        return next((tenant for tenant in tenants if tenant is not None), None)
