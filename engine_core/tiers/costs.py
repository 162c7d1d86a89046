"""Whether reading a prefix from a cold tier is cheaper than computing it again, by what both have cost so far."""

from __future__ import annotations

MIN_BLOCKS = 4  # a message to the worker and back costs more than computing less
WEIGHT = 0.2  # of the newest measurement
RETRY = 16  # every so many prefixes that would be computed one is read, so that reading is measured again


class ReadCosts:
    """Running means of what a token of a prompt takes to compute, and a byte to read from disk, to fetch from
    another core, or to copy from the swap space, in seconds; 0: unknown.

    block_size: tokens of a block. block_bytes, state_bytes: of a block, and of the states behind one, if the model
    keeps any.
    """

    def __init__(self, block_size: int, block_bytes: int = 1, state_bytes: int = 0) -> None:
        self.compute_seconds = self.read_seconds = self.fetch_seconds = self.swap_seconds = 0.0
        self._block_size, self._num_declined = block_size, 0
        self._block_bytes, self._state_bytes = block_bytes, state_bytes

    def measure_step(self, num_tokens: int, num_prompt_tokens: int, seconds: float) -> None:
        """Take a step's time into account, if it ran prompts above all."""
        if num_prompt_tokens > num_tokens // 2 and num_prompt_tokens >= self._block_size:
            self.compute_seconds = mean(self.compute_seconds, seconds / num_tokens)

    def measure_read(self, num_bytes: int, seconds: float) -> None:
        """Take the time that bytes took to read from disk into account."""
        if num_bytes:
            self.read_seconds = mean(self.read_seconds, seconds / num_bytes)

    def measure_fetch(self, num_bytes: int, seconds: float) -> None:
        """Take the time that bytes took to come from another core into account."""
        if num_bytes:
            self.fetch_seconds = mean(self.fetch_seconds, seconds / num_bytes)

    def measure_swap(self, num_bytes: int, seconds: float) -> None:
        """Take the time that bytes took to be copied from the swap space into account."""
        if num_bytes:
            self.swap_seconds = mean(self.swap_seconds, seconds / num_bytes)

    def bytes_of(self, state: bool) -> int:
        """Bytes of a block, or of the states behind one."""
        return self._state_bytes if state else self._block_bytes

    def compute(self, num_blocks: int) -> float:
        """Seconds that blocks of a prompt take to compute; 0: unknown."""
        return self.compute_seconds * self._block_size * num_blocks

    def asks(self, num_blocks: int) -> bool:
        """True if a prefix lacks enough blocks for other cores to be asked for them. num_blocks: that it lacks."""
        return num_blocks >= MIN_BLOCKS

    def reads(
        self,
        num_blocks: int,
        num_saved: int,
        *,
        state: bool = False,
        num_fetched: int = 0,
        num_swapped: int = 0,
    ) -> bool:
        """True if a part of a prefix is to be read.

        num_blocks: of it, in the tiers alone; state: the states behind it, too. num_fetched: of these blocks and
        states, those that other cores have. num_swapped: those in the swap space.
        num_saved: blocks that need not be computed then.
        """
        if num_saved < MIN_BLOCKS:
            return False
        num_bytes = num_blocks * self._block_bytes + (self._state_bytes if state else 0)
        fetched, swapped = (number / (num_blocks + state) for number in (num_fetched, num_swapped))
        each = fetched * self.fetch_seconds + swapped * self.swap_seconds
        seconds = num_bytes * (each + (1 - fetched - swapped) * self.read_seconds)
        compute_seconds = self.compute(num_saved)
        if not compute_seconds or seconds < compute_seconds:
            return True
        self._num_declined += 1
        return self._num_declined % RETRY == 0


def mean(old: float, new: float) -> float:
    """A running mean with one more value."""
    return new if not old else old + WEIGHT * (new - old)
