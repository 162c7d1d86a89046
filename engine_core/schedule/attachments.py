"""What others keep with a sequence, as far as the scheduler reads it: grammar, adapter, media, tenant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pagewire.ipc.wire.codec import Tensor


class GrammarError(ValueError):
    """The grammar is invalid or not supported, or the output does not match it; the text says why."""


class GrammarPosition(Protocol):
    """How far a sequence has got in the grammar of its structured output; see `engine_core.grammar`.

    eos_token_ids: tokens that end a sequence where the grammar is complete.
    """

    eos_token_ids: tuple[int, ...]

    @property
    def complete(self) -> bool:
        """True if the grammar allows no further token."""

    def accept(self, token_id: int) -> None:
        """Advance by one token.

        Raises:
            GrammarError: the grammar does not allow the token, or has become too complex.
        """

    def num_fitting(self, token_ids: Sequence[int]) -> int:
        """How many of the tokens the grammar allows one after the other, up to the first that it does not."""

    def masks(self, drafts: Sequence[int]) -> list[bytes]:
        """The mask of the next token, then those behind each of `drafts`, up to the first that is not allowed.

        Raises:
            GrammarError: the next token has none.
        """


class ActiveAdapter(Protocol):
    """An adapter that a sequence runs with; see `engine_core.adapters`. index: its number on the workers."""

    index: int


class EncoderInput(Protocol):
    """What the model's encoder takes of a picture or a sound of a prompt; see `engine_core.media`."""

    @property
    def grid(self) -> Tensor:
        """int64 [n, 3] of a picture, from which positions follow; empty where tokens have one position."""


class Tenant(Protocol):
    """Whom a sequence is for, and what it was given; see `engine_core.tenants`.

    name: that the frontend has given; bytes: the frontend's identity, for requests without a name.
    num_requests, num_output_tokens: counts since the tenant is known.
    """

    name: str | bytes
    num_requests: int
    num_output_tokens: int

    def turn(self, rank: int) -> int:
        """The place in the tenant's order of a new request with `rank` sequences of its batch before it."""
