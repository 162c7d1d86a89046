"""What steps cost: the time of a step by the number of tokens that it samples, as measured."""

from __future__ import annotations

from bisect import bisect_left

WEIGHT = 0.2  # of a new measurement
WEIGHT_OF_SLOW = (
    0.05  # of one that is longer than expected: what else a machine does makes steps longer, never shorter
)
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


class StepCosts:
    """The seconds of steps of one kind, as a function of their number of tokens.

    It is a level, which all sizes share and which follows contexts as they grow and a machine as it slows down, and
    a shape, which each size has by itself.
    """

    def __init__(self) -> None:
        self._level = 0.0
        self._classes: list[int] = []
        self._sizes: list[float] = []  # of each class, the mean of what was measured
        self._shapes: list[float] = []

    @property
    def known(self) -> bool:
        """True once a step was measured."""
        return bool(self._classes)

    def measured(self, num_tokens: int) -> bool:
        """True if steps of about this size were measured."""
        return size_class(num_tokens) in self._classes

    @property
    def smallest(self) -> float:
        """Tokens of the smallest steps that were measured."""
        return self._sizes[0]

    @property
    def largest(self) -> float:
        """Tokens of the largest steps that were measured."""
        return self._sizes[-1]

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take in the time of a step."""
        number = size_class(num_tokens)
        if not self._classes:
            self._level = seconds
        else:
            seconds = min(seconds, MOST_AT_ONCE * self.seconds(num_tokens))
        place = bisect_left(self._classes, number)
        if place == len(self._classes) or self._classes[place] != number:
            self._classes.insert(place, number)
            self._sizes.insert(place, float(num_tokens))
            self._shapes.insert(place, seconds / self._level)
            return
        factor = seconds / (self._level * self._shapes[place])
        weight = WEIGHT if factor < 1 else WEIGHT_OF_SLOW
        self._level *= factor**weight
        self._shapes[place] += weight * (seconds / self._level - self._shapes[place])
        self._sizes[place] += WEIGHT * (num_tokens - self._sizes[place])

    def seconds(self, num_tokens: float) -> float:
        """The time of a step; between sizes that were measured a line, beyond them as expected of any machine."""
        sizes, shapes = self._sizes, self._shapes
        place = bisect_left(sizes, num_tokens)
        if place == 0 or place == len(sizes):
            near = min(place, len(sizes) - 1)
            return self._level * shapes[near] * expected_growth(num_tokens, sizes[near])
        low = place - 1
        part = (num_tokens - sizes[low]) / (sizes[place] - sizes[low])
        return self._level * (shapes[low] + part * (shapes[place] - shapes[low]))
