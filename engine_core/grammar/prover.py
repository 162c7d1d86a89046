"""Proves that a grammar can be compiled within limits, in a process that may be lost.

Compiled grammars cannot move between processes, so the core compiles them again once they are proven: what was done
within a quarter of the core's stack, and within limits of time and memory, is known to end there as well.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import resource
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from pagewire.engine_core.grammar.compile import compile_text, grammar_text, load_tokenizer
from pagewire.engine_core.grammar.matcher import Grammar, GrammarError
from pagewire.ipc.confined import Confined, Handler, JobKilledError, JobTimeoutError, Limits, serve
from pagewire.ipc.params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_GRAMMAR_BYTES = 128 << 20  # memory of one compiled grammar
MAX_COMPILE_BYTES = 256 << 20  # address space for compiling it
STACK_BYTES = 2 << 20  # a quarter of the stack of the core's threads
NUM_TRIED_STEPS = 16  # tokens that are generated under a grammar before it is believed
FIXED_BYTES = 64 << 10  # what any grammar takes, beside what can be measured in pages


class Proof(msgspec.Struct, array_like=True):
    """What is known of a grammar: its text in llguidance's notation, and the memory that it takes compiled."""

    text: str
    num_bytes: int


class Prover(Protocol):
    """Proves grammars before the core compiles them."""

    def prove(self, structure: StructuredOutputsParams, seconds: float, cpu_seconds: float) -> Proof:
        """Compile a grammar elsewhere; raises JobTimeoutError, GrammarError or EngineBusyError."""

    def close(self) -> None:
        """End the process."""


class ConfinedProver:
    """Compiles grammars in processes of their own. folder, eos_token_ids, vocab_size: of the tokenizer."""

    def __init__(self, folder: Path, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        arguments = [str(folder), str(vocab_size), *map(str, eos_token_ids)]
        self._jobs = Confined(__name__, arguments, num_parallel=4)

    @property
    def pid(self) -> int | None:
        """Process id of the job server; None before the first grammar."""
        return self._jobs.pid

    def prove(self, structure: StructuredOutputsParams, seconds: float, cpu_seconds: float) -> Proof:
        """Compile a grammar, and generate a few tokens under it. Blocks.

        seconds, cpu_seconds: limits of wall-clock and processor time.

        Raises:
            JobTimeoutError: it takes longer.
            GrammarError: it is invalid, not supported, or needs more memory or stack than is allowed.
            EngineBusyError: the process cannot be started.
        """
        limits = Limits(seconds, cpu_seconds, MAX_COMPILE_BYTES, STACK_BYTES)
        try:
            answer = self._jobs.run(msgspec.msgpack.encode(structure), limits)
        except JobTimeoutError:
            raise
        except (JobKilledError, ValueError) as error:
            text = str(error)
            prefix = "" if isinstance(error, ValueError) else f"{structure.kind}: too complex: "
            raise GrammarError(prefix + text) from None
        return msgspec.msgpack.decode(answer, type=Proof)

    def close(self) -> None:
        """End the process."""
        self._jobs.close()


def prover(folder: Path, eos_token_ids: Sequence[int], vocab_size: int) -> Handler:
    """The function that proves one grammar, in a process that was forked for it."""
    try:
        tokenizer = load_tokenizer(folder, eos_token_ids)
    except GrammarError as error:
        raise ValueError(str(error)) from None

    compile_text("regex", grammar_text(StructuredOutputsParams(regex="a"), tokenizer), tokenizer, vocab_size)

    def prove(job: bytes) -> bytes:
        structure = msgspec.msgpack.decode(job, type=StructuredOutputsParams)
        before = resident_bytes()
        try:
            text = grammar_text(structure, tokenizer)
            grammar = compile_text(structure.kind, text, tokenizer, vocab_size)
        except GrammarError:
            raise
        except RecursionError:
            raise GrammarError(f"{structure.kind}: it is nested too deeply") from None
        except ValueError as error:
            raise GrammarError(f"{structure.kind}: {error}") from None
        try_steps(grammar, tokenizer)
        num_bytes = FIXED_BYTES + len(text) + max(0, resident_bytes() - before)
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise GrammarError(
                f"{structure.kind}: too complex: it takes {num_bytes >> 20} MiB of memory, "
                f"and at most {MAX_GRAMMAR_BYTES >> 20} MiB are allowed"
            )
        return msgspec.msgpack.encode(Proof(text, num_bytes))

    return prove


def try_steps(grammar: Grammar, tokenizer: LLTokenizer) -> None:
    """Generate a few random tokens under a grammar, to see what its masks take in time, memory and stack."""
    draw, matcher = random.Random(0), grammar.matcher()
    with suppress(GrammarError):  # a grammar may become too complex on some path: that ends one request
        for _ in range(NUM_TRIED_STEPS):
            mask = int.from_bytes(matcher.mask(), "little")
            start = draw.randrange(mask.bit_length() or 1)
            rest = mask >> start << start or mask
            token_id = (rest & -rest).bit_length() - 1
            matcher.accept(token_id)
            if matcher.complete:
                break


def resident_bytes() -> int:
    """Memory of this process that is in use, once the C library has given back what it has spare."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(
        description="pagewire process that compiles grammars (started by the core)"
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("vocab_size", type=int)
    parser.add_argument("eos_token_ids", type=int, nargs="*")
    parser.add_argument("--control", type=int, required=True)
    parser.add_argument("--lifeline", type=int, required=True)
    options = parser.parse_args()
    serve(
        options.control,
        options.lifeline,
        lambda: prover(options.folder, options.eos_token_ids, options.vocab_size),
    )


if __name__ == "__main__":
    main()
