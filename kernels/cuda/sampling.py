"""Sampling and log probabilities on a device, with the tokens of `pagewire.workers.sample.sampler`, to the bit.

A `SamplingPlan` says what each row wants: arrays, on the device before the launch. A `Sampler` owns all memory that
kernels write, so that nothing is allocated at a launch, nothing waits for the device, and launches can be
captured in a graph.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewire.kernels.cuda.launch import Device, pack
from pagewire.kernels.cuda.source import Variant, parameter_dtype
from pagewire.kernels.reference import FRACTION_BITS

SOURCE, LOGPROB_SOURCE = "sampling.cu", "sampling_logprobs.cu"
DTYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}

# As in vocabulary.cuh.
THREADS, SLICE, MAX_SLICES, CANDIDATES, NUM_BINS = 256, 4096, 64, 4096, 18 << 6
MOST_TOKENS = 1024
"""How many of a row's most likely tokens a request may ask for at most."""
MAX_VOCAB_SIZE = SLICE * MAX_SLICES

SHARED_BYTES = {
    "find_peaks": 20 << 10,
    "add_masses": 34 << 10,
    "choose_tokens": 20 << 10,
    "weigh_tokens": 24 << 10,
    "take_most_likely": 28 << 10,
}
"""At least the structs that the kernels keep in shared memory; below 48 KB, which needs no permission."""

SAMPLED, UNUSABLE_LOGITS, NOTHING_LEFT = range(3)
"""Statuses of a row: a token; the largest logit that its mask allows is not finite; nothing is allowed."""

_NO_IDS: NDArray[np.int64] = np.empty(0, np.int64)
_NO_VALUES: NDArray[np.float32] = np.empty(0, np.float32)


@functools.cache
def variant(kernel: str, dtype: torch.dtype) -> Variant:
    """A kernel for logits of a dtype."""
    if kernel in ("weigh_tokens", "take_most_likely"):
        return Variant(LOGPROB_SOURCE, f"{kernel}<{DTYPES[dtype]}>", "LogprobCall")
    return Variant(SOURCE, f"{kernel}<{DTYPES[dtype]}>", "SamplingCall")


def variants() -> list[Variant]:
    """Every sampling kernel for each dtype of logits."""
    return [variant(kernel, dtype) for kernel in SHARED_BYTES for dtype in DTYPES]


@dataclass(frozen=True)
class RowSampling:
    """What one row wants. Values that do nothing are the defaults.

    Ids that are not in the vocabulary do nothing.
    """

    seed: int = 0
    """Taken modulo 2**64."""
    position: int = 0
    """Number of tokens so far: with the seed, what the draw depends on."""
    temperature: float = 0.0
    """0: greedy. Others within float32's normal range."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    count_ids: NDArray[np.int64] = field(default_factory=lambda: _NO_IDS)
    """Tokens that penalties touch, [n], each once."""
    counts: NDArray[np.float32] = field(default_factory=lambda: _NO_VALUES)
    """How often each was generated, [n]; 0: it is only in the prompt."""
    bias_ids: NDArray[np.int64] = field(default_factory=lambda: _NO_IDS)
    """Tokens with a bias, [n], each once."""
    biases: NDArray[np.float32] = field(default_factory=lambda: _NO_VALUES)
    allowed_ids: NDArray[np.int64] | None = None
    """None: all."""
    forbidden_ids: Sequence[int] = ()
    mask: int = -1
    """Row of the plan's masks; -1: all tokens."""
    num_most_likely: int = -1
    """How many most likely tokens to give log probabilities of, beside the one drawn; -1: none at all."""


@dataclass(frozen=True)
class SamplingPlan:
    """What the rows of a batch want, as the kernels read it. Copies of the tensors may be on any device."""

    rows: Tensor
    """uint8 [R, bytes of `SamplingRow` in sampling.cu]."""
    nums_most_likely: Tensor
    """int32 [R]."""
    masks: Tensor
    """int32 [any, words]: bit i % 32 of word i // 32 is set if token i is allowed."""
    count_ids: Tensor
    """int32 [all rows' tokens]; likewise the next five, float32 where they are no ids."""
    counts: Tensor
    bias_ids: Tensor
    biases: Tensor
    allowed_ids: Tensor
    forbidden_ids: Tensor
    draws: bool
    """Is any row not greedy?"""
    narrows: bool
    """Has any of those a top_k or top_p?"""
    most_likely: int
    """The largest of `nums_most_likely`; -1: no log probabilities."""

    @property
    def tensors(self) -> list[Tensor]:
        """All that the kernels read."""
        return [getattr(self, name) for name in _TENSORS]

    def with_tensors(self, tensors: Sequence[Tensor]) -> SamplingPlan:
        """The same with other `tensors`."""
        replaced: dict[str, Any] = dict(zip(_TENSORS, tensors, strict=True))
        return replace(self, **replaced)


_TENSORS = [item.name for item in fields(SamplingPlan) if item.type == "Tensor"]


def plain_plan(rows: NDArray[np.void], nums_most_likely: Sequence[int]) -> SamplingPlan:
    """What rows want that neither edit their logits nor have masks. rows: of `SamplingRow` in sampling.cu."""
    narrows = (rows["temperature"] > 0) & ((rows["top_k"] > 0) | (rows["top_p"] < 1))
    no_ids = torch.empty(0, dtype=torch.int32)
    no_values = torch.empty(0, dtype=torch.float32)
    return SamplingPlan(
        rows=torch.from_numpy(rows.view(np.uint8).reshape(len(rows), rows.itemsize)),
        nums_most_likely=torch.tensor(nums_most_likely, dtype=torch.int32),
        masks=torch.empty(0, 0, dtype=torch.int32),
        count_ids=no_ids,
        counts=no_values,
        bias_ids=no_ids,
        biases=no_values,
        allowed_ids=no_ids,
        forbidden_ids=no_ids,
        draws=bool((rows["temperature"] > 0).any()),
        narrows=bool(narrows.any()),
        most_likely=max(nums_most_likely, default=-1),
    )


def plan(wanted: Sequence[RowSampling], masks: Tensor | None = None) -> SamplingPlan:
    """What rows want, as tensors of the CPU.

    Raises:
        ValueError: more of the most likely tokens than `MOST_TOKENS`, a temperature that is none, or a mask that
            is not there.
    """
    masks = torch.empty(0, 0, dtype=torch.int32) if masks is None else masks
    for row in wanted:
        if not (row.temperature >= 0 and math.isfinite(row.temperature)):
            raise ValueError(f"a temperature is a finite number from 0, not {row.temperature}")
        if not -1 <= row.num_most_likely <= MOST_TOKENS:
            raise ValueError(f"at most {MOST_TOKENS} most likely tokens, not {row.num_most_likely}")
        if not -1 <= row.mask < len(masks):
            raise ValueError(f"mask {row.mask} of {len(masks)}")
    rows = sampling_rows(wanted)
    lists = {
        "counts": [row.count_ids for row in wanted],
        "biases": [row.bias_ids for row in wanted],
        "allowed": [_NO_IDS if row.allowed_ids is None else row.allowed_ids for row in wanted],
        "forbidden": [np.array(row.forbidden_ids, np.int64) for row in wanted],
    }
    for name, ids in lists.items():
        rows[f"num_{name}"] = [len(of_row) for of_row in ids]
        rows[f"{name}_start"] = np.cumsum(rows[f"num_{name}"]) - rows[f"num_{name}"]
    rows["num_allowed"][[row.allowed_ids is None for row in wanted]] = -1
    drawing = [row for row in wanted if row.temperature > 0]
    nums_most_likely = [row.num_most_likely for row in wanted]
    return SamplingPlan(
        rows=torch.from_numpy(rows.view(np.uint8).reshape(len(wanted), rows.itemsize)),
        nums_most_likely=torch.tensor(nums_most_likely, dtype=torch.int32),
        masks=masks.contiguous(),
        count_ids=_joined_ids(lists["counts"]),
        counts=_joined([row.counts for row in wanted]),
        bias_ids=_joined_ids(lists["biases"]),
        biases=_joined([row.biases for row in wanted]),
        allowed_ids=_joined_ids(lists["allowed"]),
        forbidden_ids=_joined_ids(lists["forbidden"]),
        draws=bool(drawing),
        narrows=any(row.top_k > 0 or row.top_p < 1 for row in drawing),
        most_likely=max(nums_most_likely, default=-1),
    )


def sampling_rows(wanted: Sequence[RowSampling]) -> NDArray[np.void]:
    """`SamplingRow` of sampling.cu of each row [R], without its lists of tokens."""
    rows = np.zeros(len(wanted), parameter_dtype(SOURCE, "SamplingRow"))
    for name in ("position", "top_p", "mask", "top_k", "temperature", "repetition", "frequency", "presence"):
        rows[name] = [getattr(row, name) for row in wanted]
    rows["seed"] = np.array([row.seed % 2**64 for row in wanted], np.uint64)
    rows["least_mass"] = [max(1, math.ceil(row.min_p * 2**FRACTION_BITS)) for row in wanted]
    rows["num_allowed"] = -1
    return rows


def _joined(arrays: Sequence[NDArray[np.generic]]) -> Tensor:
    return torch.from_numpy(np.concatenate([_NO_VALUES, *arrays]).astype(np.float32))


def _joined_ids(arrays: Sequence[NDArray[np.int64]]) -> Tensor:
    """As int32; numbers that are too large for it stay too large for any vocabulary."""
    return torch.from_numpy(np.concatenate([_NO_IDS, *arrays]).clip(-1, 2**31 - 1).astype(np.int32))


@dataclass(frozen=True)
class SamplingResult:
    """What a launch gave, as views of one piece of memory, so that one copy takes all of it elsewhere.

    A sampler's own memory is written to by its next launch.
    """

    memory: Tensor
    """uint8 [bytes of all that follows, for `max_rows` rows]."""
    max_rows: int
    token_ids: Tensor
    """int64 [R]; 0 where the status is not `SAMPLED`."""
    statuses: Tensor
    """int32 [R]."""
    peaks: Tensor
    """float32 [R]: the largest raw logits; NaN where there is a NaN. Without a token, of what the mask allows."""
    ranks: Tensor
    """int32 [R]: 1 + the number of larger raw logits than the token's. This and what follows means nothing for
    rows that want no log probabilities, or have another status than `SAMPLED`."""
    totals: Tensor
    """int64 [R]: sums of masses."""
    ids: Tensor
    """int32 [R, 1 + most]: the token, then the most likely in order, ties by lower id."""
    logits: Tensor
    """float32 [R, 1 + most], of `ids`."""

    @classmethod
    def within(cls, memory: Tensor, num_rows: int, max_rows: int, most: int) -> SamplingResult:
        """Of the first rows, in `memory` of `result_bytes(max_rows, most)`."""
        views, start = [], 0
        for size, dtype in _result_parts(most):
            end = start + max_rows * size * dtype.itemsize
            view = memory[start:end].view(dtype)
            views.append((view if size == 1 else view.view(max_rows, size))[:num_rows])
            start = end
        token_ids, totals, statuses, peaks, ranks, ids, logits = views
        return cls(memory, max_rows, token_ids, statuses, peaks, ranks, totals, ids, logits)

    def within_memory(self, memory: Tensor) -> SamplingResult:
        """The same views of other memory, as large."""
        return self.within(memory, len(self.token_ids), self.max_rows, self.ids.shape[1] - 1)

    def logprobs(self) -> NDArray[np.float32]:
        """float32 [R, 1 + most], of `ids`. The logarithm is taken here, in float64, as on the CPU path."""
        peaks, totals = self.peaks.tolist(), self.totals.tolist()
        logs = [
            peak + math.log(total / 2**FRACTION_BITS) if total > 0 else math.nan
            for peak, total in zip(peaks, totals, strict=True)
        ]
        with np.errstate(over="ignore"):
            logprobs = self.logits.cpu().numpy() - np.array(logs, np.float64)[:, None]
            return np.asarray(logprobs, np.float32)


def _result_parts(most: int) -> tuple[tuple[int, torch.dtype], ...]:
    """How many numbers of what kind a row has of each part: the widest first, which keeps all of them aligned."""
    return (
        (1, torch.int64),
        (1, torch.int64),
        (1, torch.int32),
        (1, torch.float32),
        (1, torch.int32),
        (1 + most, torch.int32),
        (1 + most, torch.float32),
    )


def result_bytes(max_rows: int, most: int) -> int:
    """How much memory a `SamplingResult` takes."""
    return max_rows * sum(size * dtype.itemsize for size, dtype in _result_parts(most))


class Sampler:
    """Launches the kernels, and owns what they write: one launch at a time.

    max_rows: of a launch. most: the most likely tokens that a row may ask for. on: where the memory is.

    Raises:
        ValueError: a vocabulary that is too large, or `most` is.
    """

    def __init__(
        self, device: Device, max_rows: int, vocab_size: int, most: int = 20, on: torch.device | str = "cuda"
    ) -> None:
        if not 0 < vocab_size <= MAX_VOCAB_SIZE:
            raise ValueError(f"a vocabulary of 1 to {MAX_VOCAB_SIZE} tokens, not {vocab_size}")
        if not 0 <= most <= MOST_TOKENS:
            raise ValueError(f"at most {MOST_TOKENS} most likely tokens, not {most}")
        self.max_rows, self.vocab_size, self.most = max_rows, vocab_size, most
        self._device, self._num_slices = device, -(-vocab_size // SLICE)

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(max_rows, *shape, dtype=dtype, device=on)

        state_bytes = parameter_dtype(SOURCE, "RowState").itemsize
        self._workspace = {
            "states": zeros(state_bytes, dtype=torch.uint8),
            "slices": zeros(2 * MAX_SLICES, dtype=torch.int64),
            "bin_counts": zeros(NUM_BINS, dtype=torch.int32),
            "candidates": zeros(CANDIDATES, dtype=torch.int64),
        }
        self._bin_masses = zeros(NUM_BINS, dtype=torch.int64)
        memory = torch.zeros(result_bytes(max_rows, most), dtype=torch.uint8, device=on)
        self._result = SamplingResult.within(memory, max_rows, max_rows, most)

    def sample(self, logits: Tensor, plan: SamplingPlan) -> SamplingResult:
        """One token per row of `logits` [R, V], float32, bfloat16 or float16, V contiguous.

        Rows that cannot be sampled get a status, the others their tokens. The logits are not changed.

        Raises:
            TypeError: another dtype.
            ValueError: shapes disagree, or there are more rows, or more of the most likely tokens asked for, than
                this sampler has room for.
        """
        self._check(logits, plan)
        if len(logits):
            self._launch("find_peaks", logits, plan)
            if plan.draws:
                self._launch("add_masses", logits, plan)
            if plan.narrows:
                self._launch("choose_tokens", logits, plan)
            if plan.most_likely >= 0:
                self._launch_logprobs(logits, plan, self._result.token_ids)
        return self._rows(len(logits))

    def logprobs(self, logits: Tensor, token_ids: Tensor, plan: SamplingPlan) -> SamplingResult:
        """Log probabilities of `token_ids` (int64 [R], each in the vocabulary) under `logits` [R, V].

        Args:
            plan: of rows that say nothing but `num_most_likely`.

        Raises:
            TypeError, ValueError: as `sample`; or there are not as many tokens as rows.
        """
        self._check(logits, plan)
        if token_ids.shape != (len(logits),) or token_ids.dtype != torch.int64:
            raise ValueError(f"int64 [{len(logits)}] expected: {token_ids.dtype} {tuple(token_ids.shape)}")
        if len(logits):
            self._launch("find_peaks", logits, plan)
            self._launch_logprobs(logits, plan, token_ids.contiguous())
        return replace(self._rows(len(logits)), token_ids=token_ids)

    def _check(self, logits: Tensor, plan: SamplingPlan) -> None:
        if logits.dtype not in DTYPES:
            raise TypeError(f"logits are float32, bfloat16 or float16, not {logits.dtype}")
        num_rows, vocab_size = logits.shape
        if vocab_size != self.vocab_size or num_rows > self.max_rows or logits.stride(1) != 1:
            raise ValueError(
                f"logits {tuple(logits.shape)}, strides {logits.stride()}, for a sampler of at most "
                f"{self.max_rows} rows of {self.vocab_size}"
            )
        if len(plan.rows) != num_rows:
            raise ValueError(f"{num_rows} rows of logits, a plan of {len(plan.rows)}")
        if plan.most_likely > self.most:
            raise ValueError(f"at most {self.most} most likely tokens, not {plan.most_likely}")
        if len(plan.masks) and plan.masks.shape[1] != -(-vocab_size // 32):
            raise ValueError(f"masks {tuple(plan.masks.shape)} for a vocabulary of {vocab_size}")

    def _rows(self, num_rows: int) -> SamplingResult:
        return SamplingResult.within(self._result.memory, num_rows, self.max_rows, self.most)

    def _launch(self, kernel: str, logits: Tensor, plan: SamplingPlan) -> None:
        names = ("rows", "masks", "count_ids", "counts", "bias_ids", "biases", "allowed_ids", "forbidden_ids")
        parameters = pack(
            chosen := variant(kernel, logits.dtype),
            **{name: getattr(plan, name) for name in names},
            **{name: getattr(self._result, name) for name in ("token_ids", "statuses", "peaks")},
            **self._workspace,
            logits=logits,
            bin_masses=self._bin_masses,
            row_stride=logits.stride(0),
            mask_stride=plan.masks.shape[1],
            vocab_size=self.vocab_size,
            num_slices=self._num_slices,
        )
        grid = (self._num_slices, len(logits))
        self._device.launch(chosen, grid, (THREADS,), parameters, SHARED_BYTES[kernel])

    def _launch_logprobs(self, logits: Tensor, plan: SamplingPlan, token_ids: Tensor) -> None:
        for kernel in ("weigh_tokens", "take_most_likely")[: 2 if plan.most_likely > 0 else 1]:
            parameters = pack(
                chosen := variant(kernel, logits.dtype),
                **{
                    name: getattr(self._result, name)
                    for name in ("statuses", "peaks", "totals", "ranks", "ids")
                },
                **self._workspace,
                logits=logits,
                values=self._result.logits,
                token_ids=token_ids,
                nums_most_likely=plan.nums_most_likely,
                row_stride=logits.stride(0),
                vocab_size=self.vocab_size,
                num_slices=self._num_slices,
                out_stride=1 + self.most,
            )
            grid = (self._num_slices, len(logits))
            self._device.launch(chosen, grid, (THREADS,), parameters, SHARED_BYTES[kernel])
