"""BentoML: the endpoints of `pagewire serve` as a service. `bentoml serve service:Pagewire` in this folder.

The service mounts pagewire's own application, so that OpenAI's, Anthropic's and Ollama's clients work with it.
"""

from __future__ import annotations

import os

import bentoml
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from pagewire import AsyncLLM, EngineArgs
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.frontend.server.wiring import create_app

MODEL = os.environ.get("MODEL", "demo")


class Application:
    """The ASGI application: its engine starts with the service, not with the import of this module."""

    app: Starlette

    def start(self, model: str) -> None:
        """Start the engine."""
        engine = AsyncLLM.from_engine_args(EngineArgs.from_kwargs({"model": model}), restarts=10)
        self.app = create_app(
            engine, ServerOptions(host="0.0.0.0")
        )  # behind BentoML's server, under any name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        await self.app(scope, receive, send)


APPLICATION = Application()


@bentoml.service(name="pagewire", traffic={"timeout": 3600, "concurrency": 256}, workers=1)
@bentoml.asgi_app(Starlette(routes=[Mount("/", APPLICATION)]), path="/")
class Pagewire:
    """The service. Environment: MODEL is the model."""

    def __init__(self) -> None:
        APPLICATION.start(MODEL)
