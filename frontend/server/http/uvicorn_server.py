"""The HTTP server under the application: listening sockets, TLS, and graceful shutdown."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from pagewire.frontend.server.http.api_shapes import OPENAI
from pagewire.frontend.server.http.connections import Connections, HttpConnection
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.limits import KEEP_ALIVE_SECONDS, connection_limits
from pagewire.frontend.server.http.listener import HttpListener
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.frontend.server.http.protocol import HttpProtocol

NO_PLACE = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n%b"
)
TICKS_PER_SECOND = 10  # of uvicorn's main loop


class HTTPServer(uvicorn.Server):
    """A uvicorn server that drains on the first SIGINT or SIGTERM and exits at once on the second.

    It accepts connections itself, within the limits of `connections`. on_ready: called once the server listens.

    Attributes:
        connections: the open connections.

    Raises:
        ValueError: there cannot be as many connections as the options say.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions, on_ready: Callable[[], Any]) -> None:
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=options.uvicorn_log_level,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=round(KEEP_ALIVE_SECONDS),
            timeout_graceful_shutdown=max(1, round(options.drain_seconds)),
            ssl_keyfile=options.ssl_keyfile,
            ssl_certfile=options.ssl_certfile,
            ssl_ca_certs=options.ssl_ca_certs,
            ssl_cert_reqs=options.ssl_cert_reqs,
        )
        super().__init__(config)
        self._options, self._on_ready = options, on_ready
        limits = connection_limits(options.max_connections, options.max_connections_per_address)
        refusal = OPENAI.encode(
            APIError(503, f"the server has {limits.most} connections (--max-connections)")
        )
        self.connections = Connections(limits, NO_PLACE % (len(refusal), refusal))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening on bound sockets."""
        await self.lifespan.startup()
        self.servers: list[Any] = [self._listener(bound_socket) for bound_socket in sockets or ()]
        self.started = True
        self._on_ready()

    def _listener(self, listening: socket.socket) -> HttpListener:
        def new_protocol(connection: HttpConnection) -> HttpProtocol:
            return HttpProtocol(
                self.config,
                self.server_state,
                self.lifespan.state,
                connection,
                self.connections,
                self._options,
            )

        return HttpListener(
            listening,
            self.connections,
            new_protocol,
            context=self.config.ssl,
            handshake_seconds=self._options.head_seconds,
            backlog=self.config.backlog,
        )

    async def on_tick(self, counter: int) -> bool:
        """Close connections whose time is over, once per second; True: the server is to exit."""
        if counter % TICKS_PER_SECOND == 0:
            self.connections.expire(asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal. uvicorn's own handler would raise it again on exit, before the engine is shut down."""
        self.force_exit = self.should_exit
        self.should_exit = True


def bind_socket(options: ServerOptions) -> socket.socket:
    """Return a socket bound to the options' address that does not listen yet.

    Raises:
        OSError: the address is in use or not available.
    """
    if options.uds is not None:
        return bound_path(Path(options.uds), options.uds_mode, options.uds_group)
    listening = socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Inherited by connections: the kernel closes one whose client acknowledges or reads nothing for this long.
        stall_ms = round(1e3 * options.stall_seconds)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stall_ms)
        listening.bind((options.host, options.port))
    except OSError as error:
        listening.close()
        raise OSError(f"cannot listen on {options.host}:{options.port}: {error.strerror}") from error
    return listening


def bound_path(path: Path, mode: str | None, group: str | None) -> socket.socket:
    """Return a bound Unix socket; a socket file left by a killed server is replaced.

    mode: its permissions, in octal. group: its group, by name or number. Nobody can connect before they are set:
    the socket does not listen yet.

    Raises:
        OSError: a server listens at the path, the path cannot be used, or the group is unknown or not allowed.
    """
    listening = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket():
            with socket.socket(socket.AF_UNIX) as caller:
                if caller.connect_ex(str(path)) == 0:
                    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            path.unlink()
        listening.bind(str(path))
        try:
            if group is not None:
                shutil.chown(path, group=int(group) if group.isdecimal() else group)
            if mode is not None:
                path.chmod(int(mode, 8))
        except (OSError, LookupError, OverflowError):
            path.unlink()
            raise
    except (OSError, LookupError, OverflowError) as error:  # the latter: there is no such group
        listening.close()
        raise OSError(f"cannot listen on {path}: {getattr(error, 'strerror', None) or error}") from error
    return listening


def url_of(listening: socket.socket, options: ServerOptions) -> str:
    """Return the URL of the server, for the user."""
    if options.uds is not None:
        return f"unix:{options.uds}"
    host, port = listening.getsockname()[:2]
    scheme = "http" if options.ssl_certfile is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
