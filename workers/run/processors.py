"""Runs the logits processors of an engine over the rows of a step, before the sampler gets their logits.

    raw logits -> processors, one after the other -> the sampler: grammar, edits, temperature, ... -> tokens
               -> log probabilities of the tokens, which are those of the raw logits

A row is a sample: a step that verifies drafts has several of one sequence, each with its own tokens. So processors
never keep a sequence from being drafted for.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pagewire.ipc.models.own_code import ProcessorSource
from pagewire.ipc.models.registrations import import_object
from pagewire.ipc.quoting import shortened
from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.workers.device.interface import PendingTokens, TokenSampler
from pagewire.workers.errors import LoadError
from pagewire.workers.sample.history import TokenHistory
from pagewire.workers.sample.logits_processor import (
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    PerSequence,
    checked,
)
from pagewire.workers.sample.logprobs import logprob_rows
from pagewire.workers.sample.masks import TokenMasks
from pagewire.workers.sample.sampler import SampleOutput, SamplingSlot

logger = logging.getLogger("pagewire.worker")

MAX_ERROR = 500  # characters of a processor's exception that the client gets
BATCH_METHODS = ("is_argmax_invariant", "update_state", "apply")


class ProcessorBatch:
    """One processor, and the rows that it knows of."""

    def __init__(self, source: ProcessorSource, make: Callable[[], LogitsProcessor]) -> None:
        self.source, self._make = source, make
        self._processor = make()
        self.is_argmax_invariant = bool(self._processor.is_argmax_invariant())
        self._rows: list[TokenHistory] = []

    def takes(self, slot: SamplingSlot) -> bool:
        """True if the processor is for a sequence's next token."""
        if self.is_argmax_invariant and slot.params.temperature == 0:
            return False
        return not self.source.name or self.source.name in (slot.params.logits_processors or ())

    def apply(
        self, logits: Tensor, rows: Sequence[int], slots: Sequence[SamplingSlot]
    ) -> dict[int, Exception]:
        """Replace rows of logits float32 [R, V], in place. slots: of all R rows.

        Returns the errors of rows for which it failed, whose logits stay as they were.
        """
        order = self._order([slots[row].history for row in rows])
        placed = [rows[i] for i in order]
        index = torch.tensor(placed, device=logits.device)
        try:
            self._update([slots[row] for row in placed])
            logits[index] = checked(self._processor.apply(logits[index]), (len(rows), logits.shape[1]))
        except Exception:
            self._processor, self._rows = self._make(), []  # as new: its state may be broken
            return {row: error for row in rows if (error := self._apply_alone(logits, row, slots[row]))}
        return {}

    def _apply_alone(self, logits: Tensor, row: int, slot: SamplingSlot) -> Exception | None:
        """Replace a single row by a processor made for it, as the batch has failed; returns the error, if any."""
        try:
            self._validate(slot)
            processor = self._make()
            processor.update_state(BatchUpdate(1, added=[added(0, slot)]))
            logits[row] = checked(processor.apply(logits[row : row + 1].clone()), (1, logits.shape[1]))[0]
        except Exception as error:
            logger.warning("the logits processor %s failed", self.source.label, exc_info=True)
            return error
        return None

    def _order(self, wanted: Sequence[TokenHistory]) -> list[int]:
        """The rows in the order of the batch: as they were before, and new ones where others are gone."""
        places = {id(history): place for place, history in enumerate(self._rows)}
        order = [-1] * len(wanted)
        rest = []
        for i, history in enumerate(wanted):
            place = places.get(id(history), len(order))
            if place < len(order):
                order[place] = i
            else:
                rest.append(i)
        waiting = iter(rest)
        return [next(waiting) if i < 0 else i for i in order]

    def _update(self, slots: Sequence[SamplingSlot]) -> None:
        """Tell the processor how its batch changes to these sequences, in the order of its rows."""
        before = {id(history): place for place, history in enumerate(self._rows)}
        rows = [slot.history for slot in slots]
        moved, fresh, stay = [], [], set()
        for place, slot in enumerate(slots):
            source = before.get(id(rows[place]))
            if source is None:
                self._validate(slot)
                fresh.append(added(place, slot))
                continue
            stay.add(source)
            if source != place:
                moved.append((source, place, MoveDirectionality.UNIDIRECTIONAL))
        removed = [place for place in range(len(self._rows)) if place not in stay]
        changed = removed or fresh or moved
        self._processor.update_state(BatchUpdate(len(rows), removed, fresh, moved) if changed else None)
        self._rows = rows

    def _validate(self, slot: SamplingSlot) -> None:
        validate = getattr(self._processor, "validate_params", None)
        if validate is not None:
            validate(slot.params)


def added(place: int, slot: SamplingSlot) -> tuple[int, Any, list[int], list[int]]:
    """A new row of a batch, as `BatchUpdate` has it."""
    return place, slot.params, slot.history.prompt_ids, slot.history.output_ids


@dataclass
class LogitsProcessors:
    """All processors of an engine, in the order of the option."""

    batches: list[ProcessorBatch] = field(default_factory=list)

    @property
    def for_all(self) -> bool:
        """True if one applies to every sequence."""
        return any(not batch.source.name for batch in self.batches)

    def over(self, sampler: TokenSampler) -> TokenSampler:
        """A sampler that gets the logits that these have processed."""
        return ProcessedSampler(self, sampler) if self.batches else sampler

    def launch(
        self, sampler: TokenSampler, logits: Tensor, slots: Sequence[SamplingSlot], masks: TokenMasks
    ) -> PendingTokens:
        """As `TokenSampler.launch`, from processed logits."""
        rows = [[i for i, slot in enumerate(slots) if batch.takes(slot)] for batch in self.batches]
        if not any(rows):
            return sampler.launch(logits, slots, masks)
        processed = logits.to(torch.float32, copy=True)
        errors: dict[int, tuple[str, Exception]] = {}
        for batch, wanting in zip(self.batches, rows, strict=True):
            if good := [row for row in wanting if row not in errors]:
                failed = batch.apply(processed, good, slots)
                errors.update({row: (batch.source.label, error) for row, error in failed.items()})
        pending = sampler.launch(processed, slots, masks)
        return ProcessedTokens(pending, logits, slots, sorted({row for some in rows for row in some}), errors)


@dataclass(frozen=True)
class ProcessedSampler:
    """Samples from processed logits; see `TokenSampler`."""

    processors: LogitsProcessors
    sampler: TokenSampler

    def launch(self, logits: Tensor, slots: Sequence[SamplingSlot], masks: TokenMasks) -> PendingTokens:
        """See `TokenSampler`."""
        return self.processors.launch(self.sampler, logits, slots, masks)


@dataclass(frozen=True)
class ProcessedTokens:
    """Tokens that are being sampled from processed logits, with the log probabilities of the raw ones.

    rows: those that were processed. errors: by row, of the processor with a label.
    """

    pending: PendingTokens
    raw: Tensor
    slots: Sequence[SamplingSlot]
    rows: Sequence[int]
    errors: dict[int, tuple[str, Exception]]

    @property
    def token_ids(self) -> Tensor:
        """See `PendingTokens`."""
        return self.pending.token_ids

    def reached(self) -> bool:
        """See `PendingTokens`."""
        return self.pending.reached()

    def finish(self) -> SampleOutput:
        """See `PendingTokens`."""
        output = self.pending.finish()
        for row, (label, error) in self.errors.items():
            cause = shortened(f"{type(error).__name__}: {error}", MAX_ERROR)
            output.errors[row] = f"the logits processor {label} failed: {cause}"
            if isinstance(error, ValueError):  # of the request's parameters
                output.error_types[row] = "ValueError"
            output.token_ids[row] = 0
            output.logprobs.pop(row, None)
        for row in self.rows:
            params = self.slots[row].params
            k = None if params.processed_logprobs else params.logprobs
            if k is not None and row not in output.errors:
                logits = self.raw[row : row + 1].cpu()
                output.logprobs[row] = logprob_rows(logits, [output.token_ids[row]], k)
        return output


def open_processor(source: ProcessorSource, config: WorkerConfig, device: torch.device) -> ProcessorBatch:
    """Import and make a processor.

    Raises:
        LoadError: that fails; the text says why.
    """
    try:
        code = import_object(source.path)
        return ProcessorBatch(source, maker(code, config, device))
    except Exception as error:
        cause = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise LoadError(f"logits_processors: {source.path}: {shortened(cause, MAX_ERROR)}") from error


def maker(code: Any, config: WorkerConfig, device: torch.device) -> Callable[[], LogitsProcessor]:
    """What makes a processor of a class or a function; see `logits_processor`.

    Raises:
        ValueError: it is neither of them.
    """
    if isinstance(code, type) and all(hasattr(code, name) for name in BATCH_METHODS):
        return lambda: code(config, device, device.type == "cuda")
    function = code() if isinstance(code, type) else code
    if not callable(function):
        raise ValueError(
            f"it must be a class with {', '.join(BATCH_METHODS)}, or a function of token ids and logits, or a "
            "class whose objects are such functions"
        )
    parameters = inspect.signature(function).parameters.values()
    needed = [
        p
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(needed) not in (2, 3):
        raise ValueError(
            "a function takes (output token ids, logits), or (prompt token ids, output token ids, logits)"
        )
    return lambda: PerSequence(function, len(needed) == 3)
