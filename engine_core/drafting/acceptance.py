"""What drafts have been worth: how often their tokens were right, against how likely their source thought it."""

from __future__ import annotations

from dataclasses import dataclass

from pagewire.engine_core.drafting.draft import TokenDraft

MEMORY = 0.95  # weight of the past at each further token, so about 20 tokens count
ENGINE_MEMORY = 0.999
MEMORY_KEPT = 0.98  # at each further step with drafts
PRIOR_KEPT = 20.0  # tokens
PRIOR_TOKENS = 3.0  # the engine's own ratio counts as this many tokens of each request
FIRST_RATIO = 0.7  # the ratio that is assumed before any drafts were verified
MOST_LIKELY = 0.98  # no token is more certain than this
RECOVERY = 0.002  # how fast an unused ratio returns to `FIRST_RATIO`, so that it is tried again


@dataclass(slots=True)
class Ratio:
    """Tokens that were right, over the sum of the chances that their sources gave them; both fade."""

    right: float = 0.0
    expected: float = 0.0

    def add(self, chance: float, right: bool, memory: float) -> None:
        """Count one token."""
        self.right = self.right * memory + right
        self.expected = self.expected * memory + chance


class Acceptance:
    """The ratio of all requests together, which a request starts from.

    It also compares the result of verified drafts with what was expected: drafts are verified because most was
    expected of them, in some cases by mistake.
    """

    def __init__(self) -> None:
        self._ratio = Ratio(FIRST_RATIO * PRIOR_TOKENS, PRIOR_TOKENS)
        self._kept = Ratio(PRIOR_KEPT, PRIOR_KEPT)

    @property
    def trust(self) -> float:
        """The fraction of what is expected of drafts that comes true, at most 1."""
        return min(1.0, self._kept.right / self._kept.expected)

    def verified(self, num_expected: float, num_accepted: int) -> None:
        """Count the drafts of a step, and how many of them were expected to be right."""
        self._kept.right = self._kept.right * MEMORY_KEPT + num_accepted
        self._kept.expected = self._kept.expected * MEMORY_KEPT + num_expected

    def add(self, of_request: Ratio, chance: float, right: bool) -> None:
        """Count a token, also in the ratio of its request."""
        of_request.add(chance, right, MEMORY)
        self._ratio.add(chance, right, ENGINE_MEMORY)

    def of(self, of_request: Ratio) -> float:
        """The ratio of a request: what it has shown itself, and before that what others have."""
        every = self._ratio.right / self._ratio.expected
        return (of_request.right + PRIOR_TOKENS * every) / (of_request.expected + PRIOR_TOKENS)

    def recover(self, of_request: Ratio) -> None:
        """Move the ratios slowly towards `FIRST_RATIO` while no drafts are tried, so that they are tried again."""
        for ratio in (of_request, self._ratio):
            ratio.right += RECOVERY * max(0.0, FIRST_RATIO * ratio.expected - ratio.right)

    def regain_trust(self) -> None:
        """Let trust come back slowly, while nothing is verified."""
        self._kept.right += RECOVERY * max(0.0, self._kept.expected - self._kept.right)


def reaches(draft: TokenDraft, ratio: float, first: int = 0) -> list[float]:
    """For each token of a draft from `first` on, how likely it and all before it are right, 0 to 1."""
    reach, found = 1.0, []
    for place, chance in enumerate(draft.chances):
        reach *= min(MOST_LIKELY, chance * ratio)
        if place >= first:
            found.append(reach)
    return found
