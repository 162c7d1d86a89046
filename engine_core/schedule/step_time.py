"""How long steps take, and how many tokens of prompts they may compute so that they end in time. Pure: no clock.

A stream gets a token from each step, so the gap between two of its tokens is the time of a step. What a step takes
is a sum of parts: one for the step itself, one for the rows that decode, one for the tokens of chunks, and one for
their attention, which grows with the tokens before them. Each part is an amount, which is known when the step is
planned, times a rate, which is learnt from the steps that have returned.

While a sequence waits for a token, a chunk has the tokens for which there is time in the step; where nobody waits
it has all for which there is a budget. Later prompts do not pass one that was cut. A picture or a sound is encoded
in slices of the encoder's layers likewise, before its tokens run. None of it changes a result: what a row gets does
not depend on the other rows, or on how its prompt was divided.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from pagewire.engine_core.schedule.sequence import Sequence

# What is guessed of the rates before steps say more, in times of a step without rows: of each row that decodes, of
# each token of a chunk, and of each pair of such a token and one before it. The guess for a token of a chunk is
# higher than what most machines need, so that even the first long prompt holds no stream up.
FIRST_GUESS = (1.0, 1 / 32, 1 / 8, 1 / 8 / 4096)
FIRST_FEW = 3  # steps with chunks, and without, that count in full
# Of a later step in the rates: one that is slower than expected counts more, as a processor that another program
# has taken lengthens the next step, too. So the rates stay above the mean by about as much as times scatter.
WEIGHT_OF_SLOW, WEIGHT_OF_FAST = 0.5, 0.25
MOST_AT_ONCE = 4.0  # a step counts as at most this many times, and at least this part of, what is expected
GROWTH = 4  # a step computes at most this many times the tokens of the largest one that was measured
AIM = 0.9  # of the limit, which planned steps are expected to take
LEAST_SHARE = 0.5  # of the time of rows that decode, which a chunk gets even if they take all of the limit


@dataclass(slots=True)
class ChunkWork:
    """The chunks of a step: rows of several tokens that are no drafts, or of tokens of a prompt.

    num_rows, num_tokens: of all of them. num_pairs: of a token and one that it attends to.
    num_streams: sequences that waited for a token when the first chunk was planned; None before that.
    is_full: there is no time for another one. num_encoded: embeddings of a medium, times the layers that the
        encoder's slice in this step runs.
    """

    num_rows: int = 0
    num_tokens: int = 0
    num_pairs: float = 0.0
    num_streams: int | None = None
    is_full: bool = False
    num_encoded: int = 0

    def add(self, start: int, num_tokens: int) -> None:
        """Add a row of `num_tokens` tokens that follow `start` others."""
        self.num_rows += 1
        self.num_tokens += num_tokens
        self.num_pairs += pairs(start, num_tokens)


class StepRates:
    """The seconds of a step, as a sum of parts whose rates are learnt.

    Steps that only decode teach the rates of the step itself and of its rows. What a step with chunks takes beyond
    these is due to its chunks. Of what was expected of several parts, each is corrected in proportion to its share.

    Attributes:
        largest: tokens of the chunks of a step, the most that were measured.
    """

    def __init__(self) -> None:
        self.largest = 0
        self._rates = list(FIRST_GUESS)
        self._num_decoding = self._num_chunked = 0  # steps that were measured, without chunks and with some

    @property
    def known(self) -> bool:
        """True once a step was measured."""
        return self._num_decoding + self._num_chunked > 0

    def seconds(self, num_decoded: int, num_tokens: int = 0, num_pairs: float = 0.0) -> float:
        """What a step is expected to take that decodes some tokens and has chunks of some tokens and pairs."""
        amounts = (1.0, num_decoded, num_tokens, num_pairs)
        return sum(rate * amount for rate, amount in zip(self._rates, amounts, strict=True))

    def observe(self, num_decoded: int, num_tokens: int, num_pairs: float, seconds: float) -> None:
        """Take in what a step took; more than 0 seconds."""
        if not self.known:  # the guess says nothing of the machine
            ratio = seconds / self.seconds(num_decoded, num_tokens, num_pairs)
            self._rates = [rate * ratio for rate in self._rates]
        elif num_tokens:
            rows = self.seconds(num_decoded)
            if seconds < rows:
                self._correct(0, (1.0, num_decoded), seconds, self._num_chunked)
            self._correct(2, (num_tokens, num_pairs), seconds - rows, self._num_chunked)
        else:
            self._correct(0, (1.0, num_decoded), seconds, self._num_decoding)
        self.largest = max(self.largest, num_tokens)
        self._num_chunked += num_tokens > 0
        self._num_decoding += num_tokens == 0

    def _correct(self, first: int, amounts: tuple[float, float], seconds: float, num_measured: int) -> None:
        """Correct the rates from index `first` on by what these amounts took together."""
        rates = self._rates[first : first + 2]
        parts = [rate * amount for rate, amount in zip(rates, amounts, strict=True)]
        ratio = min(max(seconds / sum(parts), 1 / MOST_AT_ONCE), MOST_AT_ONCE)
        few = num_measured < FIRST_FEW
        step = math.log(ratio) * (1.0 if few else WEIGHT_OF_SLOW if ratio > 1 else WEIGHT_OF_FAST)
        shares = [part / sum(parts) for part in parts]
        step /= sum(share * share for share in shares)
        for i, (rate, share) in enumerate(zip(rates, shares, strict=True)):
            self._rates[first + i] = rate * math.exp(step * share)

    def fitting(self, start: int, seconds: float) -> int:
        """The number of tokens behind `start` others that a chunk computes in this time."""
        per_token, per_pair = self._rates[2], self._rates[3]
        each = per_token + per_pair * start  # of the first; n tokens: each n + per_pair n n / 2
        return int(2 * seconds / (each + math.sqrt(each * each + 2 * per_pair * seconds)))


class EncoderRate:
    """The seconds that the encoder of pictures and sounds takes for each embedding of a medium in each layer.

    It is learnt from slices: an embedding stands for the parts of a picture that become one, and for what comes
    before the first layer and after the last.

    Attributes:
        largest: embeddings times layers of a slice, the most that were measured.
    """

    def __init__(self) -> None:
        self.largest = 0
        self._rate = 0.0
        self._num_measured = 0

    def observe(self, num_encoded: int, seconds: float) -> None:
        """Take in what a slice took; more than 0 seconds. num_encoded: its embeddings, times its layers."""
        rate = seconds / num_encoded
        if not self._num_measured:
            self._rate = rate
        ratio = min(max(rate / self._rate, 1 / MOST_AT_ONCE), MOST_AT_ONCE)
        few = self._num_measured < FIRST_FEW
        self._rate *= ratio ** (1.0 if few else WEIGHT_OF_SLOW if ratio > 1 else WEIGHT_OF_FAST)
        self.largest = max(self.largest, num_encoded)
        self._num_measured += 1

    def fitting(self, size: int, seconds: float) -> int:
        """The number of layers that run over `size` embeddings in this time; 0 before anything was measured."""
        if not self._num_measured:
            return 0
        return int(min(max(0.0, seconds) / self._rate, GROWTH * self.largest) / max(1, size))


class StepLimit:
    """Chooses the tokens of chunks so that a step ends in time while a sequence waits for a token.

    seconds: of a step; 0: there is no limit. block_size: tokens that a step computes of a prompt in any case.

    Attributes:
        rates: what steps take. encoder: what slices of its passes take.
        num_over: steps that took longer than the limit while a sequence got a token from them.
    """

    def __init__(self, seconds: float, block_size: int) -> None:
        self.rates = StepRates()
        self.encoder = EncoderRate()
        self.num_over = 0
        self._seconds, self._least = seconds, block_size

    def room(self, work: ChunkWork, sequence: Sequence, budget: int, running: Collection[Sequence]) -> int:
        """How many of the next tokens of a sequence may run in a step that has `work`; 0: none.

        budget: the most. running: all sequences that run. Of the first chunk of a step some may in any case.
        """
        count = min(sequence.num_to_compute, budget)
        if count <= 1 or not self._seconds or sequence.decodes:
            return count
        if not count_streams(work, running):
            return count
        if work.is_full:
            return 0
        most = self._fitting(work, sequence.computed)
        least = min(count, max(self._least, sequence.least_chunk))
        if most > self._least:
            most -= most % self._least
        if most < least:
            most = 0 if work.num_rows else least
        work.is_full = most < count
        return min(most, count)

    def _fitting(self, work: ChunkWork, start: int) -> int:
        """The number of tokens behind `start` others for which a step has time left."""
        if not self.rates.known:
            return 0
        grown = GROWTH * max(self.rates.largest, self._least) - work.num_tokens
        return min(self.rates.fitting(start, max(0.0, self._seconds_left(work))), grown)

    def _seconds_left(self, work: ChunkWork) -> float:
        """The time that a step has left; less than 0 if it takes too long already."""
        assert work.num_streams is not None, "they are counted first"
        rows = self.rates.seconds(work.num_streams)
        chunks = self.rates.seconds(work.num_streams, work.num_tokens, work.num_pairs) - rows
        return max(AIM * self._seconds - rows, LEAST_SHARE * rows) - chunks

    def applies(self, running: Collection[Sequence]) -> bool:
        """True if a sequence waits for a token that follows another one, so that the next step has to end in time.

        One that is at the end of its prompt may be there for want of a picture, and the step be its only chance.
        """
        return self._seconds > 0 and any(
            awaits_token(s) and s.computed >= s.num_prompt_tokens for s in running
        )

    def layers(self, work: ChunkWork, size: int, num_layers: int, running: Collection[Sequence]) -> int:
        """How many of the next `num_layers` layers of an encoder's pass may run in a step that has `work`; 0: none.

        size: embeddings of the medium. One layer may run in any case in a step without chunks.
        """
        count_streams(work, running)
        fitting = self.encoder.fitting(size, self._seconds_left(work)) if self.rates.known else 0
        count = min(num_layers, max(fitting, 0 if work.num_rows else 1))
        work.num_encoded = size * count
        return count

    def measure(
        self, work: ChunkWork, num_decoded: int, seconds: float, encoder_seconds: float = 0.0
    ) -> None:
        """Take in what the rows of a step took, and before them the encoder; 0 seconds: it is not known.

        num_decoded: tokens of rows that are no chunks.
        """
        if not self._seconds:
            return
        self.num_over += bool(num_decoded and seconds + encoder_seconds > self._seconds)
        if seconds > 0:
            self.rates.observe(num_decoded, work.num_tokens, work.num_pairs, seconds)
        if encoder_seconds > 0 and work.num_encoded:
            self.encoder.observe(work.num_encoded, encoder_seconds)


def pairs(start: int, num_tokens: int) -> float:
    """Pairs of one of `num_tokens` tokens and one that it attends to, with `start` tokens before them."""
    return num_tokens * (start + num_tokens / 2)


def count_streams(work: ChunkWork, running: Collection[Sequence]) -> int:
    """The number of sequences that wait for a token; counted once in a step."""
    if work.num_streams is None:
        work.num_streams = sum(map(awaits_token, running))
    return work.num_streams


def awaits_token(sequence: Sequence) -> bool:
    """True if a running sequence waits for its next token, and not for the end of its prompt."""
    return not sequence.pools and (sequence.num_pending > 0 or sequence.decodes)
