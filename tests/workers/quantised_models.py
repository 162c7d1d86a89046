"""Quantised checkpoints of tiny models: in the simplest of formats, and in AWQ."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagewire.kernels.cpu.panels import NumberFormat
from pagewire.kernels.data.integers import Integers, integer_weight, quantise
from pagewire.kernels.data.weight import Weight, dense_weight
from pagewire.workers.checkpoint.formats.format import Held, Parts, described
from tests.workers.checkpoint.formats.rounding import awq_gemm, gptq, rounded

SchemeOf = Callable[[str], Integers | None]
"""The scheme of a module by its name; None: it stays dense."""


class PartsFormat:
    """The parts of `Integers` as they are, beside what says the scheme: a `Format`."""

    name = "awq"
    suffixes = frozenset({"codes4", "codes8", "scales", "offsets", "zero"})

    def check(self, names: Iterable[str]) -> None:
        """See `Format.check`."""

    def stored(self, name: str, tensors: Parts) -> Held:
        """See `Format.stored`."""
        bits = 4 if "codes4" in tensors else 8
        rows, num_bytes = tensors[f"codes{bits}"].shape
        num_in, num_groups = num_bytes * 8 // bits, tensors["scales"].shape[1]
        group = None if num_groups == 1 else num_in // num_groups
        return (rows, num_in), NumberFormat(bits, group, "offsets" in tensors)

    def weight(self, name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Weight:
        """See `Format.weight`."""
        bits, group, *_ = self.stored(name, described(tensors))[1]
        scheme = Integers(bits, group, int(tensors["zero"]))
        codes = tensors[f"codes{bits}"]
        return integer_weight(scheme, codes, tensors["scales"], tensors.get("offsets"), dtype)


def write_quantised(
    source: Path, folder: Path, scheme_of: SchemeOf, method: str = "awq"
) -> tuple[Path, Path]:
    """A dense checkpoint's copy with quantised matrices, and one with the same numbers, dequantised.

    Only `PartsFormat` reads the first, in place of the format of `method`.
    """
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
    settings = {"quant_method": method}
    return _write(source, folder / "quantised", parts, settings), _write(source, folder / "plain", dense)


def write_packed(
    source: Path,
    folder: Path,
    group: int = 32,
    packed: tuple[str, ...] = ("_proj.weight",),
    method: str = "awq",
    **fields: Any,
) -> tuple[Path, Path]:
    """An AWQ or GPTQ checkpoint of a dense one, and one with the same numbers, dequantised.

    packed: how the names of the matrices end that are quantised. fields: of its `quantization_config`.
    """
    packer = awq_gemm if method == "awq" else gptq
    parts: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(packed):
            parts[name] = dense[name] = tensor
            continue
        matrix = rounded(tensor, 4, group, symmetric=False)
        module = name.removesuffix("weight")
        parts.update({f"{module}{suffix}": part for suffix, part in packer(matrix).items()})
        dense[name] = matrix.dense().to(tensor.dtype)
    kind = {"zero_point": True, "version": "gemm"} if method == "awq" else {"sym": False}
    settings = {"quant_method": method, "bits": 4, "group_size": group} | kind | fields
    return _write(source, folder / method, parts, settings), _write(source, folder / "plain", dense)


def _write(
    source: Path, folder: Path, tensors: dict[str, Tensor], settings: dict[str, Any] | None = None
) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    if settings is not None:
        config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder
