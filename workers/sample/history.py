"""The tokens of a sequence as lists, for logits processors; other sequences have none."""

from __future__ import annotations

from collections.abc import Sequence


class TokenHistory:
    """Tokens of a sequence. The object stands for the sequence: `ahead` returns another one.

    prompt_ids: the prompt's; -1 where an embedding takes the place of a token. output_ids: generated so far.
    """

    def __init__(self, prompt_ids: list[int], output_ids: list[int]) -> None:
        self.prompt_ids, self.output_ids = prompt_ids, output_ids

    def append(self, token_id: int) -> None:
        """Take the next token."""
        self.output_ids.append(token_id)

    def ahead(self, token_ids: Sequence[int]) -> TokenHistory:
        """The history with more tokens, while this one stays as it is."""
        return TokenHistory(self.prompt_ids, [*self.output_ids, *token_ids])


NO_HISTORY = TokenHistory([], [])
"""Of sequences whose tokens no processor needs."""
