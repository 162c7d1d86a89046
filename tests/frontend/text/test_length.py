"""How much of a text is tokenized before it is known to be too long."""

from __future__ import annotations

import pytest

from pagewire.frontend.text import length
from pagewire.frontend.text.length import ContextLengthError, check_characters, encode_within
from pagewire.frontend.text.tokenizer import LONG_TEXT, FastTokenizer, Tokenizer
from pagewire.ipc.wire.budget import MAX_CHARS_PER_TOKEN, MIN_CHARS
from tests.frontend import trained

DENSE = "a b c d e f g h "


class Counting(FastTokenizer):
    """A tokenizer that counts the characters that it tokenizes."""

    num_chars = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.num_chars += len(text)
        return super().encode(text, add_special_tokens)


@pytest.fixture
def counting(tokenizers: dict[str, Tokenizer]) -> Counting:
    tokenizer = tokenizers["byte_level"]
    assert isinstance(tokenizer, FastTokenizer)
    return Counting(tokenizer.original)


def test_a_text_with_too_many_characters_is_not_tokenized_at_all(counting: Counting) -> None:
    for truncates in (False, True):
        with pytest.raises(ContextLengthError, match=f"{MIN_CHARS + 1} characters, and at most {MIN_CHARS}"):
            encode_within(counting, "x" * (MIN_CHARS + 1), 100, truncates=truncates)
    assert counting.num_chars == 0
    check_characters(MAX_CHARS_PER_TOKEN * 100_000, 100_000)
    with pytest.raises(ContextLengthError):
        check_characters(MAX_CHARS_PER_TOKEN * 100_000 + 1, 100_000)


def test_a_dense_text_is_tokenized_only_until_it_is_too_long(counting: Counting) -> None:
    text = DENSE * (MIN_CHARS // len(DENSE))
    with pytest.raises(ContextLengthError, match=r"maximum context length is 100 .* more than") as caught:
        encode_within(counting, text, 100)
    assert "the prompt is too long" in str(caught.value)
    assert counting.num_chars == length.PIECE_CHARS


def test_a_text_that_is_to_be_truncated_is_tokenized(counting: Counting) -> None:
    text = DENSE * (MIN_CHARS // len(DENSE))
    assert encode_within(counting, text, 100, truncates=True) == FastTokenizer.encode(counting, text)


@pytest.mark.parametrize("family", sorted(trained.FAMILIES))
def test_no_text_that_fits_is_refused(
    family: str, tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it is cut: in a word, in a run of spaces, before a special token, between a letter and its accent.

    An eighth of the tokens that are allowed for a cut is enough.
    """
    monkeypatch.setattr(length, "CUT_TOKENS", length.CUT_TOKENS // 8)
    monkeypatch.setattr(length, "DENSE_CHARS", 0)
    tokenizer = tokenizers[family]
    text = ("The  quick brown fox " + " " * 40 + "jumps. <s>e\u0301 ééé 你好" + "x" * 25) * 4
    fits = tokenizer.encode(text)
    for piece in range(16, 300, 7):
        monkeypatch.setattr(length, "PIECE_CHARS", piece)
        assert encode_within(tokenizer, text, len(fits)) == fits


@pytest.mark.parametrize("family", sorted(trained.FAMILIES))
def test_a_long_text_has_the_tokens_of_the_library(family: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer, text = tokenizers[family], "The quick brown fox, é 你好  jumps. <s>" * 150
    assert isinstance(tokenizer, FastTokenizer) and len(text) > LONG_TEXT
    for special in (True, False):
        expected = tokenizer.original.encode(text, add_special_tokens=special).ids
        assert tokenizer.encode(text, special) == expected
