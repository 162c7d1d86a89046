"""Text to token ids and back, without transformers where a folder holds a `tokenizer.json`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Tokenizer(ABC):
    """What the frontend needs of a tokenizer.

    Attributes:
        vocab_size: number of ids, added tokens included.
        eos_token_id, bos_token_id: None where there is none.
        special_ids: ids of special tokens, which `skip_special_tokens` leaves out.
        special_tokens: "bos_token" and the like to their text, as chat templates see them.
        chat_template: the template, or named ones, or None.
        original: the object of the library that does the work.
    """

    vocab_size: int
    eos_token_id: int | None
    bos_token_id: int | None
    special_ids: frozenset[int]
    special_tokens: dict[str, Any]
    chat_template: str | dict[str, str] | None
    original: Any

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text."""

    @abstractmethod
    def decode(
        self,
        token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Text of the tokens."""

    @abstractmethod
    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str | None]:
        """The vocabulary's name of each token; None for an id without one."""


def load_tokenizer(
    name: str | Path,
    mode: str = "auto",
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    trust_remote_code: bool = False,
    cache_dir: str | None = None,
) -> Tokenizer:
    """The tokenizer of a folder, of a hub repository, or of the embedded model ("demo").

    Raises:
        ModelNotFoundError: no such folder or repository. ValueError: it holds no tokenizer, or a bad one.
    """
    raise NotImplementedError


def as_tokenizer(tokenizer: Any) -> Tokenizer:
    """Ours, from ours or from a tokenizer of transformers or tokenizers.

    Raises:
        TypeError: it is none of these.
    """
    raise NotImplementedError
