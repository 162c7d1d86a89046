"""Which web pages may use the server: its own, and those of `--allowed-origins`.

Any page that a user opens can send requests to the user's own machine, and by DNS rebinding (its name made to point
there) even read the answers. A page cannot choose the headers `Origin` and `Host`, so they identify it. Where an
API key is required, a page of another origin lacks the key, and nothing more is needed.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.json_response import error_response
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.ipc.quoting import quoted

ANY = "*"
AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~%!$&'()*+,;=-]*)(?::\d*)?")  # as in RFC 3986
CLOSE = {"connection": "close"}  # what is behind such a request cannot be trusted to be another one
MOST_KNOWN = 64  # hosts that are not checked again
DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class OriginCheck:
    """ASGI middleware that refuses requests without one valid `Host`, for other hosts, and of other origins.

    Host names are checked with `--allowed-hosts`, or by default where only this machine can connect and no key is
    required; IP addresses, localhost and the address that the server is bound to are always allowed. Origins are
    checked where no key is required.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self.app = app
        self._known: set[tuple[bytes, bytes]] = set()  # headers Host that are allowed
        needs_key = options.keyed
        checks_hosts = options.allowed_hosts or (options.is_local() and options.uds is None and not needs_key)
        self._hosts = (
            [name.lower() for name in [*options.allowed_hosts, options.host]] if checks_hosts else [ANY]
        )
        self._origins = [ANY] if needs_key else [origin.lower() for origin in options.allowed_origins]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 400 or 403."""
        if scope["type"] in ("http", "websocket"):
            given = [header for header in scope["headers"] if header[0] in (b"host", b"origin")]
            if len(given) != 1 or given[0] not in self._known:
                error = self._refusal(given, scope["http_version"])
                if error is not None:
                    await error_response(error, scope)(scope, receive, send)
                    return
                if len(given) == 1 and given[0][0] == b"host" and len(self._known) < MOST_KNOWN:
                    self._known.add(given[0])
        await self.app(scope, receive, send)

    def _refusal(self, given: list[tuple[bytes, bytes]], version: str) -> APIError | None:
        hosts = [value for name, value in given if name == b"host"]
        origins = [value for name, value in given if name == b"origin"]
        host = hosts[0].decode("latin-1").lower() if hosts else ""
        if len(hosts) != 1 and not (not hosts and version == "1.0"):
            return APIError(
                400, f"a request needs one header Host, got {len(hosts)}", code="invalid_host", headers=CLOSE
            )
        if AUTHORITY.fullmatch(host) is None:
            return APIError(
                400, f"the header Host is not valid: {quoted(host)}", code="invalid_host", headers=CLOSE
            )
        if host and not is_allowed_host(host, self._hosts):
            message = (
                f"the host {quoted(host)} is not one of this server: if it is, give --allowed-hosts NAME"
            )
            return APIError(403, message, code="host_not_allowed")
        for value in origins:
            origin = value.decode("latin-1").lower()
            if not is_allowed_origin(origin, host, self._origins):
                message = (
                    f"pages of {quoted(origin)} may not use this server (--allowed-origins, or an API key)"
                )
                return APIError(403, message, code="origin_not_allowed")
        return None


def is_allowed_host(authority: str, allowed: Iterable[str]) -> bool:
    """Return True if a `Host` header, in lower case, is an IP address, localhost, or one of some names.

    DNS rebinding needs a name, so addresses are safe. allowed: names; *.NAME: all below it; *: all.
    """
    match = AUTHORITY.fullmatch(authority)
    name = "" if match is None else match[1].rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):  # always this machine, by RFC 6761
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
        return True
    except ValueError:
        return any(
            pattern in (ANY, name) or (pattern.startswith("*.") and name.endswith(pattern[1:]))
            for pattern in allowed
        )


def is_allowed_origin(origin: str, authority: str, allowed: Iterable[str]) -> bool:
    """Return True if an `Origin` header is the server's own, by its `Host` header, or one of some others.

    The scheme is not compared: a proxy in front of the server may speak TLS. All in lower case; allowed: *: all.
    """
    scheme, _, own = origin.partition("://")
    port = DEFAULT_PORTS.get(scheme, "")
    if own and port and own.removesuffix(port) == authority.removesuffix(port):
        return True
    return any(entry in (ANY, origin) for entry in allowed)
