"""A picture or sound on its way into a prompt."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagewire.ipc.wire.budget import MAX_OPTIONS_CHARS
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.media import media_name

MAX_NAMES = 4  # that a medium has by several arguments of the processor, and are kept


@dataclass(frozen=True)
class MediaItem:
    """A picture or sound as a client gives it, not decoded yet.

    kind: "image" or "audio". url: where it is (data:, http:, https: or file:); else `data` has its bytes.
    samples: `data` are float32 samples, little-endian, of which a second has this many; 0: a file's content.
    max_side: a picture is made smaller, to have at most this many pixels a side; 0: it stays as it is.
    uuid: the caller's name for it. Without url and data, the engine is to have it under this name.
    place: where the request has it, for errors.
    """

    kind: str
    url: str = ""
    data: bytes = b""
    samples: int = 0
    max_side: int = 0
    uuid: str = ""
    place: str = ""

    @property
    def is_empty(self) -> bool:
        """True if there is nothing but its name."""
        return not (self.url or self.data)


@dataclass(frozen=True)
class Decoded:
    """A decoded picture or sound: uint8 [height, width, 3], or float32 [samples] at the engine's rate.

    embeddings: the data are embeddings [number of tokens, E] in place of a picture or sound.
    uuid: the caller's name for it. `data` is empty if the engine is to have it under that name. place: see above.
    excerpt: of a longer sound, as a source's `options` have it (`ipc.wire.sources`); "": it is whole.
    """

    kind: str
    data: Tensor
    embeddings: bool = False
    uuid: str = ""
    place: str = ""
    excerpt: str = ""
    _names: dict[str, bytes] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_bytes(self) -> int:
        """Memory of the content, and of the names that are kept."""
        return len(self.data.data) + MAX_NAMES * MAX_OPTIONS_CHARS

    def name(self, options: str) -> bytes:
        """Its name (`media_name`) with these arguments of the processor; computed once, while they are few."""
        if options not in self._names:
            if len(self._names) >= MAX_NAMES:
                self._names.clear()
            self._names[options] = media_name(self.kind, self.data, options)
        return self._names[options]
