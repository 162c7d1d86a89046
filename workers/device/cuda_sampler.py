"""Sampling on a GPU: the same tokens as `sampler.sample`, by the kernels in `kernels/cuda`.

`launch` returns at once and `CudaPendingTokens.finish` waits for the device, so other work can be launched in
between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pagewire.ipc.errors import NotFiniteError
from pagewire.ipc.wire.items import LogprobRows
from pagewire.kernels.cuda.launch import KernelLauncher
from pagewire.kernels.cuda.sampling import (
    MOST_TOKENS,
    SAMPLED,
    UNUSABLE_LOGITS,
    RowSampling,
    Sampler,
    SamplingRequest,
    SamplingResult,
    joined_rows,
    plain_request,
    result_bytes,
    sampling_request,
    sampling_rows,
)
from pagewire.workers.device.cpu import CpuPendingTokens
from pagewire.workers.device.interface import Event, PendingTokens
from pagewire.workers.sample.logprobs import Logprobs, logprob_rows
from pagewire.workers.sample.masks import TokenMasks
from pagewire.workers.sample.sampler import NO_TOKEN_POSSIBLE, SampleOutput, SamplingSlot, sample, unusable

NOT_ARRIVED = -1
"""A row's status on the host until the device's results are there."""


def row_sampling(slot: SamplingSlot, mask: int = -1, max_most_likely: int = MOST_TOKENS) -> RowSampling:
    """The sampling parameters of a slot's next token, in the form that the kernels take.

    mask: the slot's row of the step's masks; -1 for none.
    Log probabilities of more than `max_most_likely` tokens are left out: the kernels do not support them.
    """
    params, edits = slot.params, slot.edits
    if params.logprobs is None or not 0 <= params.logprobs <= max_most_likely:
        num_most_likely = -1
    else:
        num_most_likely = params.logprobs
    row = RowSampling(
        seed=slot.seed,
        position=slot.num_tokens,
        temperature=slot.temperature if params.temperature > 0 else 0.0,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        mask=mask,
        num_most_likely=num_most_likely,
    )
    if slot.candidate is not None:
        draft, rule = slot.candidate
        row = replace(row, draft=draft, posterior_threshold=rule.threshold, posterior_alpha=rule.alpha)
    if not edits.active:
        return row
    if edits.counts is not None:
        row = replace(row, count_ids=edits.counts.ids, counts=edits.counts.counts)
    return replace(
        row,
        repetition=edits.repetition,
        frequency=edits.frequency,
        presence=edits.presence,
        bias_ids=edits.tables.bias_ids,
        biases=edits.tables.biases,
        allowed_ids=edits.allowed,
        forbidden_ids=edits.forbidden(),
    )


def needs_pytorch(slot: SamplingSlot) -> bool:
    """True if the kernels cannot sample a slot's next token."""
    processed = slot.params.processed_logprobs and slot.params.logprobs is not None
    return processed or slot.edits.timestamps is not None


class Transfers(Protocol):
    """The part of `cuda.CudaDevice` that the sampler uses."""

    torch_device: torch.device
    launcher: KernelLauncher
    """Launches kernels on the device."""

    def upload(self, tensors: Sequence[Tensor]) -> list[Tensor]: ...

    def pinned(self, num_bytes: int) -> Tensor: ...

    def download(self, source: Tensor, target: Tensor) -> Event: ...


class CudaTokenSampler:
    """The sampler of a GPU. Its memory serves one launch at a time.

    max_rows: maximum rows of a batch. max_most_likely: number of most likely tokens per row that the device can
    find; for a row that needs more (such as the whole vocabulary) the logits are copied to the CPU.

    Raises:
        ValueError: vocab_size or max_most_likely is too large for the kernels.
    """

    def __init__(self, device: Transfers, max_rows: int, vocab_size: int, max_most_likely: int) -> None:
        self._device = device
        self._sampler = Sampler(device.launcher, max_rows, vocab_size, max_most_likely, device.torch_device)
        host = device.pinned(result_bytes(max_rows, max_most_likely))
        self._on_host = SamplingResult.within(host, max_rows, max_most_likely)
        self._plain: WeakKeyDictionary[SamplingSlot, tuple[bytes, int]] = WeakKeyDictionary()

    def launch(
        self, logits: Tensor, slots: Sequence[SamplingSlot], masks: TokenMasks | None = None
    ) -> PendingTokens:
        """Start to sample one token per row; arguments as for `sampler.sample`. The logits must not change until
        `finish` has returned.

        The kernels know neither timestamps nor log probabilities of processed logits: a step with these is sampled
        by PyTorch on the device, and is over when this returns.
        """
        if any(needs_pytorch(slot) for slot in slots):
            return CpuPendingTokens(sample(logits, slots, masks))
        request = self._request(slots, masks or TokenMasks())
        request = request.with_tensors(self._device.upload(request.tensors))
        result = self._sampler.sample(logits, request)
        on_host = self._on_host.first(len(slots))
        on_host.statuses.fill_(NOT_ARRIVED)
        copied = self._device.download(result.memory, on_host.memory)
        return CudaPendingTokens(logits, slots, result.token_ids, on_host, copied)

    def _request(self, slots: Sequence[SamplingSlot], masks: TokenMasks) -> SamplingRequest:
        if masks.mask_rows or any(slot.edits.active for slot in slots):
            limit = self._sampler.max_most_likely
            sampling = [row_sampling(slot, masks.mask_rows.get(i, -1), limit) for i, slot in enumerate(slots)]
            return sampling_request(sampling, masks.bits)
        values, nums = zip(*map(self._plain_row, slots), strict=True)
        rows = joined_rows(values)
        rows["position"] = [slot.num_tokens for slot in slots]
        return plain_request(rows, nums)

    def _plain_row(self, slot: SamplingSlot) -> tuple[bytes, int]:
        """A slot's constant parameters, cached: a `SamplingRow`, and its number of most likely tokens."""
        if (cached := self._plain.get(slot)) is None:
            row = row_sampling(slot, max_most_likely=self._sampler.max_most_likely)
            cached = self._plain[slot] = sampling_rows([row]).tobytes(), row.num_most_likely
        return cached


@dataclass(frozen=True)
class CudaPendingTokens:
    """The tokens of a launched batch. Call `finish` before the next launch."""

    logits: Tensor
    slots: Sequence[SamplingSlot]
    token_ids: Tensor
    """int64 [R], on the device."""
    result: SamplingResult
    """In pinned host memory; valid once `copied` is reached."""
    copied: Event

    def reached(self) -> bool:
        """True if the tokens are on the host."""
        return self.copied.reached()

    def finish(self) -> SampleOutput:
        """Wait for the tokens, which are the same as those of `sampler.sample`.

        Raises:
            RuntimeError: they are not there, although the event behind them is reached.
        """
        self.copied.wait()
        if NOT_ARRIVED in self.result.statuses.tolist():
            raise RuntimeError("the tokens of a step did not arrive from the device before their event")
        output = SampleOutput(self.result.token_ids.tolist())
        statuses, peaks = self.result.statuses.tolist(), self.result.peaks.tolist()
        for row, (status, peak) in enumerate(zip(statuses, peaks, strict=True)):
            if status != SAMPLED:
                output.errors[row] = unusable(peak) if status == UNUSABLE_LOGITS else NO_TOKEN_POSSIBLE
            if status == UNUSABLE_LOGITS:
                output.error_types[row] = NotFiniteError.__name__
        self._add_logprobs(output)
        return output

    def _add_logprobs(self, output: SampleOutput) -> None:
        max_most_likely = self.result.ids.shape[1] - 1
        num_logprobs = {
            row: slot.params.logprobs
            for row, slot in enumerate(self.slots)
            if slot.params.logprobs is not None and row not in output.errors
        }
        if not num_logprobs:
            return
        ids, logprobs, ranks = self.result.ids.numpy(), self.result.logprobs(), self.result.ranks.numpy()
        for row, k in num_logprobs.items():
            if 0 <= k <= max_most_likely:
                size = 1 + min(k, self.logits.shape[1])
                here = slice(row, row + 1)
                output.logprobs[row] = Logprobs(ids[here, :size], logprobs[here, :size], ranks[here]).pack()
            else:
                output.logprobs[row] = self._of_many(row, output.token_ids[row], k)

    def _of_many(self, row: int, token_id: int, k: int) -> LogprobRows:
        return logprob_rows(self.logits[row : row + 1].cpu(), [token_id], k)
