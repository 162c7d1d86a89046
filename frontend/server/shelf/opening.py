"""Makes the services of models that are loaded on demand from their options."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from pagewire.frontend.server.http.options import ServerOptions
from pagewire.frontend.server.serving.service import OF_THE_FIRST
from pagewire.frontend.server.shelf.loader import EngineLoader
from pagewire.frontend.server.shelf.model_shelf import MemoryEstimate, ModelShelf
from pagewire.frontend.server.shelf.options import ShelfOptions
from pagewire.frontend.server.shelf.pulled_shelf import PulledShelf
from pagewire.frontend.server.shelf.services import ShelvedServices
from pagewire.frontend.server.shelf.table import ShelfTable
from pagewire.ipc.files.pulled import pulled_models
from pagewire.ipc.options.engine_args import EngineArgs


def open_shelf(
    models: Mapping[str, EngineArgs],
    shelf_options: ShelfOptions,
    options: ServerOptions,
    capacity: int,
    estimate: Callable[[EngineArgs], MemoryEstimate],
    pulled: Callable[[str], EngineArgs] | None = None,
) -> ShelvedServices:
    """Return the services of models by name, of which none is loaded yet.

    capacity: bytes of memory for all together. estimate: see `EngineLoader`.
    pulled: the engine options of each model that was pulled, by name; None: these are not served.

    Raises:
        ValueError, TypeError: an option is bad.
    """
    options.check()
    own = options if len(models) == 1 and pulled is None else dataclasses.replace(options, **OF_THE_FIRST)
    idle = math.inf if shelf_options.idle_sleep is None else shelf_options.idle_sleep
    there = {} if pulled is None else {one.name: one for one in pulled_models() if one.name not in models}
    if pulled is not None:
        models = {**models, **{name: pulled(name) for name in there}}
    loader = EngineLoader(models, own, estimate, shelf_options.idle_sleep_level)
    table = ShelfTable(models, shelf_options.pin, capacity, idle)
    shelf = ModelShelf(table, loader, shelf_options.while_starting == "wait")
    services = ShelvedServices(shelf, loader, options)
    if pulled is not None:
        services.pulled = PulledShelf(shelf, loader, pulled, there)
    return services
