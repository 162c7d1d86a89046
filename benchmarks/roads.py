"""How each decoder of `tests.workers.architectures` runs, as a table: `python -m benchmarks.families --roads`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.workers.architectures import ARCHITECTURES, Architecture
from tests.workers.driver import load_runner

STACK = "stack"
HEADER = "| decoder | runs as | steps that only decode |\n|---|---|---|"


class Road(NamedTuple):
    """A decoder, how its layers run (see `LoadedModel.road`), and whether its decoding is one compiled call."""

    name: str
    layers: str
    decodes: bool

    @property
    def line(self) -> str:
        """Its line of the table."""
        return f"| {self.name} | {self.layers} | {'one call' if self.decodes else 'layer by layer'} |"


def road_of(architecture: Architecture) -> Road:
    """The road of a tiny model on this CPU."""
    with tempfile.TemporaryDirectory() as folder:
        runner, _ = load_runner(architecture.write(Path(folder, "model")), dtype="float32")
        return Road(architecture.name, str(runner.model.road), not runner.decoding.why_not)


def roads(names: Iterable[str] = ()) -> Iterator[Road]:
    """The roads of all decoders that are served, or of those of these names."""
    wanted = set(names)
    for architecture in ARCHITECTURES:
        if architecture.refused is None and (not wanted or architecture.name in wanted):
            yield road_of(architecture)


def summary(found: Iterable[Road]) -> str:
    """How many run as what."""
    layers = [road.layers for road in found]
    stacks, modules = layers.count(STACK), sum(layer.startswith("module") for layer in layers)
    mixed = len(layers) - stacks - modules
    halves = f"{mixed} as one with halves that are modules"
    return f"**Of {len(layers)} decoders {stacks} run as a stack, {halves}, {modules} as a module**"


def table(found: Iterable[Road]) -> str:
    """The table of roads, below their numbers."""
    known = list(found)
    return f"{summary(known)}\n\n{HEADER}\n" + "\n".join(road.line for road in known) + "\n"
