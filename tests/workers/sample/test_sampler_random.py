"""Philox4x32-10 against its published vectors, and the numbers made of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.kernels.reference.random import philox4x32, uniform

# Known answers that the authors publish with Random123 (counter, key, result).
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> np.ndarray:
    return np.array([int(word, 16) for word in text.split()], dtype=np.uint64)


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_answers(counter: str, key: str, result: str) -> None:
    np.testing.assert_array_equal(philox4x32(words(counter)[None], words(key)[None])[0], words(result))


def test_rows_do_not_mix() -> None:
    counters, keys = (np.stack([words(known[i]) for known in KNOWN]) for i in (0, 1))
    np.testing.assert_array_equal(philox4x32(counters, keys), np.stack([words(known[2]) for known in KNOWN]))


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
def test_uniform_is_a_fraction_of_2_to_the_53_between_0_and_1(seed: int, position: int, stage: int) -> None:
    (u,) = uniform([seed], [position], stage).tolist()
    assert 0 < u < 1 and (u * 2**53).is_integer()
    assert [u] == uniform([seed % 2**64], [position], stage).tolist()


def test_seed_position_and_stage_all_matter() -> None:
    base = (5, 9, 0)
    others = [(6, 9, 0), (5 + 2**32, 9, 0), (5, 10, 0), (5, 9 + 2**32, 0), (5, 9, 1)]
    draws = {float(uniform([seed], [position], stage)[0]) for seed, position, stage in [base, *others]}
    assert len(draws) == 6


def test_uniform_is_uniform_along_positions_and_along_seeds() -> None:
    n = 20_000
    for u in (uniform([1] * n, range(n)), uniform(range(n), [1] * n)):
        counts = np.histogram(u, bins=100, range=(0, 1))[0]
        assert ((counts - n / 100) ** 2 / (n / 100)).sum() < 99 + 5 * (2 * 99) ** 0.5
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 4 / n**0.5
