"""The weights of the model itself, read from its checkpoint again: DoRA's factors depend on them."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.workers.adapters.division import own_rows
from pagewire.workers.device.interface import Device
from pagewire.workers.errors import LoadError
from pagewire.workers.module.configuration import load_config, resolve_dtype
from pagewire.workers.module.weights import Weights
from pagewire.workers.network.build_module import build_module
from pagewire.workers.ranks.cut import Cut

NORM_ROWS = 512  # rows of a weight whose norms are computed at a time


class BaseWeights:
    """Reads a model's weights when they are first needed; nothing of them is kept."""

    def __init__(self, config: WorkerConfig, device: Device) -> None:
        self._config, self._device = config, device
        self._weights: Weights | None = None

    def norms(self, module: str, scale: float, a: Tensor, b: Tensor, cut: Cut | None = None) -> Tensor:
        """The norms float32 [N] of the rows of `W + scale * b @ a`, for the weight W [N, K] of a linear layer.

        a: float32 [rank, K]. b: float32 [N, rank]. cut: how the layer is divided over ranks; where its outputs are,
        the result has those of this rank.

        Raises:
            LoadError: the checkpoint cannot be read.
        """
        weights = self._read()
        matrix = weights.matrix(weights.causal.get_submodule(module))
        matrix, b = matrix if cut is None else cut.rows(matrix), own_rows(b, cut)
        parts = []
        for start in range(0, matrix.shape[0], NORM_ROWS):
            stop = min(start + NORM_ROWS, matrix.shape[0])
            rows = matrix.slice(start, stop).dense().float()
            parts.append((rows + scale * (b[start:stop] @ a)).norm(dim=1))
        weights.let_go()
        return torch.cat(parts)

    def equals(self, module: str, weight: Tensor) -> bool:
        """True if a weight [N, K] is that of a linear layer or an embedding.

        Raises:
            LoadError: the checkpoint cannot be read.
        """
        weights = self._read()
        matrix = weights.matrix(weights.causal.get_submodule(module))
        same = tuple(weight.shape) == matrix.shape
        for start in range(0, matrix.shape[0] if same else 0, NORM_ROWS):
            rows = matrix.slice(start, min(start + NORM_ROWS, matrix.shape[0])).dense()
            same = same and torch.equal(rows, weight[start : start + len(rows)].to(rows.dtype))
        weights.let_go()
        return same

    def _read(self) -> Weights:
        if self._weights is None:
            if self._config.load_format == "sharded_state":
                raise LoadError(
                    "it needs the model's whole weights (for DoRA, or for a whole weight that modules_to_save does "
                    "not name), and load_format='sharded_state' has parts of them: load the whole checkpoint"
                )
            config = load_config(self._config)
            dtype = resolve_dtype(self._config, config)
            self._weights = build_module(self._config, config, dtype, self._device)
        return self._weights
