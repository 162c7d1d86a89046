"""Starts the engine of one of several models, with what serves it, and ends it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from pagewire.frontend.client import AsyncLLM
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.frontend.server.serving.service import Service
from pagewire.frontend.server.shelf.model_shelf import MemoryEstimate
from pagewire.ipc.files.hub_names import PREFIXES, hub_name
from pagewire.ipc.options.engine_args import EngineArgs
from pagewire.ipc.quoting import quoted

logger = logging.getLogger("pagewire.server")


@dataclass(frozen=True)
class SleepingEngine:
    """An engine whose model is not used. args: with which it was started."""

    service: Service
    args: EngineArgs

    def wakes(self, name: str, args: EngineArgs) -> bool:
        """Wake it; False: it is lost or cannot be woken, or an engine with other options is wanted."""
        if args != self.args:
            return False
        try:
            self.service.engine.session.call("wake_up").result()
        except Exception as error:
            logger.warning("model %s: it cannot be woken, and starts anew: %s", quoted(name), error)
            return False
        return True


class EngineLoader:
    """Starts engines from options.

    models: the options of each engine by the model's name, which is the only one that it is served under.
    options: of the server. estimate: estimates the memory that an engine needs; blocks.
    level: at which engines sleep whose models are not used; None: they end.
    """

    def __init__(
        self,
        models: Mapping[str, EngineArgs],
        options: ServerOptions,
        estimate: Callable[[EngineArgs], MemoryEstimate],
        level: int | None = None,
    ) -> None:
        self._options, self._estimate, self._level = options, estimate, level
        self._asleep: dict[str, SleepingEngine] = {}
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
        """Start an engine, or wake it, and wait until it is ready."""
        args = self._args(name)
        if (asleep := self._asleep.pop(name, None)) is not None:
            if asleep.wakes(name, args):
                return asleep.service
            self.stop(asleep.service)
        engine = AsyncLLM.from_engine_args(args, restarts=self._options.restarts)
        try:
            return Service(engine, self._options)
        except BaseException:
            engine.shutdown()
            raise

    def _args(self, name: str) -> EngineArgs:
        """The options of an engine that starts now."""
        changes = self.fitted[name].changes if name in self.fitted else None
        return dataclasses.replace(self.models[name], **(changes or {}))

    def stop(self, loaded: Service) -> None:
        """End an engine."""
        loaded.engine.shutdown()

    def rest(self, name: str, loaded: Service) -> None:
        """Let an engine without requests sleep; end it if it cannot, or is not to."""
        if self._level is None or name not in self.models:
            return self.stop(loaded)
        try:
            loaded.engine.session.call("sleep", self._level).result()
        except Exception as error:
            logger.warning("model %s: it does not sleep, and ends: %s", quoted(name), error)
            return self.stop(loaded)
        self._asleep[name] = SleepingEngine(loaded, self._args(name))

    def forget(self, name: str) -> None:
        """End an engine that sleeps, if there is one of this model."""
        if (asleep := self._asleep.pop(name, None)) is not None:
            self.stop(asleep.service)

    def close(self) -> None:
        """End all engines that sleep."""
        for name in list(self._asleep):
            self.forget(name)

    def gone(self, loaded: Service) -> Future[Any]:
        """Done when the engine's core is lost for good."""
        return loaded.engine.session.gone
