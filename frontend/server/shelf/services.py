"""The models of a server that are loaded on demand, as its endpoints use them."""

from __future__ import annotations

import math
import re
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.frontend.server.serving.service import LATEST, MAX_SERVED, ModelEntry, Service, Services
from pagewire.frontend.server.shelf.loader import EngineLoader
from pagewire.frontend.server.shelf.model_shelf import ModelShelf
from pagewire.frontend.server.shelf.pulled_shelf import PulledShelf
from pagewire.ipc.errors import ModelNotFoundError
from pagewire.ipc.files.hub_names import hub_name
from pagewire.ipc.files.pulled import PulledModel
from pagewire.ipc.quoting import quoted, shortened

DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class ShelvedServices(Services):
    """The services of models that start at the first request for them.

    shelf: which of them are loaded. loader: has the options of each.
    """

    def __init__(self, shelf: ModelShelf[Service], loader: EngineLoader, options: ServerOptions) -> None:
        super().__init__(options)
        self.shelf, self.loader = shelf, loader
        self.pulled: PulledShelf | None = None
        """The models that were pulled, where they are served."""

    @property
    def all(self) -> list[Service]:
        """Those that are loaded."""
        self._refresh()
        return [self.shelf.loaded[name] for name in self.loader.models if name in self.shelf.loaded]

    @property
    def by_priority(self) -> bool:
        """True if one of the engines is to schedule by priority."""
        return any(args.scheduling_policy == "priority" for args in self.loader.models.values())

    @property
    def entries(self) -> list[ModelEntry]:
        """All models, loaded or not."""
        self._refresh()
        return [self.entry(name) for name in self.loader.models]

    def entry(self, name: str) -> ModelEntry:
        """One of them."""
        model, shelf, fitted = self.loader.models[name].model, self.shelf, self.loader.fitted.get(name)
        said = None if fitted is None else fitted.fitted
        return ModelEntry(name, model, shelf.state(name).value, shelf.problems.get(name), said)

    def seconds_left(self, name: str) -> float | None:
        """Return for how long a model stays loaded if it is not used."""
        if (entry := self.shelf.table.entries.get(name)) is None:  # an adapter
            return None
        end = self.shelf.table.expires_at(entry)
        if end == math.inf:
            end = time.monotonic() + self.shelf.table.patience(entry)
        return None if end == math.inf else max(0.0, end - time.monotonic())

    def of(self, model: str | None) -> Service:
        """Return the service of a model that is loaded.

        Raises:
            APIError: there is no model with this name, or it is not loaded.
        """
        name = self.named(model)
        if (service := self.shelf.loaded.get(name)) is None:
            message = f"the model {quoted(name)} is not loaded: the first request for it loads it"
            raise APIError(409, message, param="model", code="model_not_loaded")
        return service

    def unload(self, model: str | None) -> str:
        """End a model as soon as no request uses it; return its name.

        Raises:
            APIError: there is no model with this name.
        """
        name = self.named(model)
        self.shelf.unload(name)
        return name

    @asynccontextmanager
    async def use(
        self, model: str | None, keep_alive: float | str | None = None
    ) -> AsyncGenerator[Service, None]:
        """Use a model; wait until it is loaded."""
        seconds = None if keep_alive is None else keep_alive_seconds(keep_alive)
        name = self.named(model)
        async with self.shelf.use(name) as service:
            service.hold = partial(self.shelf.hold, name)
            if seconds is not None:
                self.shelf.keep(name, seconds)
            yield service

    def _refresh(self) -> None:
        """See what was pulled or removed meanwhile."""
        if self.pulled is not None:
            self.pulled.refresh()

    def _of_the_hub(self, model: str) -> str | None:
        """The listed name of a model of the hub whose name may be written otherwise; None if there is none."""
        try:
            given = hub_name(model)
        except ModelNotFoundError:
            return None
        if given is None:
            return None
        if (name := str(given)) in self.loader.models:
            return name
        return None if self.pulled is None else self.pulled.named(given)

    def pulled_model(self, name: str) -> PulledModel | None:
        """The model that was pulled under a listed name; None: none was."""
        return None if self.pulled is None else self.pulled.models.get(name)

    async def close(self) -> None:
        """End all pulls and models."""
        if self.pulled is not None:
            await self.pulled.close()
        await self.shelf.close()

    def named(self, model: str | None) -> str:
        """Return a model's name as it is listed; None: the first.

        Raises:
            APIError: there is no model with this name.
        """
        self._refresh()
        models = self.loader.models
        if model is None and models:
            return next(iter(models))
        for name in () if model is None else (model, model.removesuffix(LATEST)):
            if name in models:
                return name
        if model is not None and (of_the_hub := self._of_the_hub(model)) is not None:
            return of_the_hub
        served = shortened(", ".join(models), MAX_SERVED) or "none yet: pull one"
        message = f"there is no model {quoted(model)}; served: {served}"
        raise APIError(404, message, param="model", code="model_not_found")


def keep_alive_seconds(duration: float | str) -> float:
    """Return the seconds of a `keep_alive`: a number of them, or a text such as "5m"; less than 0: infinity.

    Raises:
        APIError: it is neither.
    """
    if isinstance(duration, str):
        sign, text = (-1, duration[1:]) if duration.startswith("-") else (1, duration)
        parts = DURATION.findall(text[:100])
        if "".join(number + unit for number, unit in parts) == text and parts:
            duration = sign * sum(float(number) * SECONDS[unit] for number, unit in parts)
        else:
            try:
                duration = float(duration)
            except ValueError:
                duration = math.nan
    if math.isnan(duration):
        raise APIError(400, "keep_alive must be seconds, or a text such as 5m or 1h30m", param="keep_alive")
    return math.inf if duration < 0 else float(duration)
