"""The HTTP server under the application: listening sockets, TLS, and graceful shutdown."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from pagewire.frontend.server.options import ServerOptions

KEEP_ALIVE_SECONDS = 5  # idle connections are closed after this time


class HTTPServer(uvicorn.Server):
    """A uvicorn server that drains on the first SIGINT or SIGTERM and exits at once on the second.

    on_ready: called once the server listens.
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
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=max(1, round(options.drain_seconds)),
            ssl_keyfile=options.ssl_keyfile,
            ssl_certfile=options.ssl_certfile,
            ssl_ca_certs=options.ssl_ca_certs,
            ssl_cert_reqs=options.ssl_cert_reqs,
        )
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening."""
        await super().startup(sockets)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal. uvicorn's own handler would raise it again on exit, before the engine is shut down."""
        self.force_exit = self.should_exit
        self.should_exit = True


def bound(options: ServerOptions) -> socket.socket:
    """Return a socket bound to the options' address that does not listen yet.

    Raises:
        OSError: the address is in use or not available.
    """
    if options.uds is not None:
        return bound_path(Path(options.uds))
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


def bound_path(path: Path) -> socket.socket:
    """Return a bound Unix socket; a socket file left by a killed server is replaced.

    Raises:
        OSError: a server listens at the path, or the path cannot be used.
    """
    listening = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket():
            with socket.socket(socket.AF_UNIX) as caller:
                if caller.connect_ex(str(path)) == 0:
                    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            path.unlink()
        listening.bind(str(path))
    except OSError as error:
        listening.close()
        raise OSError(f"cannot listen on {path}: {error.strerror or error}") from error
    return listening


def url_of(listening: socket.socket, options: ServerOptions) -> str:
    """Return the URL of the server, for the user."""
    if options.uds is not None:
        return f"unix:{options.uds}"
    host, port = listening.getsockname()[:2]
    scheme = "http" if options.ssl_certfile is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
