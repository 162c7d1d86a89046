"""Downloads from http and https URLs that clients name.

    URL --checked--> name resolved --> each address checked --> connection to exactly this address
     ^                                                                      |
     +--------------------------------- redirect ---------------------------+

The address is checked where the socket for it is made, so no second resolution (DNS rebinding), no spelling of an
address (decimal, octal, IPv4 in IPv6) and no redirect leads past the check.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from pagewire.frontend.media.access import MediaAccess
from pagewire.frontend.media.keys import MediaError
from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.quoting import quoted
from pagewire.ipc.tenants import current_tenant

MAX_REDIRECTS = 5
REDIRECTS = (301, 302, 303, 307, 308)
MAX_URL_CHARS = 8192
MAX_HEADER_BYTES = 16 << 10
CHUNK = 1 << 16
# A body that comes more slowly than this for this long is given up, whatever time is left.
LEAST_RATE = 4096  # bytes a second
PATIENCE_SECONDS = 2.0
HEADERS = {"User-Agent": "pagewire", "Accept-Encoding": "identity"}

# One text for names that do not exist, addresses that are refused and hosts that do not answer: a client cannot
# explore the network of this machine by it.
UNREACHABLE = (
    "the host of a URL cannot be reached, or has no public address (the server's --allowed-media-domains may name "
    "networks that are not public)"
)

MALFORMED = "a URL is malformed"

NUM_RESOLVERS = 32
RESOLVERS_OF_TENANT = (
    24  # that a tenant, who has a key, may have at a time: a name may take a minute to be refused
)


@dataclass(frozen=True)
class DownloadLimits:
    """The limits of one download. seconds: for all of it, redirects included. max_bytes: of its body."""

    seconds: float
    max_bytes: int


def download_media(url: str, access: MediaAccess, limits: DownloadLimits) -> bytes:
    """The body of the answer to GET. Blocks for up to `limits.seconds`; in a thread without an event loop.

    Raises:
        MediaError: the URL is not allowed, its host cannot be reached, or the answer is none that can be used.
    """
    return asyncio.run(_download(url, access, limits))


async def _download(url: str, access: MediaAccess, limits: DownloadLimits) -> bytes:
    connector = aiohttp.TCPConnector(
        resolver=ThreadResolver(),
        socket_factory=CheckedSockets(access),
        use_dns_cache=False,
        force_close=True,
    )
    session = aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        headers=HEADERS,
        timeout=aiohttp.ClientTimeout(total=None),
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
    )
    try:
        async with session:
            return await asyncio.wait_for(_follow(session, url, access, limits.max_bytes), limits.seconds)
    except asyncio.TimeoutError:
        raise MediaError(f"a download took more than {limits.seconds:g} s") from None
    except aiohttp.ClientConnectorCertificateError:
        raise MediaError("the host of a URL has no valid certificate") from None
    except aiohttp.InvalidURL:
        raise MediaError(MALFORMED) from None
    except aiohttp.ClientConnectionError:
        raise MediaError(UNREACHABLE) from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        if isinstance(error, MediaError):
            raise
        raise MediaError("a download failed: the host's answer is not valid HTTP") from None


async def _follow(session: aiohttp.ClientSession, url: str, access: MediaAccess, max_bytes: int) -> bytes:
    """Request a URL, and those to which it is redirected, until one has a body."""
    target = checked_url(url, access)
    for _ in range(MAX_REDIRECTS + 1):
        async with session.get(target, allow_redirects=False) as response:
            if response.status not in REDIRECTS:
                return await _body(response, max_bytes)
            location = response.headers.get("Location", "")
        if not location or len(location) > MAX_URL_CHARS:
            raise MediaError("a URL is redirected to nowhere")
        target = checked_url(location, access, target)
    raise MediaError(f"a URL is redirected more than {MAX_REDIRECTS} times")


def checked_url(url: str, access: MediaAccess, base: URL | None = None) -> URL:
    """Parse a URL, and check all of it but its host's addresses. base: to which it is relative.

    Raises:
        MediaError: it is malformed, or its scheme or its host is not allowed.
    """
    if len(url) > MAX_URL_CHARS:
        raise MediaError(f"a URL has more than {MAX_URL_CHARS} characters")
    try:
        target = URL(url) if base is None else base.join(URL(url))
        host = target.raw_host
        has_port = target.port is not None
    except ValueError:
        raise MediaError(MALFORMED) from None
    if target.scheme not in ("http", "https") or not host or not has_port:
        raise MediaError("only http, https, data and (where the server allows it) file URLs can be used")
    if target.user is not None or target.password is not None:
        raise MediaError("a URL must not have a user or password")
    if not access.allows_host(host.lower()):
        raise MediaError(
            f"the host {quoted(host)} of a URL is not among the server's --allowed-media-domains"
        )
    return target


async def _body(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    if response.status != 200:
        raise MediaError(f"a URL was answered with status {response.status}")
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise MediaError("a URL was answered with a compressed body, which was not asked for")
    if (response.content_length or 0) > max_bytes:
        raise MediaError(f"a URL's content has more than {max_bytes} bytes")
    data = bytearray()
    begin = time.monotonic()
    while chunk := await _next_chunk(response, begin, len(data)):
        data += chunk
        if len(data) > max_bytes:
            raise MediaError(f"a URL's content has more than {max_bytes} bytes")
    return bytes(data)


async def _next_chunk(response: aiohttp.ClientResponse, begin: float, num_bytes: int) -> bytes:
    """The next bytes of a body of which `num_bytes` have come; b"" at its end.

    Raises:
        MediaError: the body comes too slowly.
    """
    # By then, one byte more must be there for the rate to be met.
    deadline = begin + PATIENCE_SECONDS + num_bytes / LEAST_RATE
    try:
        return await asyncio.wait_for(response.content.read(CHUNK), deadline - time.monotonic())
    except asyncio.TimeoutError:
        raise MediaError(f"a URL's content comes at less than {LEAST_RATE} bytes a second") from None


class Resolvers:
    """Threads in which the system resolves names, which may hang for longer than a download may take."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_RESOLVERS, "resolver")
        self._lock = threading.Lock()
        self._num_open: Counter[str] = Counter()  # by tenant

    def begin(self, tenant: str, host: str, port: int, family: socket.AddressFamily) -> Future[Any]:
        """Resolve a name for a tenant; the future gets what `getaddrinfo` returns.

        Raises:
            EngineBusyError: the tenant has too many that are not resolved.
        """
        with self._lock:
            if tenant and self._num_open[tenant] >= RESOLVERS_OF_TENANT:
                raise EngineBusyError(f"{RESOLVERS_OF_TENANT} names of hosts are already being resolved")
            self._num_open[tenant] += 1
        found = self._threads.submit(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM)
        found.add_done_callback(lambda _: self._end(tenant))
        return found

    def _end(self, tenant: str) -> None:
        with self._lock:
            self._num_open[tenant] -= 1
            self._num_open += Counter()  # without the tenants that have none


resolvers = Resolvers()


class ThreadResolver(AbstractResolver):
    """Resolves names as the system does, in threads that no download waits for at its end."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """The addresses of a host."""
        found = await asyncio.wrap_future(resolvers.begin(current_tenant.get(), host, port, family))
        return [
            ResolveResult(
                hostname=host,
                host=str(address[0]),
                port=port,
                family=kind,
                proto=proto,
                flags=socket.AI_NUMERICHOST,
            )
            for kind, _, proto, _, address in found
        ]

    async def close(self) -> None:
        """Nothing to do: the threads serve all downloads."""


@dataclass(frozen=True)
class CheckedSockets:
    """Makes the sockets of connections, for addresses that are allowed only."""

    access: MediaAccess

    def __call__(self, place: tuple[Any, Any, int, str, tuple[Any, ...]]) -> socket.socket:
        """A socket for a place as `getaddrinfo` names it.

        Raises:
            OSError: no connection to it may be made.
        """
        family, kind, proto, _, address = place
        if not self.access.allows_address(str(address[0])):
            raise PermissionError("this address is not public")
        return socket.socket(family, kind, proto)
