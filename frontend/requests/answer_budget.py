"""The budget of the log probabilities that are kept for one answer."""

from __future__ import annotations

from pagewire.ipc.errors import FieldValueError
from pagewire.ipc.wire.messages import Request, TokenDelta


class AnswerTooLargeError(FieldValueError):
    """More would be kept for an answer than is allowed."""


class LogprobBudget:
    """Counts the log probabilities that are kept for one answer, and refuses those over a limit.

    An answer may have several prompts. Its whole log probabilities are kept until it is sent, and those of a stream
    until they are read. Not thread-safe: used under the session's lock, once the requests are submitted.

    Args:
        limit: candidate tokens, over all positions. num_copies: how often the answer has those of a prompt.
        vocab_size: candidates per position of a request for all of them.
    """

    def __init__(self, limit: int, num_copies: int, vocab_size: int) -> None:
        self._limit, self._num_copies, self._vocab_size = limit, num_copies, vocab_size
        self._expected = self._kept = 0

    def expect(self, request: Request) -> None:
        """Count the log probabilities of a prompt that is to be submitted.

        Raises:
            AnswerTooLargeError: the prompts so far have more than the limit.
        """
        number = request.params.prompt_logprobs
        if number is not None:
            width = 1 + (self._vocab_size if number == -1 else number)
            self._expected += width * len(request.prompt.token_ids) * self._num_copies
            self._check("prompt_logprobs", self._expected, "ask for fewer, or send fewer prompts at a time")

    def keep(self, number: int) -> None:
        """Count log probabilities that have arrived.

        Raises:
            AnswerTooLargeError: more than the limit are kept.
        """
        self._kept += number
        self._check(
            "logprobs", self._kept, "ask for fewer, or for fewer sequences at a time, or stream the answer"
        )

    def release(self, number: int) -> None:
        """Count log probabilities that are no longer kept."""
        self._kept -= number

    def _check(self, name: str, number: int, advice: str) -> None:
        if number > self._limit:
            raise AnswerTooLargeError(
                name,
                f": the answer has {number} log probabilities or more; at most {self._limit} are kept for a "
                f"request (--max-request-logprobs): {advice}",
            )


def num_logprobs(delta: TokenDelta) -> int:
    """The number of log probabilities in a delta."""
    rows = (delta.logprobs, delta.prompt_logprobs)
    return sum(part.token_ids.shape[0] * part.token_ids.shape[1] for part in rows if part is not None)
