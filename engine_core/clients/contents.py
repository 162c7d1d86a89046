"""The contents of media that unfinished requests have: each is in memory once, and all together are bounded."""

from __future__ import annotations

from weakref import WeakValueDictionary

from pagewire.ipc.budget import MAX_HELD_BYTES
from pagewire.ipc.codec import Tensor
from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.items import Prompt


class Content(Tensor):
    """The content of a medium, which goes when no request has it any more."""

    __slots__ = ("__weakref__",)


class Contents:
    """Contents by name. max_bytes: of all that are held."""

    def __init__(self, max_bytes: int = MAX_HELD_BYTES) -> None:
        self._held: WeakValueDictionary[bytes, Content] = WeakValueDictionary()
        self._max_bytes = max_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all contents that are held."""
        return sum(len(content.data) for content in self._held.values())

    def hold(self, prompt: Prompt) -> None:
        """Hold the contents of a prompt while it exists, and share those that another prompt has, too.

        The names must have been checked: equal ones mean equal contents.

        Raises:
            EngineBusyError: there is no room; nothing was changed.
        """
        if not prompt.media:
            return
        new = {medium.name: medium.data for medium in prompt.media if medium.name not in self._held}
        num_bytes = self.num_bytes + sum(len(data.data) for data in new.values())
        if new and num_bytes > self._max_bytes:
            raise EngineBusyError(
                f"the embeddings of unfinished requests have {num_bytes} bytes (limit {self._max_bytes}): "
                "wait until some have ended"
            )
        for medium in prompt.media:
            content = self._held.get(medium.name)
            if content is None:
                content = Content(medium.data.dtype, medium.data.shape, medium.data.data)
                self._held[medium.name] = content
            medium.data = content
