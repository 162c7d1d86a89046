"""An embedding of tokens whose rows may have adapters."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pagewire.kernels.ops import linear
from pagewire.workers.step.context import current_adapters


class AdaptedEmbedding(nn.Module):
    """Looks tokens up, in the rows [V, H] of a model or in those that an adapter has or changes.

    Ids after the model's vocabulary belong to an adapter with rows of its own for these tokens.
    """

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self.embedding = embedding
        self.shape: tuple[int, int] = (embedding.num_embeddings, embedding.embedding_dim)

    def __getattr__(self, name: str) -> Any:
        """Other attributes are those of the embedding."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("embedding"), name)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids int64 [...], those of the step's rows, to embeddings [..., H]."""
        if (rows := current_adapters()) is None:
            return self.embedding(ids)  # type: ignore[no-any-return]
        found: Tensor = self.embedding(ids.clamp(max=self.shape[0] - 1))
        flat_ids, out = ids.reshape(-1), found.reshape(-1, self.shape[1])
        for adapter, index in rows.groups():
            if (delta := adapter.embedding) is None:
                continue
            at = index.to(ids.device)
            tokens = flat_ids[at]
            states = out[at] if delta.rows is None else delta.rows[tokens]
            if delta.a is not None and delta.b is not None:
                added = linear(delta.scale * delta.a[tokens], delta.b)
                states = states.to(added.dtype) + added
            out = out.index_copy(0, at, states.to(out.dtype))
        return out.view(found.shape)


def embedding_of(module: Any) -> Any:
    """The embedding that an adapted one is made of; any other as it is."""
    return module.embedding if isinstance(module, AdaptedEmbedding) else module
