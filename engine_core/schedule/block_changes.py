"""Which names of KV blocks come and go, for routers that follow where a prefix is cached."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Stored:
    """A block was named: its keys and values are computed or launched, and can be shared.

    parent: name of the block before it, or `ROOT`. token_ids: of the block.
    lora_id, lora_name: of the adapter with which it was computed, as the request names it; None for none.
    """

    name: bytes
    parent: bytes
    token_ids: list[int]
    lora_id: int | None = None
    lora_name: str | None = None


@dataclass(frozen=True, slots=True)
class Removed:
    """A block has lost its name: its memory is used for something else."""

    name: bytes


@dataclass(frozen=True, slots=True)
class Cleared:
    """All blocks have lost their names."""


CLEARED = Cleared()
Change: TypeAlias = Stored | Removed | Cleared


def net_effect(changes: Iterable[Change]) -> tuple[bool, list[bytes], list[bytes]]:
    """What changes come to: whether all names known before are gone, the names that came, and those that went.

    No name is both in what came and in what went. Nothing went if all known before are gone.
    """
    cleared = False
    last: dict[bytes, bool] = {}  # the last change of each name: True if it came
    for change in changes:
        if isinstance(change, Cleared):
            cleared = True
            last.clear()
        else:
            last[change.name] = isinstance(change, Stored)
    came = [name for name, there in last.items() if there]
    went = [] if cleared else [name for name, there in last.items() if not there]
    return cleared, came, went
