"""The contents of media that unfinished requests have: each is in memory once."""

from __future__ import annotations

from weakref import WeakValueDictionary

from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.items import Prompt


class HeldContent(Tensor):
    """The content of a medium, which goes when no request has it any more."""

    __slots__ = ("__weakref__",)


class Contents:
    """Contents by name."""

    def __init__(self) -> None:
        self._held: WeakValueDictionary[bytes, HeldContent] = WeakValueDictionary()

    @property
    def num_bytes(self) -> int:
        """Bytes of all contents that are held."""
        return sum(len(content.data) for content in self._held.values())

    def hold(self, prompt: Prompt) -> None:
        """Hold the embeddings of a prompt while it exists, and share those that another prompt has, too.

        The names must have been checked: equal ones mean equal contents. Those of pictures and sounds are not yet.
        """
        for medium in prompt.media:
            if not medium.embeddings:
                continue
            content = self._held.get(medium.name)
            if content is None:
                content = HeldContent(medium.data.dtype, medium.data.shape, medium.data.data)
                self._held[medium.name] = content
            medium.data = content
