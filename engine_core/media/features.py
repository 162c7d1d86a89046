"""What the model's encoder takes of one medium, as the core keeps it."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from pagewire.ipc.wire.codec import Tensor


@dataclass(frozen=True, eq=False)
class Features:
    """The features of one medium; requests with the same medium share them.

    name, kind: of the medium. token_ids: its layout. size: embeddings that the encoder makes of it.
    tensors: by the names of the encoder's arguments. grid: int64 [n, 3] of a picture, from which positions follow;
    empty in models whose tokens have one position.
    """

    name: bytes
    kind: str
    token_ids: array[int]
    size: int
    tensors: Mapping[str, Tensor]
    grid: Tensor

    @property
    def num_bytes(self) -> int:
        """Memory of the tensors and of the layout."""
        num_bytes = len(self.token_ids) * self.token_ids.itemsize
        return num_bytes + sum(len(tensor.data) for tensor in self.tensors.values())
