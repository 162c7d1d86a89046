"""Bounds that are checked at the door and in the core."""

from __future__ import annotations

import pytest

from pagewire.ipc.bounds import check_num_logprobs


@pytest.mark.parametrize(
    ("number", "most", "allowed"),
    [
        (None, 0, True),
        (20, 20, True),
        (21, 20, False),
        (-1, -1, True),
        (-1, 100, True),  # the whole vocabulary
        (-1, 99, False),
        (1000, 100, True),
        (1000, 99, False),
    ],
)
def test_minus_one_asks_for_the_vocabulary(number: int | None, most: int, allowed: bool) -> None:
    if allowed:
        check_num_logprobs("logprobs", number, most, vocab_size=100)
    else:
        with pytest.raises(
            ValueError, match=f"logprobs={number}.* is over this engine's max_logprobs={most}"
        ):
            check_num_logprobs("logprobs", number, most, vocab_size=100)
