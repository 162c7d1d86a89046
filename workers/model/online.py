"""Weights of plain numbers that are quantised while they are loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pagewire.kernels.integers import Integers, quantise
from pagewire.kernels.weight import DENSE, Weight
from pagewire.workers.errors import LoadError

SCHEMES = {"int8": Integers(8, 32, 128), "int4": Integers(4, 32, 0)}
"""By the name of the quantisation."""


def online(quantization: str) -> Callable[[str, Weight], Weight]:
    """A function from a module's name and its dense weight to the weight that is packed in its place.

    Raises:
        LoadError: the quantisation is not applied while weights are loaded.
    """
    if (scheme := SCHEMES.get(quantization)) is None:
        raise LoadError(
            f"quantization={quantization!r} is not applied to plain numbers; {', '.join(SCHEMES)} are"
        )
    return partial(_quantised, scheme)


def _quantised(scheme: Integers, _: str, weight: Weight) -> Weight:
    if weight.scheme is not DENSE or weight.shape[1] % (scheme.group or 1):
        return weight
    return quantise(weight, scheme)
