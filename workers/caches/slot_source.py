"""The source of a sequence, as its slot keeps it."""

from __future__ import annotations

from typing import NamedTuple

from pagewire.ipc.wire.codec import Tensor as PlainTensor
from pagewire.ipc.wire.items import Media
from pagewire.ipc.wire.sources import SOUND, SoundExcerpt, SourceInfo


class SlotSource(NamedTuple):
    """The source of a sequence: the positions that its encoder makes, and its sound float32 [samples], if any.

    excerpt: of a longer sound; None: the sound is whole.
    """

    length: int
    sound: PlainTensor | None = None
    excerpt: SoundExcerpt | None = None

    @classmethod
    def of(cls, medium: Media, info: SourceInfo) -> SlotSource:
        """That of the first medium of a sequence."""
        length = info.num_tokens(medium.data)
        if info.kind != SOUND:
            return cls(length)
        return cls(length, medium.data, SoundExcerpt.of(medium.options))
