"""The text of an output, up to where a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence

from pagewire.frontend.text.detokenize import text_stream
from pagewire.frontend.text.steps import overlap
from pagewire.frontend.text.tokenizer import Tokenizer
from pagewire.ipc.params import SamplingParams


class Detokenizer:
    """The text of one output, up to where a stop string ends it.

    Stop strings are looked for after every token past `min_tokens`, in the text as it would be if the tokens
    ended there; so the outcome does not depend on how tokens arrive. Of several, the one that ends first
    counts, and of those that end together the longest.

    stop: the stop string that was found.
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
        self._recent = ""  # end of the certain text, in which a stop string may have begun
        self._length = 0  # of the certain text
        self._barrier = 0  # a stop string must end behind this
        self._unread: list[str] = []
        self._ended = False

    def feed(self, token_ids: Sequence[int]) -> int:
        """More tokens; how many of them belong to the output (less than all if a stop string was found)."""
        for count, token_id in enumerate(token_ids, 1):
            text = self._stream.feed(token_id)
            self._num_tokens += 1
            if text:
                self._unread.append(text)
            if self._stops and self._find_stop(text):
                return count
        return len(token_ids)

    def end(self) -> None:
        """No more tokens: nothing is held back any longer."""
        if not self._ended:
            self._unread.append(self._stream.end())
            self._ended = True

    def read(self) -> str:
        """The text that was not read yet, but for an end that may begin a stop string."""
        text, self._unread = "".join(self._unread), []
        if self._ended or not self._stops:
            return text
        if held := max(overlap(text, stop) for stop in self._stops):
            self._unread = [text[len(text) - held :]]
        return text[: len(text) - held]

    def _find_stop(self, text: str) -> bool:
        """Look for stop strings that end in the new text or behind it; end the output at the first."""
        tail = self._stream.tail()
        window = self._recent + text + tail
        start = self._length - len(self._recent)  # of the window, in the whole text
        if self._num_tokens <= self._min_tokens:
            self._barrier = self._length + len(text) + len(tail)
        found = first_end(window, self._stops, max(self._length, self._barrier) - start)
        self._length += len(text)
        self._recent = (self._recent + text)[-self._longest :]
        if found is None:
            return False
        at, self.stop = found
        unread = "".join(self._unread) + tail
        cut = start + at + (len(self.stop) if self._keep_stop else 0)
        excess = self._length + len(tail) - cut
        self._unread = [unread[: len(unread) - excess]]
        self._ended = True
        return True


def first_end(text: str, stops: Sequence[str], after: int) -> tuple[int, str] | None:
    """Where the stop string that ends first behind `after` begins, and which it is."""
    found = [
        (at + len(stop), at, stop)
        for stop in stops
        if (at := text.find(stop, max(0, after - len(stop) + 1))) >= 0
    ]
    if not found:
        return None
    _, at, stop = min(found)
    return at, stop
