"""Sizes divided over ranks: every place is somebody's, and what cannot be divided is refused with what can."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.workers.errors import LoadError
from pagewire.workers.ranks.shares import Heads, width_span, width_spans


@given(st.integers(1, 5000), st.integers(1, 12))
def test_widths_are_divided_into_contiguous_shares(width: int, size: int) -> None:
    if width < size:
        with pytest.raises(LoadError, match=f"up to {width} ranks work"):
            width_spans(width, size)
        return
    spans = width_spans(width, size)
    assert [place for span in spans for place in span] == list(range(width))
    assert all(spans)


@pytest.mark.parametrize(
    ("width", "size", "expected"),
    [
        (1536, 2, [768, 768]),
        (11008, 4, [2752, 2752, 2752, 2752]),  # in units of 64: groups of 128 become smaller
        (896, 4, [224, 224, 224, 224]),  # in units of 32
        (1152, 2, [576, 576]),
        (1536, 5, [384, 384, 256, 256, 256]),  # uneven, between groups of 128
        (100, 2, [52, 48]),
        (50257, 2, [25129, 25128]),
    ],
)
def test_widths_fall_between_groups_where_they_can(width: int, size: int, expected: list[int]) -> None:
    assert [len(width_span(width, rank, size)) for rank in range(size)] == expected


@given(st.integers(1, 16), st.integers(1, 8), st.integers(2, 40))
def test_heads_are_divided_with_the_keys_that_they_use(num_kv: int, per_kv: int, size: int) -> None:
    heads = Heads(num_kv * per_kv, num_kv)
    if size not in heads.sizes:
        works = ", ".join(map(str, heads.sizes)) or "none"
        with pytest.raises(LoadError, match=f"ranks that work: {works}$"):
            heads.share(0, size)
        return
    shares = [heads.share(rank, size) for rank in range(size)]
    assert [head for query, _ in shares for head in query] == list(range(heads.num))
    for query, kv in shares:
        assert query and kv
        assert len(query) % len(kv) == 0
        own = [kv[place // (len(query) // len(kv))] for place in range(len(query))]
        assert own == [head // per_kv for head in query]


def test_few_heads_of_keys_are_repeated() -> None:
    assert Heads(8, 2).sizes == [2, 4, 6, 8]
    assert Heads(8, 2).share(3, 4) == (range(6, 8), range(1, 2))
    assert Heads(9, 3).share(0, 2) == (range(6), range(2))
