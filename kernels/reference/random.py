"""Counter-based random numbers: Philox4x32-10.

A number is a pure function of (seed, position, stage), so batching, preemption, recovery from a crash and chunking
never change a sampled token. There is no generator state.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))  # golden ratio, sqrt(3) - 1
ROUNDS = 10

LOW_32 = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
WORD_64 = 2**64 - 1


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Philox4x32-10 over rows.

    counter: uint64 [n, 4], key: uint64 [n, 2], both holding 32-bit words. Returns uint64 [n, 4] of 32-bit words.
    """
    c0, c1, c2, c3 = counter.T
    k0, k1 = key.T
    for _ in range(ROUNDS):
        p0, p1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2  # 32 x 32 -> 64 bits: never overflows
        c0, c1, c2, c3 = (p1 >> HALF) ^ c1 ^ k0, p1 & LOW_32, (p0 >> HALF) ^ c3 ^ k1, p0 & LOW_32
        k0, k1 = (k0 + KEY_STEPS[0]) & LOW_32, (k1 + KEY_STEPS[1]) & LOW_32
    return np.stack((c0, c1, c2, c3), axis=-1)


def uniform(seeds: Sequence[int], positions: Sequence[int], stage: int = 0) -> NDArray[np.float64]:
    """One number per (seed, position), float64 [n], strictly between 0 and 1.

    seeds: any integers, taken modulo 2**64. positions: 0 to 2**64 - 1. stage: 0 to 2**32 - 1, separates
    numbers for different purposes at one position. Values are odd multiples of 2**-53, so neither 0 nor 1 can occur
    and `value * 2**53` is an exact integer.
    """
    seed = np.array([s & WORD_64 for s in seeds], dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    counter = np.zeros((len(seed), 4), dtype=np.uint64)
    counter[:, 0], counter[:, 1], counter[:, 2] = position & LOW_32, position >> HALF, stage
    words = philox4x32(counter, np.stack((seed & LOW_32, seed >> HALF), axis=-1))
    bits = (words[:, 0] >> np.uint64(6) << np.uint64(26)) | (words[:, 1] >> np.uint64(6))  # 52 of 64
    return (bits * np.uint64(2) + np.uint64(1)).astype(np.float64) * 2.0**-53
