"""What n-grams and suffixes propose, against a search that compares everything with everything."""

from __future__ import annotations

from array import array
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.engine_core.drafting import suffix, token_index
from pagewire.engine_core.drafting.draft import Source
from pagewire.engine_core.drafting.ngram import NgramDrafter, NgramSource
from pagewire.engine_core.drafting.suffix import History, SuffixDrafter
from pagewire.engine_core.drafting.token_index import TokenIndex

texts = st.lists(st.integers(0, 3), max_size=60)


@settings(deadline=None)  # however slow the machine
@given(texts, st.integers(1, 5), st.lists(st.integers(1, 9), max_size=12))
def test_an_index_that_grows_finds_every_place(text: list[int], width: int, steps: list[int]) -> None:
    grown: list[int] = []
    index = TokenIndex(grown, width)
    for step in [*steps, len(text)]:
        grown += text[len(grown) : len(grown) + step]
        assert index.update()
        gram = grown[-width:]
        ends = range(len(grown), width - 1, -1)
        places = [end for end in ends if grown[end - width : end] == gram]
        assert list(index.places(gram, 1000)) == places
        assert list(index.earlier(1000)) == [place for place in places if place < len(grown)]


def test_a_text_is_taken_in_by_portions_and_outgrows_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_index, "PORTION", 100)
    monkeypatch.setattr(token_index, "SMALLEST_TABLE", 16)
    text = [i % 7 for i in range(450)]
    index = TokenIndex(text, 3)
    assert [index.update() for _ in range(5)] == [False] * 4 + [True]
    assert next(index.places(text[-3:], 10)) == 450
    text += text
    assert [index.update() for _ in range(5)] == [False] * 4 + [True]  # the table has room for twice as many
    text += text
    assert [index.update() for _ in range(18)] == [False] * 17 + [True]  # all of it anew
    assert sum(1 for _ in index.places(text[-3:], 1 << 20)) == sum(
        text[i : i + 3] == text[-3:] for i in range(len(text) - 2)
    )


def longest_match(tokens: list[int], shortest: int) -> tuple[int, int]:
    """The length of the longest n-gram at the end that stands elsewhere, and the latest position behind it."""
    for length in range(len(tokens), shortest - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                return length, end
    return 0, 0


@settings(deadline=None)  # however slow the machine
@given(st.lists(st.integers(0, 2), max_size=30), st.integers(1, 3), st.integers(0, 3), st.integers(1, 12))
def test_the_longest_match_is_continued(tokens: list[int], shortest: int, more: int, limit: int) -> None:
    source = NgramSource(tokens, shortest, shortest + more)
    length, place = longest_match(tokens, shortest)
    draft = source.propose(limit)
    if not length:
        assert draft is None
        return
    continued = list(tokens)
    for i in range(limit):
        continued.append(continued[place + i])
    assert draft is not None and draft.token_ids == continued[len(tokens) :]
    assert len(draft.chances) == limit and all(0 < chance < 1 for chance in draft.chances)
    assert draft.chances == sorted(draft.chances)


def test_a_longer_match_is_surer() -> None:
    short = NgramSource([1, 2, 3, 9, 2, 3], 2, 5).propose(1)
    long = NgramSource([0, 1, 2, 3, 9, 0, 1, 2, 3], 2, 5).propose(1)
    assert short is not None and long is not None
    assert short.token_ids == long.token_ids == [9] and short.chances < long.chances


def test_the_likeliest_continuation_is_taken_and_its_length_follows_its_probability() -> None:
    drafter = SuffixDrafter()
    for last in (4, 4, 4, 5):
        drafter.learn([1, 2, 3, last, 6, 6, 6])
    draft = drafter.open([9, 2, 3], shared=True).propose(9)
    assert draft is not None and draft.token_ids[:4] == [4, 6, 6, 6]
    sure = drafter.open([9, 1, 2, 3, 4], shared=True).propose(9)
    assert sure is not None and sure.chances[0] > draft.chances[0]
    random = Random(1)
    for _ in range(20):
        drafter.learn([7, 8, random.randrange(100, 10_000)])
    unsure = drafter.open([0, 7, 8], shared=True).propose(9)
    assert unsure is None or len(unsure.token_ids) <= 1


def test_only_shared_sequences_see_what_others_have_generated() -> None:
    drafter = SuffixDrafter()
    drafter.learn([1, 2, 3, 4, 5])
    assert drafter.open([1, 2, 3], shared=True).propose(4) is not None
    assert drafter.open([1, 2, 3], shared=False).propose(4) is None


@settings(deadline=None)  # however slow the machine
@given(st.lists(texts, max_size=8), st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(1, 9))
def test_suffix_drafts_occur_where_they_come_from(past: list[list[int]], own: list[int], limit: int) -> None:
    drafter = SuffixDrafter()
    for output in past:
        drafter.learn(output)
    draft = drafter.open(own, shared=True).propose(limit)
    if draft is None:
        return
    assert 1 <= len(draft.token_ids) == len(draft.chances) <= limit
    assert all(0 <= token_id <= 3 for token_id in draft.token_ids)
    first = [*own[-2:], draft.token_ids[0]]
    assert any(text[i : i + 3] == first for text in [*past, own] for i in range(len(text)))


def test_the_history_is_bounded_and_drops_the_oldest() -> None:
    history = History(1000)
    drafter = SuffixDrafter(history)
    random = Random(2)
    for _ in range(300):
        drafter.learn([random.randrange(50_000) for _ in range(random.randrange(1, 400))])
        assert history.num_tokens <= 2 * 1001 and len(history.halves) <= 2
    kept = list(history.halves[0].text)
    drafter.learn(list(range(5000)))  # longer than a half: its end counts
    assert history.num_tokens <= 2 * 1001
    assert list(history.halves[0].text)[-2:] == [4999, suffix.SEPARATOR] and kept


def num_bytes(history: History) -> int:
    """What a history takes, by its arrays."""
    arrays: list[array[int]] = []
    for half in history.halves:
        assert isinstance(half.text, array)
        arrays.append(half.text)
        for index in half.indexes:
            arrays += (index._latest, index._previous)
    return sum(len(each) * each.itemsize for each in arrays)


def test_an_hour_of_traffic_takes_no_more_memory_than_ten_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty requests a second of 100 tokens; a sixtieth of the traffic, and of the history."""
    num_tokens = suffix.HISTORY_TOKENS // 60
    history = History(num_tokens)
    drafter = SuffixDrafter(history)
    monkeypatch.setattr(token_index, "PORTION", 1 << 30)
    random = Random(3)
    outputs = [[random.randrange(50_000) for _ in range(100)] for _ in range(500)]
    sizes = []
    for _ in range(60):
        for _ in range(60):
            drafter.learn(random.choice(outputs))
        drafter.open([1, 2, 3], shared=True).propose(8)
        sizes.append(num_bytes(history))
    assert max(sizes) <= 48 * 2 * num_tokens
    assert max(sizes[10:]) <= 1.1 * max(sizes[:10])


@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_a_token_costs_the_same_at_any_length(name: str) -> None:
    """Counted in steps of the index, not in time: nothing is indexed twice but for tables that were outgrown."""
    tokens = [Random(4).randrange(100) for _ in range(3000)]
    drafter = NgramDrafter(2, 5) if name == "ngram" else SuffixDrafter()
    source: Source = drafter.open(tokens, shared=False)
    source.propose(4)
    indexes = source._indexes if isinstance(source, NgramSource) else source._own.indexes  # type: ignore[attr-defined]
    before = [len(index._previous) for index in indexes]
    tokens.append(5)
    source.propose(4)
    assert [len(index._previous) for index in indexes] == [number + 1 for number in before]
