"""Finds the tensors of a checkpoint that make each weight of a module, by transformers' own tables.

transformers renames the tensors of old checkpoints, and stacks, joins or splits those of some families. Its tables
and operations are used as they are; here they run for one weight at a time, when it is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from pagewire.workers.checkpoint.kv_scales import NAME as KV_SCALE
from pagewire.workers.checkpoint.mtp_layers import without_mtp
from pagewire.workers.errors import LoadError, first_line

UNUSED = re.compile(r"\.(attn|attention)\.(masked_)?bias$|\.inv_freq$|(^|\.)mtp\.|\.[qkv]_scale$")
"""Names of causal masks and rotary frequencies in old checkpoints, of layers that draft tokens (MTP), and of scales
for an 8-bit KV cache."""


@dataclass
class Conversion:
    """How the tensors of a checkpoint make one or more weights of a module.

    transform: transformers' `WeightConverter`; None if the only tensor is the weight itself.
    """

    target: str
    transform: Any
    sources: list[tuple[str, str]] = field(default_factory=list)
    """Names of tensors, and the pattern of the transform that each of them matches."""

    def run(self, causal: Any, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The weights by their names; read: gets a tensor of the checkpoint."""
        if self.transform is None:
            return {self.target: read(self.sources[0][0])}
        transform = deepcopy(self.transform)
        for name, pattern in self.sources:
            transform.add_tensor(self.target, name, pattern, partial(read, name))
        made = transform.convert(self.target, model=causal, config=causal.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}

    def members(self) -> list[tuple[str, ...]] | None:
        """If the weight is a stack of matrices that the checkpoint holds apart, the names of each one's tensors.

        The tensors of a matrix lie one below the other. None if the weight is made in another way.
        """
        operations = [] if self.transform is None else [_described(op) for op in self.transform.operations]
        if operations not in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]):
            return None
        by_pattern = [
            [name for name, matching in self.sources if matching == pattern]
            for pattern in self.transform.source_patterns
        ]
        return list(zip(*by_pattern, strict=True))


def _described(operation: Any) -> tuple[str, int | None]:
    return type(operation).__name__, getattr(operation, "dim", None)


def conversions(
    causal: Any, names: Iterable[str], on_meta: Callable[[str], Tensor]
) -> tuple[dict[str, Conversion], set[str]]:
    """The conversion that makes each weight of a module on the meta device, and the names that fit no weight.

    names, on_meta: the tensors of the checkpoint, and their shapes.

    Raises:
        ImportError: this version of transformers has no such tables.
        LoadError: a weight would have another shape than in the module.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key

    table = get_model_conversion_mapping(causal)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    weights = causal.state_dict()
    found: dict[str, Conversion] = {}
    unexpected = set()
    for name in sorted(names, key=dot_natural_key):
        target, pattern = _target(name, renamings, converters, causal, weights)
        if target not in weights:
            unexpected.add(name)
            continue
        conversion = found.setdefault(target, Conversion(target, by_pattern.get(pattern)))
        conversion.sources.append((name, pattern or name))
    return _by_weight(causal, found.values(), weights, on_meta), unexpected


def _target(
    name: str, renamings: list[Any], converters: list[Any], causal: Any, weights: dict[str, Tensor]
) -> tuple[str, str | None]:
    """The weight that a tensor makes (the first, if several), and the pattern of the converter that matched."""
    from transformers.core_model_loading import rename_source_key

    prefix = type(causal).base_model_prefix  # of names; Llama 4's is not that of its base model
    target, pattern = rename_source_key(name, renamings, converters, prefix, weights)
    if target not in weights and name in weights:
        target, pattern = rename_source_key(name, [], [], prefix, weights)
    return target, pattern


def _by_weight(
    causal: Any, found: Iterable[Conversion], weights: dict[str, Tensor], on_meta: Callable[[str], Tensor]
) -> dict[str, Conversion]:
    """The conversions by the names of all weights that they make, which a run on the meta device tells."""
    made: dict[str, Conversion] = {}
    for conversion in found:
        try:
            tensors = conversion.run(causal, on_meta)
        except Exception as error:
            text = f"the checkpoint's tensors do not make {conversion.target}: {first_line(error)}"
            raise LoadError(text) from error
        for name, tensor in tensors.items():
            if name not in weights:
                raise LoadError(
                    f"the checkpoint's {conversion.sources[0][0]} makes {name}, which the model lacks"
                )
            if tensor.shape != weights[name].shape:
                raise LoadError(
                    f"{name} of the checkpoint is of shape {tuple(tensor.shape)}, "
                    f"of the model {tuple(weights[name].shape)}"
                )
            made[name] = conversion
    return made


def check_names(causal: Any, missing: set[str], unexpected: set[str]) -> None:
    """Refuse a checkpoint that does not fit the module, but for names that transformers knows to be harmless.

    Raises:
        LoadError: weights are missing, or there are tensors that belong to no weight.
    """
    report = SimpleNamespace(missing_keys=missing, unexpected_keys=unexpected)
    causal._adjust_missing_and_unexpected_keys(report)
    check_report(causal.config.model_type, report.missing_keys, report.unexpected_keys)


def check_report(model_type: str, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """Raise LoadError if weights are missing, or if there are tensors that belong to no weight."""
    if names := sorted(missing):
        raise LoadError(f"the checkpoint lacks {len(names)} weights of {model_type}: {_some(names)}")
    unexpected = without_mtp(unexpected)
    if names := sorted(name for name in unexpected if not (UNUSED.search(name) or KV_SCALE.search(name))):
        raise LoadError(
            f"the checkpoint holds {len(names)} tensors that {model_type} has no use for: {_some(names)}; "
            "its config.json may be of another model"
        )


def _some(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
