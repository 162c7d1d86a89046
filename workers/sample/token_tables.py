"""The tokens that parameters name, as tables that all sequences with equal parameters share.

A request may have a thousand prompts or 64 outputs, and parameters that name 16,384 tokens. Its sequences come with
one plan or with many, so tables are found by their content, for as long as a sequence has them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from weakref import WeakValueDictionary

import msgspec
import numpy as np
from numpy.typing import NDArray

from pagewire.ipc.wire.params import SamplingParams

TABLED = ("logit_bias", "allowed_token_ids", "bad_words_token_ids")  # parameters that tables are made of


class TokenTables:
    """The tokens of `allowed_token_ids`, `logit_bias`, bad words and stop tokens. They are never written to.

    Tokens outside the vocabulary are left out.

    allowed: int64 [n]; None: all tokens. bias_ids, biases: int64 [n] and float32 [n]. stop_ids: int64 [n].
    forbidden: int64 [n], the bad words of one token.
    endings: of longer bad words, by their last token but one: the tokens before the last, and the last.
    longest: the number of tokens before the last of the longest bad word.
    lasting: they may change the logits of any token of the output, unlike `stop_ids`.
    """

    def __init__(self, params: SamplingParams, stop_ids: Iterable[int], vocab_size: int) -> None:
        def array(ids: Iterable[int]) -> NDArray[np.int64]:
            return np.array([i for i in ids if 0 <= i < vocab_size], np.int64)

        self.allowed = None if params.allowed_token_ids is None else array(params.allowed_token_ids)
        bias = params.logit_bias or {}
        self.bias_ids = array(bias)
        self.biases = np.array([bias[i] for i in self.bias_ids.tolist()], np.float32)
        self.stop_ids = array(stop_ids)
        words = [word for word in params.bad_words_token_ids or () if word and 0 <= word[-1] < vocab_size]
        self.forbidden = array(word[0] for word in words if len(word) == 1)
        self.endings: dict[int, list[tuple[list[int], int]]] = {}
        for *before, last in words:
            if before:
                self.endings.setdefault(before[-1], []).append((before, last))
        self.longest = max(map(len, words), default=1) - 1
        bad_words = len(self.forbidden) > 0 or len(self.endings) > 0
        self.lasting = self.allowed is not None or len(self.bias_ids) > 0 or bad_words


_tables: WeakValueDictionary[bytes, TokenTables] = WeakValueDictionary()


def token_tables(params: SamplingParams, stop_ids: Sequence[int], vocab_size: int) -> TokenTables:
    """The tables of parameters and stop tokens for a vocabulary of this size: those that a sequence has already, or
    new ones."""
    content = [*(getattr(params, name) for name in TABLED), list(stop_ids), vocab_size]
    key = hashlib.sha256(msgspec.msgpack.encode(content)).digest()
    tables = _tables.get(key)
    if tables is None:
        tables = _tables[key] = TokenTables(params, stop_ids, vocab_size)
    return tables
