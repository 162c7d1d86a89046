"""The HTTP server in a thread of the test, on an engine of the test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pagewire.frontend.api.async_llm import AsyncLLM
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.frontend.server.http.uvicorn_server import HTTPServer, bind_socket, url_of
from pagewire.frontend.server.wiring import create_app


@contextmanager
def serving(
    address: str,
    options: ServerOptions,
    new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> Iterator[str]:
    """The URL of a server, on a free port, that is attached to the core at `address`."""
    ready, loop = threading.Event(), new_loop()
    with bind_socket(options) as socket:
        engine = AsyncLLM.attach(address)
        server = HTTPServer(create_app(engine, options), options, ready.set)
        thread = threading.Thread(target=loop.run_until_complete, args=(server.serve([socket]),))
        thread.start()
        try:
            assert ready.wait(20)
            yield url_of(socket, options)
        finally:
            server.should_exit = True
            thread.join()
            loop.close()
            engine.shutdown()
