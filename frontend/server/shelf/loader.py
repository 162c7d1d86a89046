"""Starts the engine of one of several models, with what serves it, and ends it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from pagewire.frontend.client import AsyncLLM
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.frontend.server.serving.service import Service
from pagewire.frontend.server.shelf.model_shelf import MemoryEstimate
from pagewire.ipc.files.hub_names import PREFIXES, hub_name
from pagewire.ipc.options.engine_args import EngineArgs
from pagewire.ipc.quoting import quoted

logger = logging.getLogger("pagewire.server")


class EngineLoader:
    """Starts engines from options.

    models: the options of each engine by the model's name, which is the only one that it is served under.
    options: of the server. estimate: estimates the memory that an engine needs; blocks.
    """

    def __init__(
        self,
        models: Mapping[str, EngineArgs],
        options: ServerOptions,
        estimate: Callable[[EngineArgs], MemoryEstimate],
    ) -> None:
        self._options, self._estimate = options, estimate
        self.models: dict[str, EngineArgs] = {}
        self.fitted: dict[str, MemoryEstimate] = {}
        """The options that were chosen so that a model fits, by its name, when it was measured last."""
        for name, args in models.items():
            self.add(name, args)

    def add(self, name: str, args: EngineArgs) -> None:
        """Add a model. Where its name is of the hub, requests may write that as other programs do."""
        others = [f"{prefix}{given.repository}*" for prefix in PREFIXES] if (given := hub_name(name)) else []
        self.models[name] = dataclasses.replace(args, served_model_name=[name, *others])

    def measure(self, name: str) -> MemoryEstimate:
        """Estimate the memory that a model needs, and choose options with which it fits."""
        estimate = self._estimate(self.models[name])
        if estimate.fitted is not None:
            logger.info("model %s: fitted %s", quoted(name), estimate.fitted)
            self.fitted[name] = estimate
        return estimate

    def start(self, name: str) -> Service:
        """Start an engine, and wait until it is ready."""
        changes = self.fitted[name].changes if name in self.fitted else None
        args = dataclasses.replace(self.models[name], **(changes or {}))
        engine = AsyncLLM.from_engine_args(args, restarts=self._options.restarts)
        try:
            return Service(engine, self._options)
        except BaseException:
            engine.shutdown()
            raise

    def stop(self, loaded: Service) -> None:
        """End an engine."""
        loaded.engine.shutdown()

    def gone(self, loaded: Service) -> Future[Any]:
        """Done when the engine's core is lost for good."""
        return loaded.engine.session.gone
