"""Log probabilities in the forms of the two APIs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from pagewire.frontend.server.openai.logprobs import (
    CompletionLogprobsWriter,
    TokenNames,
    chat_logprobs,
    token_bytes,
)
from pagewire.frontend.text.logprobs import Logprob, token_text
from pagewire.frontend.text.tokenizer import Tokenizer, load_tokenizer

POSITIONS = [
    {7: Logprob(-3.0, 5, "b"), 8: Logprob(-0.5, 1, "c"), 9: Logprob(-1.0, 2, "d")},
    {8: Logprob(-math.inf, 1, "c"), 9: Logprob(-2.0, 2, "d")},
]


def test_completions() -> None:
    tokens = TokenNames(load_tokenizer("demo"), as_ids=False)
    writer = CompletionLogprobsWriter(tokens, top=1)
    part = writer.write([7, 8], POSITIONS)
    assert part.tokens == ["b", "c"] and part.text_offset == [0, 1]
    assert part.token_logprobs == [-3.0, -9999.0]
    assert part.top_logprobs == [{"b": -3.0, "c": -0.5}, {"c": -9999.0}]
    assert writer.write([9], [{9: Logprob(-1.0, 1, "dd")}]).text_offset == [2]
    first = writer.write([9, 9], [None, {9: Logprob(-1.0, 1, "dd")}])
    assert first.token_logprobs == [None, -1.0] and first.top_logprobs[0] is None
    assert first.tokens[0] == token_text(load_tokenizer("demo"), 9)


def test_chat() -> None:
    content = chat_logprobs(TokenNames(load_tokenizer("demo"), as_ids=True), [7, 8], POSITIONS, top=2).content
    assert content is not None
    assert [one.token for one in content] == ["token_id:7", "token_id:8"]
    assert [[top.token for top in one.top_logprobs] for one in content] == [
        ["token_id:8", "token_id:9"],
        ["token_id:8", "token_id:9"],
    ]
    assert content[1].logprob == -9999.0
    (bare,) = chat_logprobs(TokenNames(None, as_ids=False), [7], POSITIONS[:1], top=0).content or []
    assert (bare.token, bare.bytes, bare.top_logprobs) == ("token_id:7", None, [])


@pytest.mark.parametrize("text", ["Grüße, 你好 🦙!", "def f(x): return x"])
def test_bytes_join_to_the_text(
    text: str, tokenizers: dict[str, Tokenizer], folders: dict[str, Path]
) -> None:
    """Also where a character is several tokens."""
    checked = 0
    for tokenizer in [load_tokenizer("demo"), *tokenizers.values()]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if tokenizer.decoder is None or tokenizer.decode(ids) != text:
            continue  # one that does not give back what it takes
        joined = b"".join(token_bytes(tokenizer, token_id) for token_id in ids)
        if joined.decode(errors="replace").replace(" ", "") == text.replace(" ", ""):
            checked += 1
    assert checked
