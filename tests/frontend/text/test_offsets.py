"""Offsets of tokens in the text of an output."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.frontend.text.logprobs import token_text
from pagewire.frontend.text.offsets import TextOffsets, prompt_offsets
from pagewire.frontend.text.tokenizer import Tokenizer
from tests.frontend import trained

FAMILIES = sorted(trained.FAMILIES)


def offsets(tokenizer: Tokenizer, token_ids: list[int], start: int = 0) -> list[int]:
    places = TextOffsets(tokenizer, start)
    return [places.feed(token_id) for token_id in token_ids]


@pytest.mark.parametrize("family", ["llama_2", "gemma", "byte_level"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x𝄞y", [0, 1, 1, 1, 1, 2]),
        ("𝄞𝄞", [0, 0, 0, 0, 1, 1, 1, 1]),
        ("x𝄞x𝄞", [0, 1, 1, 1, 1, 2, 3, 3, 3, 3]),
    ],
)
def test_the_tokens_of_a_split_character_begin_where_it_begins(
    family: str, text: str, expected: list[int], tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[family]
    ids = tokenizer.encode(text, add_special_tokens=False)
    ids = ids[len(ids) - len(expected) :]  # without a space before the text
    decoded = tokenizer.decode(ids)
    space = len(decoded) - len(decoded.lstrip())
    assert (
        decoded.lstrip() == text and [place - space for place in offsets(tokenizer, ids)][1:] == expected[1:]
    )


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=50)
@given(data=st.data(), start=st.integers(0, 5))
def test_offsets_grow_and_stay_in_the_text(
    family: str, tokenizers: dict[str, Tokenizer], data: st.DataObject, start: int
) -> None:
    """Whatever the tokens are, also those that are not UTF-8."""
    tokenizer = tokenizers[family]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    places = offsets(tokenizer, ids, start)
    assert places == sorted(places) and len(places) == len(ids)
    assert not places or places[0] == start
    assert all(place <= start + len(tokenizer.decode(ids)) for place in places)


@pytest.mark.parametrize("family", ["byte_level", "llama_2", "gemma", "unigram", "unknown_decoder"])
def test_the_text_between_two_offsets_is_the_tokens_own(
    family: str, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[family]
    ids = tokenizer.encode("The lazy dog jumps over the lazy dog", add_special_tokens=False)
    text, places = tokenizer.decode(ids), offsets(tokenizer, ids)
    pieces = [text[a:b] for a, b in zip(places, [*places[1:], len(text)], strict=True)]
    assert pieces[1:] == [token_text(tokenizer, token_id) for token_id in ids[1:]]
    assert pieces[0] == token_text(tokenizer, ids[0])[len(token_text(tokenizer, ids[0])) - len(pieces[0]) :]


@pytest.mark.parametrize("family", ["byte_level", "llama_2"])
def test_special_tokens_that_a_prompt_is_given_are_not_in_its_text(
    family: str, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer, text = tokenizers[family], "The lazy dog"
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    places = prompt_offsets(tokenizer, ids, text)
    assert places[:2] == [0, 0] and places[1:] == offsets(tokenizer, ids[1:])
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    assert prompt_offsets(tokenizer, ids, whole)[:2] == [0, 3]
    assert prompt_offsets(None, ids, "") == [0] * len(ids)
