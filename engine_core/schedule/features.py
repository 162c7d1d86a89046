"""What the model's encoder takes of one medium, as the core keeps it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    token_ids: Sequence[int]
    size: int
    tensors: Mapping[str, Tensor]
    grid: Tensor

    @property
    def num_bytes(self) -> int:
        """Memory of the tensors."""
        return sum(len(tensor.data) for tensor in self.tensors.values())
