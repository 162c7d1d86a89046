"""Detokenization of an output, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from pagewire.frontend.text.detokenize import text_stream
from pagewire.frontend.text.steps import overlap
from pagewire.frontend.text.tokenizer import Tokenizer
from pagewire.ipc.params import SamplingParams


class Detokenizer:
    """Converts the tokens of one output to text, and ends the text at a stop string.

    After every token past `min_tokens`, the text is searched as it would be if the tokens ended there, so the
    result does not depend on how tokens are split into deltas. Of several stop strings, the one that ends first
    counts, and of those with the same end the longest.

    stop: the stop string that has ended the output; None if none has.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.stop: str | None = None
        self._stream = text_stream(
            tokenizer, params.skip_special_tokens, params.spaces_between_special_tokens
        )
        self._stops = params.stop_strings
        self._keep_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._longest = max(map(len, self._stops), default=0)
        self._recent = ""  # end of the certain text, which may contain the start of a stop string
        self._length = 0  # length of the certain text
        self._barrier = 0  # stop strings that end before this position (by `min_tokens`) do not count
        self._unread: list[str] = []
        self._ended = False

    def feed(self, token_ids: Sequence[int]) -> int:
        """Add tokens; return how many belong to the output, which are fewer than all if a stop string ends it."""
        for count, token_id in enumerate(token_ids, 1):
            text = self._stream.feed(token_id)
            self._num_tokens += 1
            if text:
                self._unread.append(text)
            if self._stops and self._find_stop(text):
                return count
        return len(token_ids)

    def end(self) -> None:
        """End the output: the text held back becomes readable."""
        if not self._ended:
            self._unread.append(self._stream.end())
            self._ended = True

    def read(self) -> str:
        """Return the text since the last read, except an end that may be the start of a stop string."""
        text, self._unread = "".join(self._unread), []
        if self._ended or not self._stops:
            return text
        if held := max(overlap(text, stop) for stop in self._stops):
            self._unread = [text[len(text) - held :]]
        return text[: len(text) - held]

    def _find_stop(self, text: str) -> bool:
        """Search for stop strings that end in the new text or in the tail; end the output at the first."""
        tail = self._stream.tail()
        window = self._recent + text + tail
        start = self._length - len(self._recent)  # position of the window in the whole text
        if self._num_tokens <= self._min_tokens:
            self._barrier = self._length + len(text) + len(tail)
        match = first_end(window, self._stops, max(self._length, self._barrier) - start)
        self._length += len(text)
        self._recent = (self._recent + text)[-self._longest :]
        if match is None:
            return False
        at, self.stop = match
        unread = "".join(self._unread) + tail
        cut = start + at + (len(self.stop) if self._keep_stop else 0)
        excess = self._length + len(tail) - cut
        self._unread = [unread[: len(unread) - excess]]
        self._ended = True
        return True


def first_end(text: str, stops: Sequence[str], after: int) -> tuple[int, str] | None:
    """Return position and text of the stop string that ends first after `after`; None if there is none."""
    matches = [
        (at + len(stop), at, stop)
        for stop in stops
        if (at := text.find(stop, max(0, after - len(stop) + 1))) >= 0
    ]
    if not matches:
        return None
    _, at, stop = min(matches)
    return at, stop
