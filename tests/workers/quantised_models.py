"""Quantised checkpoints of tiny models in the simplest of formats, and the product that the kernels compute."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagewire.kernels.integers import Integers, integer_weight, quantise
from pagewire.kernels.weight import Weight, dense_weight

SIGNED = {8: 128, 4: 8}
SchemeOf = Callable[[str], Integers | None]
"""The scheme of a module by its name; None: it stays dense."""


class PartsFormat:
    """The parts of `Integers` as they are, beside what says the scheme: a `Format`."""

    name = "awq"
    suffixes = frozenset({"codes4", "codes8", "scales", "offsets", "zero"})

    def check(self, names: Iterable[str]) -> None:
        """See `Format.check`."""

    def shape(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
        """See `Format.shape`."""
        bits = 4 if "codes4" in tensors else 8
        rows, num_bytes = tensors[f"codes{bits}"].shape
        return rows, num_bytes * 8 // bits

    def weight(self, name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Weight:
        """See `Format.weight`."""
        num_in = self.shape(name, tensors)[1]
        bits = 4 if "codes4" in tensors else 8
        scales = tensors["scales"]
        group = None if scales.shape[1] == 1 else num_in // scales.shape[1]
        scheme = Integers(bits, group, int(tensors["zero"]))
        return integer_weight(scheme, tensors[f"codes{bits}"], scales, tensors.get("offsets"), dtype)


def write_quantised(
    source: Path, folder: Path, scheme_of: SchemeOf, method: str = "awq"
) -> tuple[Path, Path]:
    """A dense checkpoint's copy with quantised linear layers, and one with the same numbers, dequantised."""
    quantised, plain = folder / "quantised", folder / "plain"
    parts: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module, _, leaf = name.rpartition(".")
        scheme = scheme_of(module) if leaf == "weight" and tensor.dim() == 2 else None
        if scheme is None:
            parts[name] = dense[name] = tensor
            continue
        weight = quantise(dense_weight(tensor), scheme)
        codes, scales, *offsets = weight.parts
        parts[f"{module}.codes{scheme.bits}"], parts[f"{module}.scales"] = codes, scales
        parts[f"{module}.zero"] = torch.tensor(scheme.zero)
        if offsets:
            parts[f"{module}.offsets"] = offsets[0]
        dense[name] = weight.dense()
    for target, tensors, settings in ((quantised, parts, {"quant_method": method}), (plain, dense, None)):
        target.mkdir(parents=True)
        save_file(tensors, target / "model.safetensors", {"format": "pt"})
        config = json.loads((source / "config.json").read_text())
        if settings is not None:
            config["quantization_config"] = settings
        (target / "config.json").write_text(json.dumps(config))
        if (source / "generation_config.json").exists():
            shutil.copy(source / "generation_config.json", target)
    return quantised, plain


@dataclass
class EmulatedLinear:
    """The quantised product in plain torch: rows are rounded to 8 bits, in groups of columns if the weight has some."""

    weight: Weight
    bias: Tensor | None

    def __post_init__(self) -> None:
        self.out_features, self.in_features = self.weight.shape
        self.dtype, self.num_bytes = self.weight.dtype, self.weight.num_bytes
        self._dense = Weight(self.weight.scheme, self.weight.parts, self.weight.shape, torch.float32).dense()
        scheme = self.weight.scheme
        assert isinstance(scheme, Integers)
        self._columns = self.in_features if scheme.group is None else max(32, scheme.group)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., K] to [..., N]."""
        rounded = torch.cat([self._rounded(part) for part in x.float().split(self._columns, -1)], -1)
        y = (rounded.unsqueeze(-2) * self._dense).sum(-1)  # each row by itself
        return (y if self.bias is None else y + self.bias.float()).to(x.dtype)

    @staticmethod
    def _rounded(x: Tensor) -> Tensor:
        reach = x.abs().amax(-1, keepdim=True)
        steps = torch.where(reach > 0, 127 / reach, torch.zeros(()))
        return (x * steps).round().clamp(-127, 127) * (reach / 127)
