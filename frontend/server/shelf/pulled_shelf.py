"""The pulled models on the shelf of a server: all in the folder of pulled models, whichever process pulled them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager

from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.serving.service import Service
from pagewire.frontend.server.shelf.loader import EngineLoader
from pagewire.frontend.server.shelf.model_shelf import ModelShelf
from pagewire.frontend.server.shelf.pulling import Pulls
from pagewire.ipc.errors import ModelNotFoundError
from pagewire.ipc.files.hub_names import HubName
from pagewire.ipc.files.pull import PullProgress, PullStoppedError
from pagewire.ipc.files.pulled import PulledModel, among, changed_at, pulled_models, remove
from pagewire.ipc.options.engine_args import EngineArgs
from pagewire.ipc.quoting import quoted

SETTLED_NS = 10**9  # file systems may give changes within some milliseconds the same time


class PulledShelf:
    """Adds models to a shelf once they were pulled, and takes them from it once they were removed.

    options: the engine options of a model by its name. models: those that are on the shelf already, by name; one
    whose name another model has is never among them.
    """

    def __init__(
        self,
        shelf: ModelShelf[Service],
        loader: EngineLoader,
        options: Callable[[str], EngineArgs],
        models: dict[str, PulledModel],
    ) -> None:
        self._shelf, self._loader, self._options = shelf, loader, options
        self._pulls = Pulls(options("demo").hf_token)  # which all models have in common
        self._seen = -1
        self.models = models

    def refresh(self) -> None:
        """See what was pulled or removed since the last time, here or by another process."""
        if (changed := changed_at()) == self._seen:
            return
        self._seen = changed if time.time_ns() - changed > SETTLED_NS else -1
        there = {model.name: model for model in pulled_models()}
        for name in self.models.keys() - there.keys():
            del self._loader.models[name]
            message = f"the model {quoted(name)} was removed"
            self._shelf.forget(name, APIError(404, message, param="model", code="model_not_found"))
        for name in there.keys() - self._loader.models.keys():
            self._loader.add(name, self._options(name))
            self._shelf.add(name)
            self.models[name] = there[name]
        self.models = {name: there[name] for name in self.models if name in there}

    def named(self, given: HubName) -> str | None:
        """The name under which the model that a name means is on the shelf; None: it was not pulled."""
        found = among(list(self.models.values()), given)
        return None if found is None else found.name

    async def pull(self, given: HubName) -> AsyncGenerator[PullProgress, None]:
        """Pull a model, and yield how far that is; when it ends, the model is on the shelf.

        Raises:
            APIError: there is no such model, or it cannot be pulled now. OSError: the disk has no room.
            ValueError: a file is not what the hub says.
        """
        async with aclosing(self._pulls.follow(given)) as steps:
            with report_pull_errors():
                async for step in steps:
                    if step.status == "success":
                        self.refresh()
                    yield step

    async def delete(self, given: HubName) -> None:
        """Remove a model that was pulled; requests that use it finish.

        Raises:
            APIError: it was not pulled, or is being pulled.
        """
        with report_pull_errors():
            await asyncio.to_thread(remove, given)
        self.refresh()

    async def close(self) -> None:
        """End all pulls."""
        await self._pulls.close()


@contextmanager
def report_pull_errors() -> Iterator[None]:
    """Give the errors of pulls and removals their statuses."""
    try:
        yield
    except ModelNotFoundError as error:
        raise APIError(404, str(error), param="model", code="model_not_found") from error
    except BlockingIOError as error:
        raise APIError(409, str(error), param="model", code="model_in_use") from error
    except PullStoppedError as error:
        raise APIError(503, "the server is shutting down", code="shutting_down") from error
