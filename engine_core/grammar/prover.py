"""Proves that a grammar can be compiled within limits, in a process that may be lost.

Compiled grammars cannot move between processes, so the core compiles them again once they are proven: what was done
within a quarter of the core's stack, and within limits of time and memory, is known to end there as well.
"""

from __future__ import annotations

import argparse
import random
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from pagewire.engine_core.grammar.compile import compile_text, grammar_text, load_tokenizer
from pagewire.engine_core.grammar.matcher import DEAD_END, Grammar
from pagewire.engine_core.schedule.attachments import GrammarError
from pagewire.ipc.host.confined import Confined, JobKilledError, JobTimeoutError, Limits
from pagewire.ipc.host.heap import release_spare_memory
from pagewire.ipc.host.job_server import Handler, serve
from pagewire.ipc.wire.params import StructuredOutputsParams

MAX_GRAMMAR_BYTES = 128 << 20  # memory of one compiled grammar
MAX_COMPILE_BYTES = 256 << 20  # address space for compiling it
STACK_BYTES = 2 << 20  # a quarter of the stack of the core's threads
JOBS_PER_PROCESS = 256  # grammars that one process proves
MAX_MASK_SECONDS = 0.02  # processor time of a mask, on average over the tried tokens
NUM_TRIED_STEPS = 16  # tokens that are generated under a grammar before it is believed
NOTED_BYTES = 1 << 20  # memory over which it is worth the time to see how much of it is spare
FIXED_BYTES = 64 << 10  # what any grammar takes, beside what can be measured in pages


class Proof(msgspec.Struct, array_like=True):
    """What is known of a grammar: its text in llguidance's notation, and the memory that it takes compiled."""

    text: str
    num_bytes: int


class Prover(Protocol):
    """Proves grammars before the core compiles them."""

    def prove(self, structure: StructuredOutputsParams, seconds: float, cpu_seconds: float) -> Proof:
        """Compile a grammar elsewhere; raises as `ConfinedProver.prove`."""

    def start(self) -> None:
        """Start the process, with all that grammars need, ahead of the first one; blocks."""

    def close(self) -> None:
        """End the process, also while it starts."""


class ConfinedProver:
    """Compiles grammars in processes of their own. folder, eos_token_ids, vocab_size: of the tokenizer."""

    def __init__(self, folder: Path, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        arguments = [str(folder), str(vocab_size), *map(str, eos_token_ids)]
        self._jobs = Confined(__name__, arguments, num_parallel=4)

    @property
    def pid(self) -> int | None:
        """Process id of the job server; None before it is started."""
        return self._jobs.pid

    def start(self) -> None:
        """Start the job server and have it load the tokenizer. Blocks.

        Raises:
            GrammarError: it cannot use the tokenizer. EngineBusyError: the process cannot be started.
        """
        try:
            self._jobs.start()
        except ValueError as error:
            raise GrammarError(str(error)) from None

    def prove(self, structure: StructuredOutputsParams, seconds: float, cpu_seconds: float) -> Proof:
        """Compile a grammar, and generate a few tokens under it. Blocks.

        seconds, cpu_seconds: limits of wall-clock and processor time.

        Raises:
            JobTimeoutError: it takes more processor time.
            EngineStalledError: it got too little of a processor.
            GrammarError: it is invalid, not supported, or needs more memory or stack than is allowed.
            EngineBusyError: the process cannot be started.
        """
        limits = Limits(seconds, cpu_seconds, MAX_COMPILE_BYTES, STACK_BYTES, computes=True)
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
        try_steps(grammar, structure.kind)
        grown = resident_bytes() - before
        if grown > NOTED_BYTES:  # it may be memory that was needed for compiling only
            release_spare_memory()
            grown = resident_bytes() - before
        num_bytes = FIXED_BYTES + len(text) + max(0, grown)
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise GrammarError(
                f"{structure.kind}: too complex: it takes {num_bytes >> 20} MiB of memory, "
                f"and at most {MAX_GRAMMAR_BYTES >> 20} MiB are allowed"
            )
        return msgspec.msgpack.encode(Proof(text, num_bytes))

    return prove


def warm_up(prove: Handler) -> None:
    """Prove a small grammar, so that the memory which all grammars use is there."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"enum": ["c", 1]}}}
    prove(msgspec.msgpack.encode(StructuredOutputsParams(json=schema)))
    release_spare_memory()


def try_steps(grammar: Grammar, kind: str) -> None:
    """Generate a few random tokens under a grammar, to see what its masks take in time, memory and stack.

    Raises:
        GrammarError: they take too long, or the grammar becomes too complex at once.
    """
    draw, matcher = random.Random(0), grammar.matcher()
    begin, num_masks = time.process_time(), 0
    try:
        for _ in range(NUM_TRIED_STEPS):
            mask = int.from_bytes(matcher.mask(), "little")
            num_masks += 1
            start = draw.randrange(mask.bit_length() or 1)
            rest = mask >> start << start or mask
            matcher.accept((rest & -rest).bit_length() - 1)
            if matcher.complete:
                break
    except GrammarError as error:
        if DEAD_END not in str(error):  # which depends on the vocabulary and the path, and ends one request
            raise GrammarError(f"{kind}: too complex: {error}") from None
    seconds = (time.process_time() - begin) / max(1, num_masks)
    if seconds > MAX_MASK_SECONDS:
        raise GrammarError(
            f"{kind}: too complex: to find the allowed next tokens takes {seconds * 1000:.0f} ms for each token, "
            f"and {MAX_MASK_SECONDS * 1000:.0f} ms are allowed"
        )


def resident_bytes() -> int:
    """Memory of this process that is in use and no part of a file."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text(encoding="ascii").split())
    return (resident - shared) * resource.getpagesize()


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
        warm_up,
        JOBS_PER_PROCESS,
    )


if __name__ == "__main__":
    main()
