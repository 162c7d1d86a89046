"""A cache beside the token blocks: something else of a prefix, or of what stands in a prompt."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_

from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.ipc.wire.steps import Row, StepPlan


class CacheGroup:
    """A group of `KVCache`, in terms of sequences and tokens. As it stands here, it limits nothing.

    Of a plan, `begin` comes first, then `chunk` and `fill` for its rows, `pending` and `advance`, then `settle`.
    """

    # ------------------------------------------------------------ admission

    def reach(self, sequence: Sequence, end: int) -> int:
        """Up to which token, at most `end`, the group can go on from a cached prefix."""
        return end

    def fits(self, sequence: Sequence, end: int) -> bool:
        """True if a sequence can be admitted with `end` cached tokens, and should be."""
        return True

    def admit(self, sequence: Sequence, end: int) -> None:
        """Give a sequence what it needs behind its `end` cached tokens.

        Raises:
            ValueError: it does not fit.
        """

    # ------------------------------------------------------------ a plan

    def begin(self, running: Sequence_[Sequence], limited: bool) -> None:
        """Begin a plan, with these sequences running. limited: one waits for a token, and the step ends in time."""

    def chunk(self, sequence: Sequence, count: int) -> int:
        """How many of the next `count` tokens a row may run in this plan."""
        return count

    def takes_drafts(self, sequence: Sequence) -> bool:
        """True if the next row of a sequence may have drafts."""
        return True

    def fill(self, sequence: Sequence, row: Row) -> None:
        """Write into a row that was just launched what the group has for it."""

    def pending(self, sequence: Sequence) -> tuple[int, int] | None:
        """What has to be encoded before the next token of a sequence can run, and can be in slices of its layers.

        Returns its number of embeddings, and that of the layers left; None: there is nothing, or not in this plan.
        """
        return None

    def advance(self, sequence: Sequence, num_layers: int) -> None:
        """Have this plan run the next layers of what is `pending` for a sequence, at most as many as are left."""

    def settle(self, plan: StepPlan) -> None:
        """End a plan: say in it what concerns no single row."""

    # ------------------------------------------------------------ sequences

    def verify(self, sequence: Sequence, row: Row, num_rejected: int) -> int:
        """Go back behind a row with drafts of which the last `num_rejected` were wrong.

        Returns how many tokens the group has computed: all of the row's, where it keeps nothing of single tokens.
        """
        return row.start + row.num_tokens

    def register(self, sequence: Sequence) -> None:
        """Name all that can be shared of a sequence that ends, between two plans."""

    def free(self, sequence: Sequence) -> None:
        """Take what a sequence has of the group back. It has no row in the plan that is being made."""

    # ------------------------------------------------------------ all of it

    def forget(self) -> None:
        """Drop all cached prefixes that are not in use."""

    def forget_name(self, name: bytes) -> None:
        """Drop what is kept under the name of a block, whose content is wrong."""

    def lose(self) -> None:
        """Drop all that the group holds, because the workers are lost; no sequence runs."""
