"""Tokenization for models that pool: of single texts and pairs, cut in time that depends on what is kept."""

from __future__ import annotations

from typing import Any, NamedTuple

from pagewire.frontend.text.length import CUT_TOKENS, check_text_length
from pagewire.frontend.text.tokenizer import FastTokenizer, Tokenizer
from pagewire.ipc.errors import FieldValueError

CHARS_PER_TOKEN = (
    8  # of the first part of a text that is tokenized to have enough tokens; doubled if it has not
)


class Encoded(NamedTuple):
    """Token ids with special tokens. second: the first token of type 1, of the second text of a pair; 0: none."""

    token_ids: list[int]
    second: int


def encode(
    tokenizer: Tokenizer, first: str, second: str | None, keep: int | None, max_model_len: int
) -> Encoded:
    """The tokens of a text or a pair, with the tokenizer's special tokens.

    keep: cut to this many tokens, special ones included, as sentence-transformers does: at the end of the text, or
    of the longer one of two. None: nothing is cut.

    Raises:
        ContextLengthError: nothing is cut, and a text is clearly too long. ValueError: `keep` leaves no room.
    """
    if keep is None:
        for text in (first, second):
            check_text_length(tokenizer, text or "", max_model_len)
        if second is None:
            return Encoded(tokenizer.encode(first), 0)
    else:
        first = take_beginning(tokenizer, first, keep)
        second = None if second is None else take_beginning(tokenizer, second, keep)
    if isinstance(tokenizer, FastTokenizer):
        return _encode_fast(tokenizer.original, first, second, keep)
    return _encode_slow(tokenizer.original, first, second, keep)


def take_beginning(tokenizer: Tokenizer, text: str, num_tokens: int) -> str:
    """The beginning of a text, long enough that its first `num_tokens` tokens are those of the whole text."""
    size = CHARS_PER_TOKEN * (num_tokens + CUT_TOKENS)
    while size < len(text):
        part = text[:size]
        if len(tokenizer.encode(part, False)) >= num_tokens + CUT_TOKENS:
            return part
        size *= 2
    return text


def _encode_fast(tokenizer: Any, first: str, second: str | None, keep: int | None) -> Encoded:
    parts = tokenizer.encode_batch_fast(
        [first] if second is None else [first, second], add_special_tokens=False
    )
    if keep is not None:
        room = keep - tokenizer.num_special_tokens_to_add(second is not None)
        if room < 1:
            raise FieldValueError(
                "truncate_prompt_tokens", f"={keep} leaves no room beside the special tokens"
            )
        for part, count in zip(parts, shares([len(part.ids) for part in parts], room), strict=True):
            part.truncate(count)
    whole = tokenizer.post_process(*parts, add_special_tokens=True)
    return Encoded(whole.ids, whole.type_ids.index(1) if 1 in whole.type_ids else 0)


def _encode_slow(tokenizer: Any, first: str, second: str | None, keep: int | None) -> Encoded:
    limit = {} if keep is None else {"truncation": "longest_first", "max_length": keep}
    whole = tokenizer(first, second, **limit)
    types = whole.get("token_type_ids") or []
    return Encoded(list(whole["input_ids"]), types.index(1) if 1 in types else 0)


def shares(lengths: list[int], room: int) -> list[int]:
    """How many tokens to keep of each of one or two texts: the longer one is cut first, then both alike.

    As the strategy "longest_first" of the tokenizers library.
    """
    if sum(lengths) <= room:
        return lengths
    if len(lengths) == 1:
        return [room]
    short, long = sorted(lengths)
    long = short if short > room else max(short, room - short)
    if short + long > room:
        short = room // 2
        long = short + room % 2
    return [short, long] if lengths[0] <= lengths[1] else [long, short]
