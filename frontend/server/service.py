"""What all endpoints share: the engine, the options, and what is open."""

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
from pagewire.frontend.text.tokenizer import Tokenizer

T = TypeVar("T")

LONG_TEXT = 8192  # characters; work on more goes to a thread, off the event loop


class Service:
    """One server on one engine.

    Attributes:
        engine, options: what it was made of. info: of the engine.
        names: of the model, the main one first. created: when it began to serve, in seconds since the epoch.
        defaults: sampling parameters that the model's generation config recommends.
        open: generations in flight, by id.
    """

    def __init__(self, engine: AsyncLLM, options: ServerOptions) -> None:
        self.engine, self.options = engine, options
        self.info = engine.info
        self.names = engine.info.served_model_names or [engine.info.model]
        self.created = int(time.time())
        self.defaults = default_sampling_params(engine.info)
        self.open: dict[str, Exchange] = {}

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            APIError: the engine goes without one.
        """
        if self.engine.session.tokenizer is None:
            raise APIError(400, "this server has no tokenizer: it takes and gives token ids only")
        return self.engine.session.tokenizer

    def model(self, name: str | None) -> str:
        """The model's name as answers give it: its main one.

        Raises:
            APIError: there is no model of that name.
        """
        if name is None or name in self.names:
            return self.names[0]
        raise APIError(404, f"there is no model {name!r} here", param="model", code="model_not_found")

    def abort(self, request_id: str) -> bool:
        """End a generation, which is answered with an error; false if there is none of this id."""
        if (exchange := self.open.get(request_id)) is None:
            return False
        exchange.stop(APIError(499, "the request was aborted", code="aborted"))
        return True


def service_of(request: Request) -> Service:
    """The service of the application that serves a request."""
    service: Service = request.app.state.service
    return service


async def off_loop(size: int, work: Callable[..., T], *args: Any) -> T:
    """`work(*args)`, in a thread if `size`, in characters, says that it would hold up the event loop."""
    if size >= LONG_TEXT:
        return await asyncio.to_thread(work, *args)
    return work(*args)
