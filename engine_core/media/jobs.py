"""The messages between the core and the program that runs a model's processor."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class Array(msgspec.Struct, array_like=True):
    """A tensor: see `codec.Tensor`."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Describe(msgspec.Struct, tag=True, array_like=True):
    """Ask which media the processor takes."""


class Lay(msgspec.Struct, tag=True, array_like=True):
    """Ask for the layout of a medium of this kind and shape. options: the processor's arguments, as JSON."""

    kind: str
    shape: tuple[int, ...]
    options: str = ""


class ProcessMedium(msgspec.Struct, tag=True, array_like=True):
    """Ask for the features of a medium."""

    kind: str
    content: Array
    options: str = ""


class Described(msgspec.Struct, array_like=True):
    """By kind: the placeholder's token and text, and the token whose place takes an embedding. Samples a second."""

    kinds: dict[str, tuple[int, str, int]]
    sampling_rate: int = 0


class Processed(msgspec.Struct, array_like=True):
    """The tokens that stand for a medium, and its features by name; none of a layout."""

    token_ids: list[int]
    features: dict[str, Array] = {}


Job: TypeAlias = Describe | Lay | ProcessMedium
