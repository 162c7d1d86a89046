"""Sampling and log probabilities on a GPU: the same bits as `pagewire.workers.sample.sampler` gives on the CPU.

A `SamplingRequest` holds the parameters of each row in tensors, which are copied to the device before the launch.
A `Sampler` owns all memory that the kernels write, so a launch allocates nothing, does not wait for the device, and
can be captured in a graph.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewire.kernels.cuda.launch import KernelLauncher, pack
from pagewire.kernels.cuda.source import Variant, parameter_dtype
from pagewire.kernels.data.drawing import FRACTION_BITS

SOURCE, LOGPROB_SOURCE = "sampling.cu", "sampling_logprobs.cu"
DTYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}

# The constants of vocabulary.cuh.
THREADS, SLICE, MAX_SLICES, CANDIDATES, NUM_BINS = 256, 4096, 64, 4096, 18 << 6
MOST_TOKENS = 1024
"""The limit of a row's most likely tokens."""
MAX_VOCAB_SIZE = SLICE * MAX_SLICES

SHARED_BYTES = {
    "find_peaks": 20 << 10,
    "add_masses": 34 << 10,
    "choose_tokens": 20 << 10,
    "weigh_tokens": 24 << 10,
    "take_most_likely": 28 << 10,
}
"""Room for the structs that the kernels keep in shared memory; less than `launch.DEFAULT_SHARED_BYTES`."""

SAMPLED, UNUSABLE_LOGITS, NOTHING_LEFT = range(3)
"""Statuses of a row: it has a token; the largest logit that its mask allows is not finite; no token is possible."""

PLAIN_FIELDS = (
    *("position", "temperature", "top_k", "top_p", "mask", "repetition", "frequency", "presence"),
    *("draft", "posterior_threshold", "posterior_alpha"),
)
"""The fields of a `RowSampling` that the kernels read as they are."""

_NO_IDS: NDArray[np.int64] = np.empty(0, np.int64)
_NO_VALUES: NDArray[np.float32] = np.empty(0, np.float32)


@functools.cache
def variant(kernel: str, dtype: torch.dtype) -> Variant:
    """The variant of a kernel for logits of a dtype."""
    if kernel in ("weigh_tokens", "take_most_likely"):
        return Variant(LOGPROB_SOURCE, f"{kernel}<{DTYPES[dtype]}>", "LogprobCall")
    return Variant(SOURCE, f"{kernel}<{DTYPES[dtype]}>", "SamplingCall")


def variants() -> list[Variant]:
    """Every sampling kernel for each dtype of logits."""
    return [variant(kernel, dtype) for kernel in SHARED_BYTES for dtype in DTYPES]


@dataclass(frozen=True)
class RowSampling:
    """The sampling parameters of one row. The defaults have no effect, nor have ids outside the vocabulary."""

    seed: int = 0
    """Taken modulo 2**64."""
    position: int = 0
    """Number of tokens so far. The draw depends on it and the seed alone."""
    temperature: float = 0.0
    """0: greedy; others must be in float32's normal range."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    count_ids: NDArray[np.int64] = field(default_factory=lambda: _NO_IDS)
    """Tokens with a penalty, [n], without repetition."""
    counts: NDArray[np.float32] = field(default_factory=lambda: _NO_VALUES)
    """Number of times that each was generated, [n]; 0: it is only in the prompt."""
    bias_ids: NDArray[np.int64] = field(default_factory=lambda: _NO_IDS)
    """Tokens with a bias, [n], without repetition."""
    biases: NDArray[np.float32] = field(default_factory=lambda: _NO_VALUES)
    allowed_ids: NDArray[np.int64] | None = None
    """Allowed tokens; None: all."""
    forbidden_ids: Sequence[int] | NDArray[np.int64] = ()
    mask: int = -1
    """Row of the request's masks; -1: no mask."""
    num_most_likely: int = -1
    """Number of most likely tokens with log probabilities, besides the sampled token; -1: no log probabilities."""
    draft: int = -1
    """The token that takes the place of the drawn one if it is typical (`workers/sample/typical.py`); -1: none."""
    posterior_threshold: float = 1.0
    posterior_alpha: float = 1.0


@dataclass(frozen=True)
class SamplingRequest:
    """The sampling parameters of a batch, in the form that the kernels read. R rows."""

    rows: Tensor
    """uint8 [R, bytes of `SamplingRow` in sampling.cu]."""
    nums_most_likely: Tensor
    """int32 [R]."""
    masks: Tensor
    """int32 [any, words]: bit i % 32 of word i // 32 is set if token i is allowed."""
    count_ids: Tensor
    """The lists of all rows, joined: int32 [n] for ids, float32 [n] for counts and biases."""
    counts: Tensor
    bias_ids: Tensor
    biases: Tensor
    allowed_ids: Tensor
    forbidden_ids: Tensor
    has_random: bool
    """True if a row is not greedy."""
    has_truncated: bool
    """True if a row that is not greedy has a top_k or top_p."""
    max_most_likely: int
    """The largest of `nums_most_likely`; -1: no log probabilities."""

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors, to be copied to the device."""
        return [getattr(self, name) for name in _TENSORS]

    def with_tensors(self, tensors: Sequence[Tensor]) -> SamplingRequest:
        """This request with other tensors: the copies of `tensors` on the device."""
        replaced: dict[str, Any] = dict(zip(_TENSORS, tensors, strict=True))
        return replace(self, **replaced)


_TENSORS = [item.name for item in fields(SamplingRequest) if item.type == "Tensor"]


def plain_request(records: NDArray[np.void], nums_most_likely: Sequence[int]) -> SamplingRequest:
    """The sampling parameters of a batch without edits and masks. records: from `sampling_rows`."""
    no_ids = torch.empty(0, dtype=torch.int32)
    no_values = torch.empty(0, dtype=torch.float32)
    return SamplingRequest(
        **_flags(records, nums_most_likely),
        masks=torch.empty(0, 0, dtype=torch.int32),
        count_ids=no_ids,
        counts=no_values,
        bias_ids=no_ids,
        biases=no_values,
        allowed_ids=no_ids,
        forbidden_ids=no_ids,
    )


def sampling_request(rows: Sequence[RowSampling], masks: Tensor | None = None) -> SamplingRequest:
    """The sampling parameters of a batch, as tensors on the CPU.

    Args:
        masks: int32 [any, words], see `SamplingRequest.masks`.

    Raises:
        ValueError: more most likely tokens than `MOST_TOKENS`, an invalid temperature, or a mask that is not in
            `masks`.
    """
    masks = torch.empty(0, 0, dtype=torch.int32) if masks is None else masks
    _check_rows(rows, len(masks))
    records = sampling_rows(rows)
    lists = {
        "counts": [row.count_ids for row in rows],
        "biases": [row.bias_ids for row in rows],
        "allowed": [_NO_IDS if row.allowed_ids is None else row.allowed_ids for row in rows],
        "forbidden": [np.array(row.forbidden_ids, np.int64) for row in rows],
    }
    for name, id_lists in lists.items():
        lengths = np.array([len(ids) for ids in id_lists], np.int64)
        records[f"num_{name}"], records[f"{name}_start"] = lengths, np.cumsum(lengths) - lengths
    records["num_allowed"][[row.allowed_ids is None for row in rows]] = -1
    nums_most_likely = [row.num_most_likely for row in rows]
    return SamplingRequest(
        **_flags(records, nums_most_likely),
        masks=masks.contiguous(),
        count_ids=_joined_ids(lists["counts"]),
        counts=_joined([row.counts for row in rows]),
        bias_ids=_joined_ids(lists["biases"]),
        biases=_joined([row.biases for row in rows]),
        allowed_ids=_joined_ids(lists["allowed"]),
        forbidden_ids=_joined_ids(lists["forbidden"]),
    )


def _check_rows(rows: Sequence[RowSampling], num_masks: int) -> None:
    for row in rows:
        if not (row.temperature >= 0 and math.isfinite(row.temperature)):
            raise ValueError(f"the temperature must be finite and at least 0, not {row.temperature}")
        if not -1 <= row.num_most_likely <= MOST_TOKENS:
            raise ValueError(
                f"the most likely tokens are limited to {MOST_TOKENS}, not {row.num_most_likely}"
            )
        if not -1 <= row.mask < num_masks:
            raise ValueError(f"mask {row.mask} is not one of {num_masks}")


def sampling_rows(rows: Sequence[RowSampling]) -> NDArray[np.void]:
    """The struct `SamplingRow` of sampling.cu for each row, without its lists of tokens: records [R]."""
    records = np.zeros(len(rows), parameter_dtype(SOURCE, "SamplingRow"))
    for name in PLAIN_FIELDS:
        records[name] = [getattr(row, name) for row in rows]
    records["seed"] = np.array([row.seed % 2**64 for row in rows], np.uint64)
    records["least_mass"] = [max(1, math.ceil(row.min_p * 2**FRACTION_BITS)) for row in rows]
    records["num_allowed"] = -1
    return records


def joined_rows(rows: Iterable[bytes]) -> NDArray[np.void]:
    """Records [R] of the bytes of each row. `np.concatenate` compares all fields, which takes 10 us a record."""
    return np.frombuffer(bytearray().join(rows), parameter_dtype(SOURCE, "SamplingRow"))


def _flags(records: NDArray[np.void], nums_most_likely: Sequence[int]) -> dict[str, Any]:
    """The fields of a `SamplingRequest` that follow from its rows alone."""
    random = records["temperature"] > 0
    return {
        "rows": torch.from_numpy(records.view(np.uint8).reshape(len(records), records.itemsize)),
        "nums_most_likely": torch.tensor(nums_most_likely, dtype=torch.int32),
        "has_random": bool(random.any()),
        "has_truncated": bool((random & ((records["top_k"] > 0) | (records["top_p"] < 1))).any()),
        "max_most_likely": max(nums_most_likely, default=-1),
    }


def _joined(arrays: Sequence[NDArray[np.generic]]) -> Tensor:
    return torch.from_numpy(np.concatenate([_NO_VALUES, *arrays]).astype(np.float32))


def _joined_ids(arrays: Sequence[NDArray[np.int64]]) -> Tensor:
    """The ids as int32; numbers beyond int32 become its largest, which is in no vocabulary."""
    return torch.from_numpy(np.concatenate([_NO_IDS, *arrays]).clip(-1, 2**31 - 1).astype(np.int32))


@dataclass(frozen=True)
class SamplingResult:
    """The results of a launch, as views of one tensor, so that one copy moves all of them to the host.

    The next launch of the same sampler overwrites them.
    """

    memory: Tensor
    """uint8 [`result_bytes`]: the memory of all views."""
    token_ids: Tensor
    """int64 [R]; 0 where the status is not `SAMPLED`."""
    statuses: Tensor
    """int32 [R]: `SAMPLED`, `UNUSABLE_LOGITS` or `NOTHING_LEFT`."""
    peaks: Tensor
    """float32 [R]: the largest raw logit (without a token, the largest that the mask allows), or NaN."""
    ranks: Tensor
    """int32 [R]: 1 + the number of larger raw logits than the token's. Ranks, totals, ids and logits are undefined
    in rows without log probabilities and in rows whose status is not `SAMPLED`."""
    totals: Tensor
    """int64 [R]: the sum of the fixed-point probabilities."""
    ids: Tensor
    """int32 [R, 1 + max_most_likely]: the token, then the most likely tokens in order, ties by lower id."""
    logits: Tensor
    """float32 [R, 1 + max_most_likely]: the raw logits of `ids`."""

    @classmethod
    def within(cls, memory: Tensor, max_rows: int, max_most_likely: int) -> SamplingResult:
        """Views of `memory`, uint8 [`result_bytes(max_rows, max_most_likely)`]."""
        parts = _result_parts(max_most_likely)
        sizes = [max_rows * size * dtype.itemsize for size, dtype in parts]
        views = [
            part.view(dtype) for part, (_, dtype) in zip(memory.split_with_sizes(sizes), parts, strict=True)
        ]
        token_ids, totals, statuses, peaks, ranks, *tables = views
        return cls(memory, token_ids, statuses, peaks, ranks, totals, *(x.view(max_rows, -1) for x in tables))

    def first(self, num_rows: int) -> SamplingResult:
        """The first rows."""
        views = (getattr(self, item.name)[:num_rows] for item in fields(self)[1:])
        return SamplingResult(self.memory, *views)

    def logprobs(self) -> NDArray[np.float32]:
        """The log probabilities of `ids`: float32 [R, 1 + max_most_likely]. Computed in float64, as on the CPU."""
        peaks, totals = self.peaks.tolist(), self.totals.tolist()
        logs = [
            peak + math.log(total / 2**FRACTION_BITS) if total > 0 else math.nan
            for peak, total in zip(peaks, totals, strict=True)
        ]
        with np.errstate(over="ignore"):
            logprobs = self.logits.cpu().numpy() - np.array(logs, np.float64)[:, None]
            return np.asarray(logprobs, np.float32)


def _result_parts(max_most_likely: int) -> tuple[tuple[int, torch.dtype], ...]:
    """Numbers per row and dtype of each view; the widest dtypes come first, so all are aligned."""
    return (
        (1, torch.int64),
        (1, torch.int64),
        (1, torch.int32),
        (1, torch.float32),
        (1, torch.int32),
        (1 + max_most_likely, torch.int32),
        (1 + max_most_likely, torch.float32),
    )


def result_bytes(max_rows: int, max_most_likely: int) -> int:
    """Bytes of a `SamplingResult`."""
    return max_rows * sum(size * dtype.itemsize for size, dtype in _result_parts(max_most_likely))


class Sampler:
    """Launches the sampling kernels and owns the memory that they write. One launch at a time may use it.

    max_rows: limit of a launch. max_most_likely: limit of a row's most likely tokens. on: device of the memory.

    Raises:
        ValueError: vocab_size or max_most_likely is too large for the kernels.
    """

    def __init__(
        self,
        launcher: KernelLauncher,
        max_rows: int,
        vocab_size: int,
        max_most_likely: int = 20,
        on: torch.device | str = "cuda",
    ) -> None:
        if not 0 < vocab_size <= MAX_VOCAB_SIZE:
            raise ValueError(f"the vocabulary must have 1 to {MAX_VOCAB_SIZE} tokens, not {vocab_size}")
        if not 0 <= max_most_likely <= MOST_TOKENS:
            raise ValueError(f"the most likely tokens are limited to {MOST_TOKENS}, not {max_most_likely}")
        self.max_rows, self.vocab_size, self.max_most_likely = max_rows, vocab_size, max_most_likely
        self._launcher, self._num_slices = launcher, -(-vocab_size // SLICE)

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
        memory = torch.zeros(result_bytes(max_rows, max_most_likely), dtype=torch.uint8, device=on)
        self._result = SamplingResult.within(memory, max_rows, max_most_likely)

    def sample(self, logits: Tensor, request: SamplingRequest) -> SamplingResult:
        """Sample one token per row of `logits` [R, V], float32, bfloat16 or float16, V contiguous.

        A row that cannot be sampled has another status than `SAMPLED`. The logits are not changed.

        Raises:
            TypeError: another dtype.
            ValueError: shapes disagree, or the request exceeds this sampler's `max_rows` or `max_most_likely`.
        """
        self._check(logits, request)
        if len(logits):
            self._launch("find_peaks", logits, request)
            if request.has_random:
                self._launch("add_masses", logits, request)
            if request.has_truncated:
                self._launch("choose_tokens", logits, request)
            if request.max_most_likely >= 0:
                self._launch_logprobs(logits, request, self._result.token_ids)
        return self._result.first(len(logits))

    def logprobs(self, logits: Tensor, token_ids: Tensor, request: SamplingRequest) -> SamplingResult:
        """Log probabilities of `token_ids` (int64 [R], each in the vocabulary) under `logits` [R, V].

        Args:
            request: its `nums_most_likely` count, all else is ignored.

        Raises:
            TypeError, ValueError: as `sample`; or token_ids has another dtype or length.
        """
        self._check(logits, request)
        if token_ids.shape != (len(logits),) or token_ids.dtype != torch.int64:
            raise ValueError(
                f"token_ids must be int64 [{len(logits)}], not {token_ids.dtype} {tuple(token_ids.shape)}"
            )
        if len(logits):
            self._launch("find_peaks", logits, request)
            self._launch_logprobs(logits, request, token_ids.contiguous())
        return replace(self._result.first(len(logits)), token_ids=token_ids)

    def _check(self, logits: Tensor, request: SamplingRequest) -> None:
        if logits.dtype not in DTYPES:
            raise TypeError(f"logits must be float32, bfloat16 or float16, not {logits.dtype}")
        num_rows, vocab_size = logits.shape
        if vocab_size != self.vocab_size or num_rows > self.max_rows or logits.stride(1) != 1:
            raise ValueError(
                f"logits {tuple(logits.shape)}, strides {logits.stride()}, for a sampler of at most "
                f"{self.max_rows} rows of {self.vocab_size}"
            )
        if len(request.rows) != num_rows:
            raise ValueError(f"{num_rows} rows of logits, but parameters of {len(request.rows)} rows")
        if request.max_most_likely > self.max_most_likely:
            raise ValueError(
                f"the most likely tokens are limited to {self.max_most_likely}, not {request.max_most_likely}"
            )
        if len(request.masks) and request.masks.shape[1] != -(-vocab_size // 32):
            raise ValueError(f"masks {tuple(request.masks.shape)} for a vocabulary of {vocab_size}")

    def _launch(self, kernel: str, logits: Tensor, request: SamplingRequest) -> None:
        names = ("rows", "masks", "count_ids", "counts", "bias_ids", "biases", "allowed_ids", "forbidden_ids")
        parameters = pack(
            kernel_variant := variant(kernel, logits.dtype),
            **{name: getattr(request, name) for name in names},
            **{name: getattr(self._result, name) for name in ("token_ids", "statuses", "peaks")},
            **self._workspace,
            logits=logits,
            bin_masses=self._bin_masses,
            row_stride=logits.stride(0),
            mask_stride=request.masks.shape[1],
            vocab_size=self.vocab_size,
            num_slices=self._num_slices,
        )
        grid = (self._num_slices, len(logits))
        self._launcher.launch(kernel_variant, grid, (THREADS,), parameters, SHARED_BYTES[kernel])

    def _launch_logprobs(self, logits: Tensor, request: SamplingRequest, token_ids: Tensor) -> None:
        for kernel in ("weigh_tokens", "take_most_likely")[: 2 if request.max_most_likely > 0 else 1]:
            parameters = pack(
                kernel_variant := variant(kernel, logits.dtype),
                **{
                    name: getattr(self._result, name)
                    for name in ("statuses", "peaks", "totals", "ranks", "ids")
                },
                **self._workspace,
                logits=logits,
                values=self._result.logits,
                token_ids=token_ids,
                nums_most_likely=request.nums_most_likely,
                row_stride=logits.stride(0),
                vocab_size=self.vocab_size,
                num_slices=self._num_slices,
                out_stride=1 + self.max_most_likely,
            )
            grid = (self._num_slices, len(logits))
            self._launcher.launch(kernel_variant, grid, (THREADS,), parameters, SHARED_BYTES[kernel])
