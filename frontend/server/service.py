"""State that all endpoints share: the engine, the options, and the requests in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request

from pagewire.frontend.async_llm import AsyncLLM
from pagewire.frontend.inputs import default_sampling_params
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.exchange import Exchange
from pagewire.frontend.server.options import ServerOptions
from pagewire.frontend.server.slow_work import SlowWork
from pagewire.frontend.text.render_process import NUM_PARALLEL
from pagewire.frontend.text.tokenizer import Tokenizer
from pagewire.ipc.quoting import quoted

T = TypeVar("T")

LONG_TEXT = 8192  # characters; tokenizing and templates of longer texts run in a thread, off the event loop
MAX_WAITING_TEMPLATES = 16  # templates from requests that may wait for others; each takes up to 2 s


class Service:
    """State of one server on one engine.

    Raises:
        ValueError: from the constructor, for a bad prompt adapter.

    Attributes:
        engine, options: the constructor's arguments. info: properties of the engine.
        names: names of the model, the main one first. created: start of the server, in seconds since the epoch.
        defaults: sampling parameters from the model's generation config.
        prompt_adapters: those of the server's options, by name.
        open: generation requests in flight, by id. request_templates: runs the chat templates of requests.
    """

    def __init__(self, engine: AsyncLLM, options: ServerOptions) -> None:
        self.engine, self.options = engine, options
        self.info = engine.info
        self.names = engine.info.served_model_names or [engine.info.model]
        self.created = int(time.time())
        self.defaults = default_sampling_params(engine.info)
        self.prompt_adapters = engine.session.prompt_adapters.named(options.prompt_adapters, self.names)
        self.open: dict[str, Exchange] = {}
        self.request_templates = SlowWork("chat templates", NUM_PARALLEL, MAX_WAITING_TEMPLATES)

    @property
    def tokenizer(self) -> Tokenizer:
        """The engine's tokenizer.

        Raises:
            APIError: the engine has none.
        """
        if self.engine.session.tokenizer is None:
            raise APIError(400, "this server has no tokenizer: use token ids for prompts and outputs")
        return self.engine.session.tokenizer

    def model(self, name: str | None) -> str:
        """Return the model's main name, which responses use, or that of a prompt adapter.

        name: any of its names, or an adapter's; None: the main one.

        Raises:
            APIError: there is no model with that name.
        """
        if name is None or name in self.names:
            return self.names[0]
        if name in self.prompt_adapters:
            return name
        raise APIError(404, f"there is no model {quoted(name)}", param="model", code="model_not_found")

    def abort(self, request_id: str) -> bool:
        """End a generation request with an error response; return False if there is none with this id."""
        if (exchange := self.open.get(request_id)) is None:
            return False
        exchange.stop(APIError(499, "the request was aborted", code="aborted"))
        return True


def service_of(request: Request) -> Service:
    """Return the service of the application that handles a request."""
    service: Service = request.app.state.service
    return service


async def off_loop(size: int, work: Callable[..., T], *args: Any) -> T:
    """Return `work(*args)`, run in a thread if `size` (in characters) is large enough to block the event loop."""
    if size >= LONG_TEXT:
        return await asyncio.to_thread(work, *args)
    return work(*args)
