"""Detokenization of an output, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary

from pagewire.frontend.text.detokenize import text_stream
from pagewire.frontend.text.tokenizer import Tokenizer
from pagewire.ipc.wire.params import RequestOutputKind, SamplingParams


class StopStrings:
    """Searches growing text for any of several strings, all at once (an Aho-Corasick automaton).

    The work per character does not depend on how many strings there are, and memory is linear in their characters.
    A state is a number: it stands for the longest end of the text so far that is the beginning of a string, and is
    0 before the text.

    found: by state, the longest string that ends with the text; None if none does.
    held: by state, the length of the longest end of the text that is a proper beginning of a string.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.found: list[str | None] = [None]
        self.held: list[int] = [0]
        self._next: list[dict[str, int]] = [{}]
        self._shorter: list[int] = [0]  # the state of the next shorter end of the text
        for string in strings:
            self._add(string)
        self._link()
        self._first = frozenset(self._next[0])

    def _add(self, string: str) -> None:
        state = 0
        for char in string:
            following = self._next[state]
            if char not in following:
                following[char] = len(self._next)
                self._next.append({})
                self.found.append(None)
            state = following[char]
        self.found[state] = string

    def _link(self) -> None:
        """Complete the states, shorter ones first, since each takes from the next shorter end of its text."""
        self._shorter = [0] * len(self._next)
        self.held = [0] * len(self._next)
        level, depth = [0], 0
        while level:
            depth += 1
            following = []
            for parent in level:
                for char, state in self._next[parent].items():
                    shorter = self._step(self._shorter[parent], char) if parent else 0
                    self._shorter[state] = shorter
                    self.found[state] = self.found[state] or self.found[shorter]
                    self.held[state] = depth if self._next[state] else self.held[shorter]
                    following.append(state)
            level = following

    def _step(self, state: int, char: str) -> int:
        while (following := self._next[state].get(char)) is None:
            if not state:
                return 0
            state = self._shorter[state]
        return following

    def search(self, state: int, text: str, after: int) -> tuple[int, int | None]:
        """Go on with `text` up to the first end of a string behind its first `after` characters.

        Returns the state there, and where in `text` it is; if there is none, the state after `text`, and None.
        """
        if not state and self._first.isdisjoint(text):
            return 0, None
        for end, char in enumerate(text, 1):
            state = self._step(state, char)
            if self.found[state] is not None and end > after:
                return state, end
        return state, None


# Those in use. A request may have 128 strings of a thousand characters for each of a thousand prompts.
_shared: WeakValueDictionary[tuple[str, ...], StopStrings] = WeakValueDictionary()


def shared_stops(params: SamplingParams) -> StopStrings | None:
    """The search for the parameters' stop strings; outputs with the same strings share it. None without any."""
    key = tuple(params.stop_strings)
    if not key:
        return None
    stops = _shared.get(key)
    if stops is None:
        stops = _shared[key] = StopStrings(key)
    return stops


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
        self._stops = shared_stops(params)
        self._keep_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._state = 0  # of the search, after the certain text
        self._length = 0  # length of the certain text
        self._barrier = 0  # stop strings that end before this position (by `min_tokens`) do not count
        self._unread: list[str] = []
        self._ended = False

    def feed(self, token_ids: Sequence[int]) -> int:
        """Add tokens; return how many belong to the output, which are fewer than all if a stop string ends it."""
        for count, token_id in enumerate(token_ids, 1):
            text = self._stream.feed(token_id)
            if text:
                self._unread.append(text)
            if self._stops is not None and self._find_stop(self._stops, text):
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
        if self._ended or self._stops is None:
            return text
        if held := min(self._stops.held[self._state], len(text)):
            self._unread = [text[len(text) - held :]]
        return text[: len(text) - held]

    def _find_stop(self, stops: StopStrings, text: str) -> bool:
        """Search for stop strings that end in the new text or in the tail; end the output at the first."""
        tail = self._stream.tail()
        self._num_tokens += 1
        start, self._length = self._length, self._length + len(text)
        if self._num_tokens <= self._min_tokens:
            self._barrier = self._length + len(tail)
        state, end = stops.search(self._state, text, self._barrier - start)
        if end is None:
            self._state, start = state, self._length
            state, end = stops.search(state, tail, self._barrier - start)
        if end is None or (stop := stops.found[state]) is None:
            return False
        self.stop = stop
        unread = "".join(self._unread) + tail
        excess = self._length + len(tail) - (start + end) + (0 if self._keep_stop else len(stop))
        self._unread = [unread[: len(unread) - excess]]
        self._ended = True
        return True


class WholeText:
    """Converts an output to text at its end, all at once: a `Detokenizer` of what is read only then."""

    stop: str | None = None

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer, self._params = tokenizer, params
        self._token_ids: list[int] = []
        self._text = ""

    def feed(self, token_ids: Sequence[int]) -> int:
        """Add tokens; return how many belong to the output: all."""
        self._token_ids += token_ids
        return len(token_ids)

    def end(self) -> None:
        """End the output: its text becomes readable."""
        spaces = self._params.spaces_between_special_tokens
        self._text = self._tokenizer.decode(self._token_ids, self._params.skip_special_tokens, spaces)

    def read(self) -> str:
        """Return the text since the last read."""
        text, self._text = self._text, ""
        return text


def open_detokenizer(tokenizer: Tokenizer, params: SamplingParams) -> Detokenizer | WholeText:
    """The detokenizer for an output with these parameters."""
    if params.output_kind is RequestOutputKind.FINAL_ONLY and not params.stop_strings:
        return WholeText(tokenizer, params)
    return Detokenizer(tokenizer, params)
