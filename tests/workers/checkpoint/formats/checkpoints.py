"""Quantised checkpoints made of dense ones, by rounding: nothing is calibrated.

For tests, and for figures by `python -m benchmarks.make_quantised`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.workers.checkpoint.formats import rounding
from tests.workers.checkpoint.formats.rounding import Rounded, RoundedFloats, rounded, rounded_floats

QUANTISED = "proj.weight"
"""The end of the names of the matrices that are quantised: those of the layers of Llama and its relatives."""


@dataclass(frozen=True)
class Recipe:
    """A way of quantising a checkpoint."""

    tensors: Callable[[Any], dict[str, Tensor]]
    """Of a module, by suffix, of what `rounded` returns."""
    config: dict[str, Any]
    """What becomes `quantization_config`."""
    bits: int
    group: int
    symmetric: bool = True
    reordered: bool = False
    """Groups are of columns of similar size, not of adjacent ones."""
    floats: bool = False
    """4-bit floats in place of integers."""

    def rounded(self, weight: Tensor) -> Rounded | RoundedFloats:
        """A matrix [N, K] as this recipe rounds it."""
        if self.floats:
            return rounded_floats(weight, self.group)
        index = None
        if self.reordered:
            order = weight.float().square().sum(0).argsort(descending=True)
            index = torch.empty_like(order)
            index[order] = torch.arange(len(order)) // self.group
        return rounded(weight, self.bits, self.group, self.symmetric, index=index)


def _awq(version: str, tensors: Callable[[Rounded], dict[str, Tensor]], group: int) -> Recipe:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": version}
    return Recipe(tensors, config, 4, group, symmetric=False)


def _gptq(bits: int, group: int, symmetric: bool = True, version: int = 1, reordered: bool = False) -> Recipe:
    layout = "gptq" if version == 1 else "gptq_v2"
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": reordered,
    }
    tensors = partial(rounding.gptq, version=version)
    return Recipe(tensors, config | {"checkpoint_format": layout}, bits, group, symmetric, reordered)


def _marlin(group: int) -> Recipe:
    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": True, "is_marlin_format": True}
    return Recipe(lambda matrix: dict(zip("Bs", rounding.marlin(matrix), strict=True)), config, 4, group)


def _compressed(bits: int, group: int, symmetric: bool = True, packed: bool = True) -> Recipe:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric}
    weights |= {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    groups = {"targets": ["Linear"], "weights": weights, "input_activations": None if packed else inputs}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if packed else "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": groups},
        "ignore": ["lm_head"],
    }
    tensors = rounding.compressed if packed else rounding.signed
    return Recipe(partial(tensors, symmetric=symmetric), config, bits, group, symmetric)


def _auto_round(bits: int, packing: str, group: int) -> Recipe:
    config = {
        "quant_method": "auto-round",
        "bits": bits,
        "group_size": group,
        "sym": False,
        "data_type": "int",
    }
    tensors = (
        rounding.awq_gemm if "awq" in packing else partial(rounding.gptq, version=1 if ":" in packing else 2)
    )
    return Recipe(tensors, config | {"packing_format": packing}, bits, group, symmetric=False)


def _hqq(bits: int, group: int) -> Recipe:
    config = {"quant_method": "hqq", "quant_config": {}, "skip_modules": ["lm_head"]}
    return Recipe(rounding.hqq, config, bits, group, symmetric=False)


def _torchao(bits: int, group: int) -> Recipe:
    tensors = rounding.torchao_int4 if bits == 4 else rounding.torchao_int8
    return Recipe(tensors, {"quant_method": "torchao"}, bits, group, symmetric=False)


def _nvfp4(_: int) -> Recipe:
    def tensors(matrix: RoundedFloats) -> dict[str, Tensor]:
        parts = {"weight": matrix.packed(), "weight_scale": matrix.scales, "weight_scale_2": matrix.factor}
        return parts | {"input_scale": torch.ones(())}

    return Recipe(tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4, 16, floats=True)


def _mxfp4(_: int) -> Recipe:
    weights = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    config = {"quant_method": "quark", "global_quant_config": {"weight": weights}, "exclude": ["lm_head"]}
    return Recipe(
        lambda matrix: {"weight": matrix.packed(), "weight_scale": matrix.scales}, config, 4, 32, floats=True
    )


RECIPES: dict[str, Callable[[int], Recipe]] = {
    "awq": partial(_awq, "gemm", rounding.awq_gemm),
    "awq-gemv": partial(_awq, "gemv", rounding.awq_gemv),
    "gptq": partial(_gptq, 4),
    "gptq-2": partial(_gptq, 2, symmetric=False, version=2),
    "gptq-3": partial(_gptq, 3, symmetric=False),
    "gptq-8": partial(_gptq, 8),
    "gptq-act-order": partial(_gptq, 4, reordered=True),
    "gptq-marlin": _marlin,
    "w4a16": partial(_compressed, 4),
    "w4a16-asymmetric": partial(_compressed, 4, symmetric=False),
    "w8a16": partial(_compressed, 8),
    "auto-round": partial(_auto_round, 4, "auto_round"),
    "auto-round-gptq": partial(_auto_round, 2, "auto_round:auto_gptq"),
    "auto-round-awq": partial(_auto_round, 4, "auto_round:auto_awq"),
    "hqq": partial(_hqq, 4),
    "torchao-int4": partial(_torchao, 4),
    "torchao-int8": partial(_torchao, 8),
    "nvfp4": _nvfp4,
    "mxfp4": _mxfp4,
    "w8a8": lambda _: _compressed(8, -1, packed=False),
}
"""By the name that `benchmarks.make_quantised` gives them; each takes the number of columns with a scale."""


@dataclass
class Written:
    """A quantised checkpoint that was written."""

    folder: Path
    matrices: dict[str, Rounded | RoundedFloats] = field(default_factory=dict)
    """By name of module; kept only on request, since they take twice the bytes of the dense ones."""


def write_quantised(source: Path, folder: Path, recipe: Recipe, keep: bool = False) -> Written:
    """Quantise the checkpoint in a folder of safetensors files.

    Args:
        source: the folder of the dense checkpoint. What else is in it (tokenizer, templates) is copied.
        folder: where the quantised one goes; made if need be.
        recipe: how.
        keep: return the rounded matrices.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    written, tensors = Written(folder), {}
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in list(file.keys()):
                tensor = file.get_tensor(name)
                if not name.endswith(QUANTISED):
                    tensors[name] = tensor
                    continue
                module, matrix = name.removesuffix(".weight"), recipe.rounded(tensor)
                parts = recipe.tensors(matrix).items()
                tensors.update({f"{module}.{part.removeprefix('.')}": value for part, value in parts})
                if keep:
                    written.matrices[module] = matrix
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name != "model.safetensors.index.json":
            shutil.copy(path, folder)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = recipe.config
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return written
