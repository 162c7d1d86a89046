"""The configuration of an adapter in PEFT's format: `adapter_config.json`. Imports no torch.

Fields and their meaning are those of `LoraConfig` in https://github.com/huggingface/peft. What is not served is
refused by its name, and so is a field that is not known here, unless it is off.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from pagewire.ipc.quoting import quoted

Number = TypeVar("Number", int, float)

NAME = "adapter_config.json"
MAX_REPEATS = 4
"""Unbounded repeats in a pattern of names: with more, matching a name may take seconds."""
REFUSED = {
    "layer_replication": "the model would have other layers than its checkpoint",
    "megatron_config": "it is for Megatron's parallel layers",
    "trainable_token_indices": "save the whole embedding with modules_to_save instead",
    "target_parameters": "only linear layers and the embedding of tokens are adapted, no other parameters",
    "use_qalora": "its first matrix has groups of inputs",
    "alora_invocation_tokens": "it would apply from some token of a prompt on",
    "arrow_config": "it chooses among several adapters",
    "use_bdlora": "its matrices are made of blocks",
    "ensure_weight_tying": "name embed_tokens and lm_head in modules_to_save instead",
}
"""Fields that must be off, and why."""
CHANGES_BASE = ("pissa", "olora", "corda", "lora_ga")
"""Beginnings of `init_lora_weights` with which training starts from another base model."""
WITHOUT_EFFECT = {
    *("peft_type", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode"),
    *("lora_dropout", "init_lora_weights", "megatron_core", "loftq_config", "eva_config", "corda_config"),
    *("lora_ga_config", "runtime_config", "peft_version", "qalora_group_size", "velora_config"),
}
"""Fields that say nothing of how the adapter is applied, or that are checked elsewhere."""


class _Fields(msgspec.Struct):
    """The fields that are read, with PEFT's defaults."""

    r: int = 8
    lora_alpha: float = 8.0
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    use_rslora: bool = False
    use_dora: bool = False
    bias: str = "none"
    lora_bias: bool = False
    fan_in_fan_out: bool = False
    target_modules: str | list[str] | None = None
    exclude_modules: str | list[str] | None = None
    layers_to_transform: int | list[int] | None = None
    layers_pattern: str | list[str] | None = None
    modules_to_save: list[str] | None = None
    base_model_name_or_path: str | None = None


@dataclass(frozen=True)
class AdapterConfig:
    """What an adapter's configuration says. A module is named as in the model of transformers."""

    fields: _Fields

    @classmethod
    def parse(cls, content: bytes) -> AdapterConfig:
        """The configuration in a file's content.

        Raises:
            ValueError: it cannot be read, or asks for what is not served; the text says what.
        """
        try:
            values = msgspec.json.decode(content, type=dict[str, Any])
            refuse_unserved(values)
            fields = msgspec.convert(values, _Fields, strict=True)
        except msgspec.DecodeError as error:
            raise ValueError(f"{NAME}: {error}") from error
        if fields.bias not in ("none", "all", "lora_only"):
            raise ValueError(f"{NAME}: bias must be none, all or lora_only, got {quoted(fields.bias)}")
        config = cls(fields)
        ranks = (fields.r, *(fields.rank_pattern or {}).values())
        alphas = (fields.lora_alpha, *(fields.alpha_pattern or {}).values())
        if min(ranks) < 1 or not all(map(math.isfinite, alphas)):
            raise ValueError(f"{NAME}: ranks of at least 1 and finite alphas expected, got {ranks}, {alphas}")
        for pattern in config.patterns():
            check_pattern(pattern)
        return config

    def patterns(self) -> list[str]:
        """All regular expressions in it."""
        names = [*(self.fields.rank_pattern or ()), *(self.fields.alpha_pattern or ())]
        kinds = (self.fields.target_modules, self.fields.exclude_modules)
        layers = self.fields.layers_pattern
        names += [layers] if isinstance(layers, str) else layers or []
        return names + [kind for kind in kinds if isinstance(kind, str)]

    def rank(self, module: str) -> int:
        """The rank of a module's matrices."""
        return by_pattern(self.fields.rank_pattern, module, self.fields.r)

    def scale(self, module: str) -> float:
        """What the product of a module's matrices is multiplied with; Kalajdzievski 2023 ("rsLoRA") for rslora."""
        rank, alpha = self.rank(module), by_pattern(self.fields.alpha_pattern, module, self.fields.lora_alpha)
        return alpha / (math.sqrt(rank) if self.fields.use_rslora else rank)

    def targets(self, module: str, is_output: bool) -> bool:
        """True if the module is to have matrices. is_output: it is the output layer, not one of "all-linear"."""
        fields = self.fields
        if fields.exclude_modules is not None and _names(fields.exclude_modules, module):
            return False
        if fields.target_modules == "all-linear":
            return not is_output
        if fields.target_modules is None or isinstance(fields.target_modules, str):
            return fields.target_modules is None or bool(re.fullmatch(fields.target_modules, module))
        return module in fields.target_modules or (
            _names(fields.target_modules, module) and self._in_layers(module)
        )

    def saves(self, module: str) -> bool:
        """True if the adapter has the module's whole weight."""
        names = self.fields.modules_to_save or ()
        return any(module == name or module.endswith(f".{name}") for name in names)

    def _in_layers(self, module: str) -> bool:
        chosen, patterns = self.fields.layers_to_transform, self.fields.layers_pattern
        if chosen is None:
            return True
        patterns = ([patterns] if isinstance(patterns, str) else patterns) if patterns else [r"[^.]*"]
        for pattern in patterns:
            if found := re.match(rf".*\.{pattern}\.(\d+)\.", module):
                return int(found[1]) in ([chosen] if isinstance(chosen, int) else chosen)
        return False


def refuse_unserved(values: Mapping[str, Any]) -> None:
    """Raise ValueError if a configuration asks for what is not served."""
    kind = values.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"{NAME}: peft_type {quoted(str(kind))} is not served, only 'LORA' is")
    for name, reason in REFUSED.items():
        if values.get(name):
            raise ValueError(f"{NAME}: {name} is not served: {reason}")
    begins = values.get("init_lora_weights")
    if isinstance(begins, str) and begins.lower().startswith(CHANGES_BASE):
        raise ValueError(
            f"{NAME}: init_lora_weights {quoted(begins)} is not served: it changes the base model; save the "
            "adapter with path_initial_model_for_weight_conversion, which makes an ordinary one"
        )
    known = {*_Fields.__struct_fields__, *REFUSED, *WITHOUT_EFFECT}
    if unknown := sorted(name for name, value in values.items() if value and name not in known):
        raise ValueError(f"{NAME}: {quoted(unknown[0])} is not known, and is not off")


def check_pattern(pattern: str) -> None:
    """Refuse a regular expression that is none, or that could take long.

    Raises:
        ValueError: why.
    """
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{NAME}: the pattern {quoted(pattern)} is none: {error}") from error
    bare = re.sub(r"\\.", "x", pattern)
    if len(re.findall(r"[*+{]", bare)) > MAX_REPEATS or re.search(r"\)[*+{]", bare):
        raise ValueError(
            f"{NAME}: the pattern {quoted(pattern)} repeats a group, or has more than {MAX_REPEATS} repeats: it "
            "could take too long"
        )


def by_pattern(patterns: Mapping[str, Number] | None, module: str, default: Number) -> Number:
    """The value of the first pattern that fits the end of a module's name."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _names(kind: str | list[str], module: str) -> bool:
    """True if a regular expression is the module's name, or one of a list is the end of it."""
    if isinstance(kind, str):
        return bool(re.fullmatch(kind, module))
    return any(module == name or module.endswith(f".{name}") for name in kind)
