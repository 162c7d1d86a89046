"""How the layers of a model run: as a stack of plain data, or as modules of transformers, and why."""

from __future__ import annotations

from dataclasses import dataclass

ENCODER_DECODER = "it is an encoder-decoder"
WITHOUT = "no adapters, no draft models, no CUDA graphs, and one device"
"""What a model without a network has."""


@dataclass(frozen=True)
class Road:
    """How the layers of a model run.

    halves: of layers that are modules of transformers within a stack; None: all layers are one module.
    why: of modules, why they are none of the kernels'; of a rank it may be empty, where another one knows.
    """

    halves: int | None = 0
    why: str = ""

    def __str__(self) -> str:
        """In a table."""
        if self.halves is None:
            return f"module: {self.why}"
        if not self.halves:
            return "stack"
        noun = "half that is a module" if self.halves == 1 else "halves that are modules"
        return f"stack with {self.halves} {noun}: {self.why}"

    @property
    def sentence(self) -> str:
        """As a sentence."""
        if self.halves is None:
            reason = f": {self.why}" if self.why else ""
            return f"the layers run as transformers' module{reason}; so it has {WITHOUT}"
        return f"the layers run as a {self}"


def road_summary(road: Road, why_not: str | None) -> str:
    """How layers and steps that only decode run, in a sentence.

    why_not: why these steps are no compiled call; empty: they are one. None: there is nothing to say about them.
    """
    if why_not is None:
        return road.sentence
    steps = "steps that only decode are"
    if not why_not:
        return f"{road.sentence}; {steps} one compiled call"
    # Why layers run as a module is said already.
    reason = "" if road.halves is None else f": {why_not}"
    return f"{road.sentence}; {steps} not one compiled call{reason}"
