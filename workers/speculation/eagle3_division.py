"""How the layer of an EAGLE-3 head is divided over the ranks of a group: as the model's own layers are.

Attention is divided by heads, the feed-forward half by width, logits by vocabulary. The projection of the model's
states, which runs once for all drafts of a step, is whole on every rank, as are norms and an embedding of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagewire.kernels.data.reduced import Reduced
from pagewire.kernels.data.weight import Linear
from pagewire.workers.errors import IndivisibleError, LoadError
from pagewire.workers.module.parallel_layers import Gather, GatheredLinear
from pagewire.workers.module.shards import Axis, Cut
from pagewire.workers.ranks.interface import Collective
from pagewire.workers.ranks.shares import Heads, scaled, width_spans

QUERY, OUT = "self_attn.q_proj", "self_attn.o_proj"
KEY_VALUE = ("self_attn.k_proj", "self_attn.v_proj")
WIDE, NARROW = ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"
LOGITS = "lm_head"


@dataclass(frozen=True)
class EagleDivision:
    """heads: of the whole layer. head_dim: numbers of one. ranks: that divide the layer."""

    heads: Heads
    head_dim: int
    ranks: Collective

    @classmethod
    def of(cls, path: str, heads: Heads, head_dim: int, ranks: Collective) -> EagleDivision:
        """That of the head in a folder.

        Raises:
            IndivisibleError: its attention heads cannot be divided over these ranks.
        """
        try:
            heads.share(ranks.rank, ranks.size)
        except LoadError as error:
            raise IndivisibleError(
                f"the EAGLE-3 head {path} cannot be divided over {ranks.size} ranks: {error}"
            ) from error
        return cls(heads, head_dim, ranks)

    @property
    def own_heads(self) -> Heads:
        """The heads of this rank."""
        query, kv = self.heads.share(self.ranks.rank, self.ranks.size)
        return Heads(len(query), len(kv))

    def cut(self, name: str, shape: tuple[int, int]) -> Cut | None:
        """How a matrix [N, K] of the layer is divided; None if every rank has all of it.

        Raises:
            LoadError: it is narrower than there are ranks.
        """
        if self.ranks.size == 1:
            return None
        shares = [self.heads.share(rank, self.ranks.size) for rank in range(self.ranks.size)]
        if name in (QUERY, OUT):
            spans = tuple(scaled(query, self.head_dim) for query, _ in shares)
        elif name in KEY_VALUE:
            spans = tuple(scaled(kv, self.head_dim) for _, kv in shares)
        elif name in (*WIDE, NARROW, LOGITS):
            spans = width_spans(shape[name == NARROW], self.ranks.size)
        else:
            return None
        axis = Axis.COLUMNS if name in (OUT, NARROW) else Axis.ROWS
        return Cut(axis, tuple((span,) for span in spans), self.ranks.rank)

    def over_ranks(self, product: Linear, name: str, cut: Cut | None) -> Linear:
        """A product with a rank's part of a matrix: it adds up if inputs are divided, and gathers logits."""
        if cut is None:
            return product
        if cut.axis is Axis.COLUMNS:
            return Reduced(product, self.ranks)
        return GatheredLinear(product, Gather(cut.places, self.ranks)) if name == LOGITS else product
