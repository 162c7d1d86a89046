"""Log probabilities as lists of dicts, and flat."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from pagewire.frontend.text.logprobs import (
    FlatLogprobs,
    Logprob,
    TokenTexts,
    add_rows,
    token_bytes,
    token_text,
)
from pagewire.frontend.text.tokenizer import Tokenizer
from tests.frontend.logprob_rows import rows

TWO = rows([[7, 5, 7], [9, 5, 6]], [[-1.5, -0.5, -1.5], [-4.0, -0.25, -2.0]], [2, 8])
POSITIONS: list[Any] = [
    {7: Logprob(-1.5, 2), 5: Logprob(-0.5, 1)},
    {9: Logprob(-4.0, 8), 5: Logprob(-0.25, 1), 6: Logprob(-2.0, 2)},
]


def test_the_token_itself_comes_first() -> None:
    positions: list[Any] = []
    assert add_rows(positions, TWO, TokenTexts(None)) == -5.5
    assert positions == POSITIONS
    assert [list(position) for position in positions] == [[7, 5], [9, 5, 6]]


def test_garbage_collections_pass_log_probabilities_by() -> None:
    """Hundreds of thousands of them would stop the server for a tenth of a second, again and again."""
    positions: list[Any] = []
    add_rows(positions, TWO, TokenTexts(None))
    for position in positions:
        assert not any(map(gc.is_tracked, (position, *position.values())))


def test_only_the_token_itself() -> None:
    positions: list[Any] = []
    add_rows(positions, rows([[7]], [[-1.0]], [3]), TokenTexts(None))
    assert positions == [{7: Logprob(-1.0, 3)}]


def test_some_rows() -> None:
    positions: list[Any] = []
    assert add_rows(positions, TWO, TokenTexts(None), 1) == -1.5
    assert positions == POSITIONS[:1]


def test_flat_logprobs_read_like_a_list() -> None:
    flat = FlatLogprobs()
    flat.append(None)
    add_rows(flat, TWO, TokenTexts(None))
    assert list(flat) == [None, *POSITIONS]
    assert len(flat) == 3 and flat[-1] == POSITIONS[1] and flat[0] is None
    assert flat.token_ids == [7, 5, 9, 5, 6] and flat.ranks == [2, 1, 8, 1, 2]
    assert (flat.start_indices, flat.end_indices) == ([0, 0, 2], [0, 2, 5])
    part = flat[1:]
    assert isinstance(part, FlatLogprobs) and list(part) == POSITIONS
    assert list(flat[::-1]) == [POSITIONS[1], POSITIONS[0], None]
    with pytest.raises(IndexError):
        flat[3]
    copy = FlatLogprobs()
    for position in flat:
        copy.append(position)
    assert copy == flat


def test_flat_logprobs_can_only_be_appended_to() -> None:
    flat = FlatLogprobs()
    for change in (
        lambda: flat.insert(0, None),
        lambda: flat.__setitem__(0, None),
        lambda: flat.__delitem__(0),
    ):
        with pytest.raises(TypeError, match="only be appended"):
            change()


def test_texts_of_tokens(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    for text in ("The", " ", "</s>", "two words"):
        (token_id,) = tokenizer.encode(text, add_special_tokens=False)
        assert token_text(tokenizer, token_id) == text
    positions: list[Any] = []
    add_rows(positions, TWO, TokenTexts(tokenizer))
    assert positions[0][7].decoded_token == tokenizer.decode([7])


@pytest.mark.parametrize("family", ["byte_level", "llama_2"])
def test_parts_of_characters_are_spelled_as_bytes(family: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[family]
    clef = tokenizer.encode("x𝄞", add_special_tokens=False)[-4:]
    assert [token_text(tokenizer, i) for i in clef] == ["<0xF0>", "<0x9D>", "<0x84>", "<0x9E>"]


@pytest.mark.parametrize("family", ["byte_level", "llama_2", "gemma", "unigram", "word_piece", "end_of_word"])
def test_a_token_has_the_space_that_it_adds_within_a_text(
    family: str, tokenizers: dict[str, Tokenizer]
) -> None:
    """Tokens that begin a word, and those of the same letters that continue one, have different texts."""
    tokenizer = tokenizers[family]
    ids = tokenizer.encode("The lazy dog jumps over the lazy dog", add_special_tokens=False)
    texts = [token_text(tokenizer, token_id) for token_id in ids]
    whole = "".join(texts)
    assert whole.strip() == tokenizer.decode(ids).strip() and whole.count(" ") >= 7, texts
    assert [token_bytes(tokenizer, token_id).decode() for token_id in ids] == texts


def test_words_and_their_continuations_are_different_texts(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["llama_2"]
    names = tokenizer.convert_ids_to_tokens(range(tokenizer.vocab_size))
    assert token_text(tokenizer, names.index("▁true")) == " true"
    assert token_text(tokenizer, names.index("true")) == "true"
    assert token_text(tokenizer, names.index("▁")) == " "
