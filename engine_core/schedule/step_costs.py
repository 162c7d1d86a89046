"""What steps cost: the time of a step by the number of tokens that it samples, as measured.

What else a machine does makes a step longer, never shorter, and the first step of a kind also pays what is paid
only once (pages that are touched first, a drafter that takes in the prompt). So the first few measurements of
anything count as their least, and later ones that are longer than expected count less than those that are shorter.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from operator import attrgetter

FIRST_FEW = 3  # measurements that count as their least: one may be slow by chance, hardly three in succession
WEIGHT = 0.2  # of a new measurement in the running mean
WEIGHT_OF_SLOW = 0.05  # of a new measurement that is longer than expected
MOST_AT_ONCE = 2.0  # and it counts as at most this many times what is expected
KNEE = 16  # tokens up to which a size that was never measured is expected to cost little more than one token


def size_class(num_tokens: int) -> int:
    """Sizes that are measured together: each by itself up to 8, then four for each power of two."""
    if num_tokens <= 8:
        return num_tokens
    shift = num_tokens.bit_length() - 3
    return num_tokens >> shift << shift


def expected_growth(num_tokens: float, other: float) -> float:
    """How much longer a step of `num_tokens` takes than one of `other`, before either says more: a + b n."""
    return (KNEE + num_tokens) / (KNEE + other)


@dataclass(slots=True)
class SizeCost:
    """What steps of about one size take. tokens: the mean of their sizes. shape: of the level of all sizes."""

    tokens: float
    shape: float
    num_measured: int = 1


class StepCosts:
    """The seconds of steps of one kind, as a function of their number of tokens.

    It is a level, which all sizes share and which follows contexts as they grow and a machine as it slows down, and
    a shape, which each size has by itself. A size counts once it was measured a few times; before any was, all do.
    """

    def __init__(self) -> None:
        self._level = 0.0
        self._classes: dict[int, SizeCost] = {}
        self._line: list[SizeCost] = []  # those that count, by size

    @property
    def known(self) -> bool:
        """True once a step was measured."""
        return bool(self._classes)

    def settled(self, num_tokens: int) -> bool:
        """True if steps of about this size were measured a few times."""
        cost = self._classes.get(size_class(num_tokens))
        return cost is not None and cost.num_measured >= FIRST_FEW

    @property
    def smallest(self) -> float:
        """Tokens of the smallest steps that count."""
        return self._line[0].tokens

    @property
    def largest(self) -> float:
        """Tokens of the largest steps that count."""
        return self._line[-1].tokens

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take in the time of a step."""
        number = size_class(num_tokens)
        cost = self._classes.get(number)
        if cost is None:
            self._level = self._level or seconds
            self._classes[number] = SizeCost(float(num_tokens), seconds / self._level)
            self._arrange()
            return
        cost.num_measured += 1
        cost.tokens += WEIGHT * (num_tokens - cost.tokens)
        factor = min(seconds / (self._level * cost.shape), MOST_AT_ONCE)
        if cost.num_measured <= FIRST_FEW:
            cost.shape *= min(factor, 1.0)
            self._arrange()
            return
        weight = WEIGHT if factor < 1 else WEIGHT_OF_SLOW
        seconds = factor * self._level * cost.shape
        self._level *= factor**weight
        cost.shape += weight * (seconds / self._level - cost.shape)

    def _arrange(self) -> None:
        """Choose the sizes that count."""
        sizes = sorted(self._classes.values(), key=attrgetter("tokens"))
        self._line = [cost for cost in sizes if cost.num_measured >= FIRST_FEW] or sizes

    def seconds(self, num_tokens: float) -> float:
        """The time of a step; between sizes that count a line, beyond them as expected of any machine."""
        line = self._line
        place = bisect_left(line, num_tokens, key=attrgetter("tokens"))
        if place == 0 or place == len(line):
            near = line[min(place, len(line) - 1)]
            return self._level * near.shape * expected_growth(num_tokens, near.tokens)
        low, high = line[place - 1], line[place]
        part = (num_tokens - low.tokens) / (high.tokens - low.tokens)
        return self._level * (low.shape + part * (high.shape - low.shape))
