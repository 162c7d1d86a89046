"""Tokenization of texts that may be far too long for the model, in time and memory that depend on the model only.

A tokenizer takes some 250 bytes per character, and about a microsecond. So a text is refused by its characters, or
by the tokens of its first pieces, before all of it is tokenized. A text that is cut to its last tokens is tokenized
as a whole all the same: where a token begins depends on the text before it, on all of it if there are no words.
"""

from __future__ import annotations

from pagewire.frontend.text.tokenizer import Tokenizer
from pagewire.ipc.wire.budget import MAX_CHARS_PER_TOKEN, MIN_CHARS

PIECE_CHARS = 1 << 16  # characters tokenized at a time, to count the tokens of a long text
CUT_TOKENS = (
    256  # tokens by which a cut may change the count: a word that is one token in whole may be 100 in part
)
DENSE_CHARS = 6  # a text with fewer characters per token of the context length is tokenized at once


class ContextLengthError(ValueError):
    """A prompt is longer than the model's context length."""

    def __init__(self, max_model_len: int, what: str) -> None:
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. However, {what}: "
            f"the prompt is too long (max_model_len is {max_model_len})"
        )


def check_characters(num_chars: int, max_model_len: int) -> None:
    """Refuse a text that is too long to be tokenized for a model.

    Raises:
        ContextLengthError: it has over `MAX_CHARS_PER_TOKEN` characters for each token of the context length, and
            over `MIN_CHARS`.
    """
    limit = max(MIN_CHARS, MAX_CHARS_PER_TOKEN * max_model_len)
    if num_chars > limit:
        what = f"the prompt has {num_chars} characters, and at most {limit} are tokenized for it"
        raise ContextLengthError(max_model_len, what)


def check_text_length(tokenizer: Tokenizer, text: str, max_model_len: int) -> None:
    """Refuse a text that has clearly too many characters or tokens for a model; a few tokens are not noticed.

    Raises:
        ContextLengthError: the text is too long. TypeError, UnicodeError: it is not Unicode.
    """
    check_characters(len(text), max_model_len)
    if len(text) <= max(PIECE_CHARS, DENSE_CHARS * max_model_len):
        return
    count = 0
    for start in range(0, len(text), PIECE_CHARS):
        count += len(tokenizer.encode(text[start : start + PIECE_CHARS], False)) - CUT_TOKENS
        if count > max_model_len:
            what = f"the prompt of {len(text)} characters has more than {count} tokens"
            raise ContextLengthError(max_model_len, what)


def encode_within(
    tokenizer: Tokenizer,
    text: str,
    max_model_len: int,
    special: bool = True,
    truncates: bool = False,
    salt: str | None = None,
) -> list[int]:
    """Return the token ids of a prompt, unless it is clearly too long for a model.

    special: add the tokenizer's special tokens. salt: the prompt's cache salt.
    truncates: the prompt will be cut to the tokens at its end, so it may have more.

    Raises:
        As `check_text_length`.
    """
    check_characters(len(text), max_model_len)
    if not truncates:
        check_text_length(tokenizer, text, max_model_len)
    return tokenizer.encode_turn(text, special, salt)
