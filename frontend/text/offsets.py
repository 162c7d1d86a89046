"""Where each token's text begins in the text of an output."""

from __future__ import annotations

from collections.abc import Sequence

from pagewire.frontend.text.detokenize import common_beginning, text_stream
from pagewire.frontend.text.steps import REPLACEMENT
from pagewire.frontend.text.tokenizer import Tokenizer


class TextOffsets:
    """The offset of each token of a growing output: the number of characters of the text before the token's own.

    The tokens of a character that is split begin where it begins, and a token without text where the next text
    begins, so offsets never decrease and never run past the end of the text (before a stop string is cut off).

    start: offset of the first token. Other arguments: those of `text_stream`; without a tokenizer there is no text,
    and all offsets are `start`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        start: int = 0,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._stream = (
            None
            if tokenizer is None
            else text_stream(tokenizer, skip_special_tokens, spaces_between_special_tokens)
        )
        self._start = start  # offset of the text that may still change
        self._tail = ""  # that text, as it would be if the tokens ended now
        self._offset = start

    @property
    def end(self) -> int:
        """Length of the text so far."""
        return self._start + len(self._tail)

    def feed(self, token_id: int) -> int:
        """Add a token; return its offset."""
        if self._stream is None:
            return self._offset
        before, certain = self._tail, self._stream.feed(token_id)
        self._tail = self._stream.tail()
        after = (certain + self._tail).rstrip(REPLACEMENT)
        # A token that only adds a part of a character begins where that character will be.
        size = (
            len(before.rstrip(REPLACEMENT))
            if before.startswith(after)
            else len(common_beginning((before, after)))
        )
        self._offset = max(self._offset, self._start + size)
        self._start += len(certain)
        return self._offset


def prompt_offsets(tokenizer: Tokenizer | None, token_ids: Sequence[int], text: str) -> list[int]:
    """Return the offset of each token of a prompt in the prompt's text.

    The special tokens that the tokenizer adds to a prompt are not in its text.
    """
    offsets: list[int] = []
    for skip_special_tokens in (False, True):
        places = TextOffsets(tokenizer, skip_special_tokens=skip_special_tokens)
        offsets = [places.feed(token_id) for token_id in token_ids]
        if places.end == len(text):
            break
    return [min(offset, len(text)) for offset in offsets]
