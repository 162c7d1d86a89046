"""The drafts that are proposed for one sequence, and how often they were right."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagewire.engine_core.drafting.acceptance import Acceptance, Ratio, reaches
from pagewire.engine_core.drafting.draft import Source, TokenDraft


@dataclass(slots=True)
class SequenceDrafts:
    """The drafts of a sequence.

    A draft is compared with the tokens that come, whether a step verifies it or they come one by one: so what a
    source is worth is known before any step has spent time on it.

    source: proposes drafts in the core; None: the worker does. limit: the most tokens of a draft.
    draft: what follows the known tokens, as far as they have agreed with it; None: to be proposed.
    num_searched: length of the sequence when its source had nothing to propose.
    """

    source: Source | None
    limit: int
    ratio: Ratio = field(default_factory=Ratio)
    draft: TokenDraft | None = None
    num_searched: int = -1

    def current(self, length: int) -> TokenDraft | None:
        """The draft after the `length` known tokens; proposed if there is none yet."""
        if self.draft is None and self.source is not None and self.num_searched != length:
            self.draft = self.source.propose(self.limit)
            self.num_searched = length
        return self.draft

    def take(self, token_ids: list[int], acceptance: Acceptance) -> None:
        """Compare tokens that have come with the draft."""
        draft = self.draft
        if draft is None:
            return
        for place, token_id in enumerate(token_ids):
            if place == len(draft.token_ids):
                break
            right = draft.token_ids[place] == token_id
            acceptance.add(self.ratio, draft.chances[place], right)
            if not right:
                self.draft = None
                return
        self.draft = draft.part(len(token_ids))

    def chances_ahead(self, draft: TokenDraft, num_pending: int, acceptance: Acceptance) -> list[float]:
        """For each token of a draft behind the first `num_pending`: how likely it and all before it are right."""
        trust = acceptance.trust
        return [trust * reach for reach in reaches(draft, acceptance.of(self.ratio), num_pending)]
