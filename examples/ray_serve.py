"""OpenAI's API on a Ray cluster with Ray Serve: replicas of an engine behind one address.

    pip install 'pagewire[ray]' 'ray[serve]'
    python examples/ray_serve.py --model demo --replicas 2

Each replica runs pagewire's own application on an `AsyncLLM`: the endpoints of `pagewire serve`, with streams,
tools and structured output.
"""

from __future__ import annotations

import argparse
import signal
from typing import Any

from ray import serve
from starlette.applications import Starlette

from pagewire import AsyncLLM, EngineArgs
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.frontend.server.wiring import create_app


class Replica:
    """What Ray Serve calls beside the application, which it keeps as `app`."""

    app: Starlette

    async def check_health(self) -> None:
        """Raise an error if the engine is lost, upon which Serve replaces the replica."""
        await self.app.state.service.engine.check_health()


def deployment(options: dict[str, Any], replicas: int = 1, gpus: int = 0) -> serve.Application:
    """Replicas of an engine. options: of the engine. gpus: of each replica."""

    def application() -> Starlette:
        """Called in each replica."""
        engine = AsyncLLM.from_engine_args(EngineArgs.from_kwargs(options), restarts=10)
        return create_app(engine, ServerOptions(host="0.0.0.0"))  # Serve's proxy listens, under any name

    settings = serve.deployment(
        num_replicas=replicas, max_ongoing_requests=256, ray_actor_options={"num_gpus": gpus}
    )
    return settings(serve.ingress(application)(Replica)).bind()


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of each replica; 0: it runs on processors")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    serve.start(http_options={"host": "127.0.0.1", "port": arguments.port})
    serve.run(deployment({"model": arguments.model}, arguments.replicas, arguments.gpus))
    print(f"ready http://127.0.0.1:{arguments.port}/v1", flush=True)
    try:
        signal.pause()
    finally:
        serve.shutdown()


if __name__ == "__main__":
    main()
