"""A budget for the tokens of a model's reasoning: marks in tokens, and the state of a sequence among them.

The sampler generates the closing mark when the budget is spent, and the frontend finds in the tokens what has ended
the reasoning. Both follow from the tokens alone.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from pagewire.ipc.bounds import check_fields

MAX_MARK_CHARS = 100
MAX_MARK_TOKENS = 16
Mark: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_MARK_CHARS)]
MarkTokens: TypeAlias = Annotated[
    list[Annotated[int, Meta(ge=0, le=2**31 - 1)]], Meta(max_length=MAX_MARK_TOKENS)
]


class ThinkingMarks(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The texts around a model's reasoning.

    begun: whether the output begins within the reasoning; None: what the last mark of the prompt says.
    open_ids: the tokens of `open`. close_id: the token of `close`; both filled in by the frontend.
    """

    open: Mark = "<think>"
    close: Mark = "</think>"
    begun: bool | None = None
    open_ids: MarkTokens | None = None
    close_id: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None

    def __post_init__(self) -> None:
        check_fields(self)


class ThinkingState:
    """Where a sequence is: within its reasoning, with so many tokens of it, or outside.

    budget: most tokens of reasoning, the marks not counted. Reasoning that is opened again goes on with it.

    Attributes:
        num_tokens: tokens of reasoning so far. spent: it was ended with all of its budget.
    """

    def __init__(self, budget: int, marks: ThinkingMarks, prompt_ids: Iterable[int]) -> None:
        self._budget, self._marks = budget, marks
        self._recent: deque[int] = deque(maxlen=len(marks.open_ids or [0]))
        self._within = bool(marks.begun)
        if marks.begun is None:
            for token_id in prompt_ids:
                self.add(token_id)
        self.num_tokens, self.spent = 0, False

    num_tokens: int = 0
    spent: bool = False

    @property
    def forced(self) -> int | None:
        """The token that must come next, since the budget is spent; None: any may."""
        return self._marks.close_id if self._within and self.num_tokens >= self._budget else None

    @property
    def ended(self) -> bool:
        """True if some reasoning was there, and none is open."""
        return not self._within and (self.num_tokens > 0 or self.spent)

    def add(self, token_id: int) -> None:
        """Take the next token."""
        if self._within:
            if token_id != self._marks.close_id:
                self.num_tokens += 1
                return
            self.spent = self.num_tokens >= self._budget
            self._within = False
            self._recent.clear()
            return
        self._recent.append(token_id)
        if list(self._recent) == self._marks.open_ids:
            self._within = True

    def copy(self) -> ThinkingState:
        """A copy to which tokens can be added while this one stays as it is."""
        other = copy.copy(self)
        other._recent = self._recent.copy()
        return other


def finish_of(
    budget: int, marks: ThinkingMarks, prompt_ids: Sequence[int], token_ids: Sequence[int]
) -> str | None:
    """The cause that ended the reasoning of an output: "budget", or "stop" for the model itself; None: nothing."""
    state = ThinkingState(budget, marks, prompt_ids)
    for token_id in token_ids:
        state.add(token_id)
    return ("budget" if state.spent else "stop") if state.ended else None
