"""Options of a server whose models are loaded on demand."""

# ruff: noqa: RUF009 (`option` is a dataclass field)

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pagewire.ipc.bounds import check_number
from pagewire.ipc.options.option import check_types, option
from pagewire.ipc.sizes import size_in_bytes

WHILE_STARTING = ("wait", "refuse")


@dataclass(frozen=True)
class ShelfOptions:
    """Options of loading on demand. `check` validates them."""

    models: str | None = option(
        None,
        "On demand",
        "YAML file of models that are loaded at the first request for them: NAME: MODEL, or NAME: a mapping of "
        "engine options",
    )
    models_dir: str | None = option(
        None,
        "On demand",
        "folder whose models are loaded at the first request for them: its GGUF files, and the folders in it that "
        "have a config.json",
    )
    idle_sleep: float | None = option(
        None,
        "On demand",
        "seconds after which a model that no request uses is ended; the next request for it starts it again "
        "(default: it ends only when another one needs its memory)",
    )
    idle_sleep_level: int | None = option(
        None,
        "On demand",
        "a model that is ended for another one or for --idle-sleep sleeps at this level instead, and wakes at "
        "the next request: 1 keeps its processes without their weights, 2 only its core (default: nothing is kept)",
        choices=(1, 2),
    )
    fit: bool = option(
        False,
        "On demand",
        "a model that does not fit into the memory for models is loaded smaller: fewer bits of plain weights, a "
        "shorter context; never against an option that is given",
    )
    pulled: bool = option(
        False,
        "On demand",
        "the models that `pagewire pull` has brought are loaded at the first request for them, also those that it "
        "brings later; with --enable-admin, clients of Ollama's API may pull and delete them",
    )
    pin: list[str] = option(
        None,
        "On demand",
        "names of models that stay loaded once they have been started, whatever others need",
        make=list,
    )
    models_memory: str | None = option(
        None,
        "On demand",
        "memory for all models that are loaded at a time, such as 12GiB (default: what is available when the "
        "server starts)",
    )
    while_starting: Literal["wait", "refuse"] = option(
        "wait",
        "On demand",
        "a request for a model that is not loaded waits until it is, or is refused with status 503 and Retry-After",
        choices=WHILE_STARTING,
    )

    def check(self) -> None:
        """Check all values.

        Raises:
            ValueError, TypeError: a value is out of range, or of the wrong type.
        """
        check_types(self)
        if self.idle_sleep is not None:
            check_number("idle_sleep", self.idle_sleep, 0.0, math.inf)
        if self.models_memory is not None:
            size_in_bytes("models_memory", self.models_memory)
