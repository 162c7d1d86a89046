"""Reading of an output: its parts, the number of its reasoning tokens, and the log probabilities of its message."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence

from pagewire.frontend.client import CompletionOutput, Tokenizer, token_bytes
from pagewire.frontend.server.openai.logprobs import TokenNames, chat_logprobs
from pagewire.frontend.server.openai.protocol import TokenLogprob
from pagewire.frontend.server.openai.reply import ReplyDelta, ReplyParser, feed_parser
from pagewire.frontend.server.parsing.reasoning_marks import ReasoningMarks


class OutputReader:
    """Reads the increments of one output.

    parser: of the text. tokenizer: None: reasoning tokens are not counted.
    reasoning: marks of the reasoning that the output may have; None: it has none.
    top_logprobs: return log probabilities, each with this many alternatives; None: none.
    """

    def __init__(
        self,
        parser: ReplyParser,
        tokenizer: Tokenizer | None,
        names: TokenNames,
        *,
        reasoning: ReasoningMarks | None,
        top_logprobs: int | None,
    ) -> None:
        self._parser, self._tokenizer, self._names = parser, tokenizer, names
        self._thought = None
        if tokenizer is not None and reasoning is not None:
            self._thought = ThoughtTokens(tokenizer, reasoning)
        self._top = top_logprobs
        self._message = MessageTokens()

    @property
    def reasoning_tokens(self) -> int:
        """Number of tokens so far up to the end of the reasoning."""
        return 0 if self._thought is None else self._thought.num_tokens

    def read(self, part: CompletionOutput) -> tuple[ReplyDelta, list[TokenLogprob]]:
        """Return what an increment adds to the answer, and the log probabilities of the content's tokens."""
        delta = feed_parser(self._parser, part.text, part.finished())
        num_thought = self._count_thought(part, delta)
        if self._top is None or self._tokenizer is None:
            return delta, []
        logprobs = chat_logprobs(self._names, part.token_ids, part.logprobs or (), self._top).content or []
        tokens = zip(part.token_ids, logprobs, strict=True)
        self._message.add((token_bytes(self._tokenizer, token_id), logprob) for token_id, logprob in tokens)
        self._message.drop(num_thought)
        return delta, self._message.take(delta.content)

    def _count_thought(self, part: CompletionOutput, delta: ReplyDelta) -> int:
        """Return by how many tokens an increment extends the reasoning."""
        if self._thought is None:
            return 0
        before = self._thought.num_tokens
        self._thought.add(part.token_ids, part.text, delta)
        return self._thought.num_tokens - before


class ThoughtTokens:
    """Counts the tokens of an output's reasoning: those up to the closing tag, or all while it is open."""

    def __init__(self, tokenizer: Tokenizer, marks: ReasoningMarks) -> None:
        self._tokenizer, self._marks = tokenizer, marks
        self._token_ids: list[int] = []
        self._text = ""
        self._open, self._ended = False, False
        self.num_tokens = 0

    def add(self, token_ids: Sequence[int], text: str, delta: ReplyDelta) -> None:
        """Add tokens and their text, and what the parser made of the text."""
        if self._ended:
            return
        close = self._marks.close
        searched = max(0, len(self._text) - len(close))
        self._token_ids += token_ids
        self._text += text
        self._open |= bool(delta.reasoning) or self._text.lstrip().startswith((self._marks.open, close))
        if self._open and self._text.find(close, searched) >= 0:
            self.num_tokens = num_through(self._tokenizer, self._token_ids, close)
            self._ended = True
        elif self._open:
            self.num_tokens = len(self._token_ids)
        elif delta.content or delta.tool_calls:
            self._ended = True


def num_through(tokenizer: Tokenizer, token_ids: Sequence[int], mark: str) -> int:
    """Return how many tokens it takes until their text contains `mark`; all if it never does."""

    def contains(number: int) -> bool:
        return mark in tokenizer.decode(token_ids[:number], skip_special_tokens=False)

    return bisect_left(range(len(token_ids)), True, key=contains)


class MessageTokens:
    """Finds the tokens that wrote a message, given its text in increments. Tokens of other text are dropped."""

    def __init__(self) -> None:
        self._tokens: deque[tuple[bytes, TokenLogprob]] = deque()
        self._rest = b""  # text of the last token that has not come yet

    def add(self, tokens: Iterable[tuple[bytes, TokenLogprob]]) -> None:
        """Add tokens, each with its text in UTF-8."""
        self._tokens += tokens

    def drop(self, number: int) -> None:
        """Drop the first tokens that are left."""
        for _ in range(number):
            self._tokens.popleft()

    def take(self, text: str) -> list[TokenLogprob]:
        """Return the tokens that begin in the next text of the message."""
        missing = text.encode()
        if self._rest and missing:
            overlap = min(len(self._rest), len(missing))
            missing, self._rest = missing[overlap:], self._rest[overlap:]
        taken = []
        while missing and self._tokens:
            written, logprob = self._tokens.popleft()
            for spelling in (written, written.lstrip()):  # space before a text does not belong to the text
                if spelling and (missing.startswith(spelling) or spelling.startswith(missing)):
                    taken.append(logprob)
                    missing, self._rest = missing[len(spelling) :], spelling[len(missing) :]
                    break
        return taken
