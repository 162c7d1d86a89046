"""Compiled grammars, and how far one sequence has got in its grammar.

Accepting a token and computing a mask take microseconds, so the core does both between two steps.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagewire.engine_core.schedule.attachments import GrammarError

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Patterns in llguidance's messages, and what users read instead.
ERROR_REWRITES = (
    (r"Unimplemented keys: \[(.*)\]", r"not supported: \1"),
    (r"Unknown format: (.*)", r"format: \1 is not supported"),
    (
        r"Resource '(.*)' is not present in a registry.*",
        r"$ref: \1 is not in the schema, and references are never fetched",
    ),
    (r"oneOf constraints .*", "oneOf is not supported if its schemas may overlap: use anyOf"),
)
DEAD_END = "NoExtension"  # in llguidance's message if no token of the vocabulary goes on
MASK_ALLOWANCE = 0.0005  # processor time of a mask, in seconds, that is not counted: most take a tenth of it
SHARE = 0.4  # of all time, which the masks of a grammar may take beyond that for as long as they like
MAX_EXCESS_SECONDS = 0.5  # that they may take beyond both: others wait as long
MEASURED = 8  # one mask in so many is measured and counts for all: measuring takes a part of a mask's time
# Less growth by a mask is not counted: a few pages come again each time that spare memory was given back, which
# would add up under a grammar that is used for days. Most of what grammars grow by comes in larger pieces.
NOTED_BYTES = 16 << 10
PAGE_BYTES = resource.getpagesize()
MAX_ERROR_CHARS = 1000  # of llguidance's messages, which repeat the grammar


class Matcher:
    """The position of one sequence in its grammar. It depends on the tokens alone, so it can be rebuilt from them.

    ignore_eos: end-of-sequence tokens (`eos_token_ids`) are not allowed where the grammar is complete.
    grammar: keeps the grammar's memory counted for as long as a sequence uses it.
    """

    def __init__(self, grammar: Grammar, state: LLMatcher, ignore_eos: bool) -> None:
        self.grammar, self._state, self._ignore_eos = grammar, state, ignore_eos
        self._mask_bytes = -(-grammar.vocab_size // 32) * 4
        self.eos_token_ids = grammar.eos_token_ids

    @property
    def complete(self) -> bool:
        """True if the grammar allows no further token."""
        return self._state.is_stopped()

    def accept(self, token_id: int) -> None:
        """Advance by one token.

        Raises:
            GrammarError: the grammar does not allow the token, or has become too complex.
        """
        if not self._state.consume_token(token_id):
            raise GrammarError(f"token {token_id} does not fit the grammar: {failure_reason(self._state)}")

    def num_fitting(self, token_ids: Sequence[int]) -> int:
        """How many of the tokens the grammar allows one after the other, up to the first that it does not."""
        return self._state.validate_tokens(list(token_ids))

    def masks(self, drafts: Sequence[int]) -> list[bytes]:
        """The mask of the next token, then those behind each of `drafts`, up to the first that is not allowed.

        Raises:
            GrammarError: as `mask`, for the next token.
        """
        masks = [self.mask()]
        if not drafts:
            return masks
        ahead = Matcher(self.grammar, self._state.deep_copy(), self._ignore_eos)
        with suppress(GrammarError):
            for draft in drafts:
                ahead.accept(draft)
                if ahead.complete:
                    break
                masks.append(ahead.mask())
        return masks

    def mask(self) -> bytes:
        """The allowed next tokens: bit i % 8 of byte i // 8 is set if token i is. Padded to whole 32-bit words.

        Raises:
            GrammarError: no token is allowed, or the grammar has become too complex.
        """
        grammar = self.grammar
        if grammar.evicted:
            raise GrammarError(
                "the grammar has become too complex: there is no memory for its further growth"
            )
        grammar.masks_time.check()
        clock = grammar.masks_time.clock
        grammar.num_masks += 1
        measured = not grammar.num_masks % MEASURED
        touched = touched_bytes() if measured else 0
        begin = clock()
        bitmask = self._state.compute_bitmask()
        grammar.masks_time.add(clock() - begin)
        if measured and (grown := touched_bytes() - touched - len(bitmask)) >= NOTED_BYTES:
            grammar.num_bytes += MEASURED * grown
        if self._state.is_error():
            raise GrammarError(f"the grammar allows no next token: {failure_reason(self._state)}")
        mask = bytearray(bitmask[: self._mask_bytes].ljust(self._mask_bytes, b"\0"))
        if self._ignore_eos:
            for token_id in self.eos_token_ids:
                mask[token_id // 8] &= ~(1 << token_id % 8)
        return bytes(mask)


class MasksTime:
    """The processor time that a grammar's masks have taken beyond what it may have, in seconds.

    It leaks away like water from a bucket, at `SHARE` of the time that passes. So one sequence may need a few
    milliseconds for each of its tokens, but hundreds of them under one such grammar cannot hold up the others.

    clock: processor time of the calling thread. wall: the time that passes.
    """

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self.clock, self._wall = clock, wall
        self.excess = 0.0
        self._counted_at = wall()

    def add(self, seconds: float) -> None:
        """Count a mask."""
        now = self._wall()
        self.excess = max(0.0, self.excess - SHARE * (now - self._counted_at))
        self.excess += max(0.0, seconds - MASK_ALLOWANCE)
        self._counted_at = now

    def check(self) -> None:
        """Refuse further masks if there is no time left; raises GrammarError."""
        if self.excess > MAX_EXCESS_SECONDS:
            raise GrammarError(
                "the grammar has become too complex: to find the allowed next tokens of its requests took "
                f"{self.excess:.1f} s more than {SHARE:.0%} of the time"
            )


@dataclass(eq=False)
class Grammar:
    """A compiled grammar for one vocabulary.

    num_bytes: memory that it takes, with all its matchers. It grows: llguidance keeps the states of its lexer that
        masks have needed, of which some grammars have thousands, for as long as the grammar lives.
    num_masks: computed so far.
    masks_time: of all its sequences together, since they make the same core wait.
    evicted: there is no memory for it any more: its sequences end.
    """

    start: LLMatcher
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    masks_time: MasksTime
    num_bytes: int = 0
    num_masks: int = 0
    evicted: bool = False

    def matcher(self, token_ids: Sequence[int] = (), ignore_eos: bool = False) -> Matcher:
        """The matcher of a sequence that has generated `token_ids`.

        Raises:
            GrammarError: the grammar does not allow them.
        """
        matcher = Matcher(self, self.start.deep_copy(), ignore_eos)
        for token_id in token_ids:
            matcher.accept(token_id)
        return matcher


def touched_bytes() -> int:
    """Memory that this thread was the first to write to, so far: what is freed meanwhile is not taken away.

    malloc's memory comes page by page where huge pages are not forced on a process.
    """
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt * PAGE_BYTES


def failure_reason(state: LLMatcher) -> str:
    """The error message of a failed matcher, without llguidance's dump of its state."""
    text = state.get_error().partition("<non-verbose/>")[0][:MAX_ERROR_CHARS]
    for pattern, better in ERROR_REWRITES:
        text = re.sub(pattern, better, text, flags=re.DOTALL)
    return text.strip()
