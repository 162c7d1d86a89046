"""Tokens drawn from logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pagewire.kernels.cuda import sampling
from pagewire.kernels.cuda.launch import KernelLauncher

from .case import Case, Extent, Run, num_copies


def sampling_cases(launcher: KernelLauncher, on: str, extent: Extent) -> Iterator[Case]:
    """Greedy, and top-k, top-p and min-p at once."""
    rows, vocab_sizes = (3, (2048,)) if extent is Extent.SMALL else (64, (32768, 131072))
    for vocab_size in vocab_sizes:
        logits = torch.randn(num_copies(4 * rows * vocab_size), rows, vocab_size, device=on) * 3
        for greedy in (True, False):
            yield _sampling_case(launcher, on, logits, greedy)


def _sampling_case(launcher: KernelLauncher, on: str, logits: Tensor, greedy: bool) -> Case:
    copies, rows, vocab_size = logits.shape
    parameters = [
        sampling.RowSampling(seed=row)
        if greedy
        else sampling.RowSampling(seed=row, position=7, temperature=0.8, top_k=50, top_p=0.9, min_p=0.01)
        for row in range(rows)
    ]
    request, sampler = (
        sampling.sampling_request(parameters),
        sampling.Sampler(launcher, rows, vocab_size, on=on),
    )
    request = request.with_tensors([tensor.to(on) for tensor in request.tensors])

    def error() -> float:
        """The share of rows whose token is none that may be drawn."""
        tokens = sampler.sample(logits[0], request).token_ids
        if greedy:
            return float((tokens != logits[0].argmax(1)).double().mean())
        values, order = (logits[0].double() / 0.8).sort(1, descending=True)
        masses = values[:, :50].softmax(1)
        kept = (masses.cumsum(1) - masses < 0.9 + 1e-6) & (masses >= (0.01 - 1e-6) * masses[:, :1])
        return 1 - float(((order[:, :50] == tokens[:, None]) & kept).any(1).double().mean())

    def in_torch(i: int) -> Tensor:
        if greedy:
            return logits[i].argmax(1)
        values, order = (logits[i] / 0.8).topk(50, dim=1)
        masses = values.softmax(1)
        masses = masses * ((masses.cumsum(1) - masses < 0.9) & (masses >= 0.01 * masses[:, :1]))
        noise = torch.empty_like(masses).exponential_()
        return order.gather(1, (masses / noise).argmax(1, keepdim=True))

    name = f"sample {rows} x {vocab_size}{' greedy' if greedy else ''}"
    run: Run = lambda i: sampler.sample(logits[i], request)  # noqa: E731
    return Case(name, logits[0].nbytes, 0, copies, run, error, 0.0, {"torch": in_torch})
