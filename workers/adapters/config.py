"""The configuration of an adapter in PEFT's format: `adapter_config.json`. Imports no torch.

Fields and their meaning are those of `LoraConfig` in https://github.com/huggingface/peft. What is not served is
refused by its name, and so is a field that is not known here, unless it is off.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pagewire.ipc.files.model_configs import read_configs
from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.workers.name_patterns import MatchTime, NamePattern

Number = TypeVar("Number", int, float)

NAME = "adapter_config.json"
MAX_PATTERNS, MAX_PATTERN_CHARS = 2048, 1 << 16  # patterns of names in a configuration, and characters of all
REFUSED = {
    "layer_replication": "the model would have other layers than its checkpoint",
    "megatron_config": "it is for Megatron's parallel layers",
    "trainable_token_indices": "save the whole embedding with modules_to_save instead",
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
    "peft_type",
    "task_type",
    "auto_mapping",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "lora_dropout",
    "init_lora_weights",
    "megatron_core",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "runtime_config",
    "peft_version",
    "qalora_group_size",
    "velora_config",
}
"""Fields that say nothing of how the adapter is applied, or that are checked elsewhere."""

POSITIONS = ("max_position_embeddings", "n_positions")
"""Fields of a model's configuration: for how many tokens it has positions."""


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
    target_parameters: list[str] | None = None
    exclude_modules: str | list[str] | None = None
    layers_to_transform: int | list[int] | None = None
    layers_pattern: str | list[str] | None = None
    modules_to_save: list[str] | None = None
    context_length: int = 0
    base_model_name_or_path: str | None = None


class AdapterConfig:
    """What an adapter's configuration says. A module is named as in the model of transformers."""

    def __init__(self, fields: _Fields) -> None:
        """Compile the patterns of names.

        Raises:
            ValueError: one is none, or there are too many.
        """
        self.fields = fields
        ranks, alphas = fields.rank_pattern or {}, fields.alpha_pattern or {}
        layers = fields.layers_pattern or r"[^.]*"
        layers = [layers] if isinstance(layers, str) else layers
        kinds = (kind for kind in (fields.target_modules, fields.exclude_modules) if isinstance(kind, str))
        patterns = [*ranks, *alphas, *layers, *kinds]
        if len(patterns) > MAX_PATTERNS or sum(map(len, patterns)) > MAX_PATTERN_CHARS:
            raise ValueError(
                f"{NAME}: over {MAX_PATTERNS} patterns of names, or {MAX_PATTERN_CHARS:,} characters in them"
            )
        match_time = MatchTime()
        self._ranks, self._alphas = by_end(ranks, match_time), by_end(alphas, match_time)
        self._layers = [NamePattern(rf".*\.{pattern}\.(\d+)\..*", NAME, match_time) for pattern in layers]
        self._targets = kind_of(fields.target_modules, match_time)
        self._excluded = kind_of(fields.exclude_modules, match_time)
        self._parameters = frozenset(fields.target_parameters or ())
        self._saved = frozenset(fields.modules_to_save or ())
        chosen = fields.layers_to_transform
        self._chosen = None if chosen is None else frozenset([chosen] if isinstance(chosen, int) else chosen)

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
            raise ValueError(
                f"{NAME}: ranks of at least 1 and finite alphas expected, got {quoted(ranks)}, {quoted(alphas)}"
            )
        return config

    @property
    def max_rank(self) -> int:
        """The largest rank that it names."""
        return max(self.fields.r, *(self.fields.rank_pattern or {}).values(), 1)

    def rank(self, module: str) -> int:
        """The rank of the matrices of a module or a parameter."""
        return first_match(self._ranks, self._pattern_name(module), self.fields.r)

    def scale(self, module: str) -> float:
        """What the product of a module's matrices is multiplied with; Kalajdzievski 2023 ("rsLoRA") for rslora."""
        alpha = first_match(self._alphas, self._pattern_name(module), self.fields.lora_alpha)
        rank = self.rank(module)
        return alpha / (math.sqrt(rank) if self.fields.use_rslora else rank)

    def adapts(self, parameter: str) -> bool:
        """True if a parameter is one of `target_parameters`."""
        return named(self._parameters, parameter)

    def _pattern_name(self, module: str) -> str:
        """What patterns of ranks and alphas are matched with: the parameter, where that is what is named."""
        parameter = f"{module}.weight"
        return parameter if self.adapts(parameter) else module

    def targets(self, module: str, is_output: bool) -> bool:
        """True if the module is to have matrices. is_output: it is the output layer, not one of "all-linear"."""
        fields = self.fields
        if self.adapts(f"{module}.weight"):
            return True
        if self._excluded is not None and named(self._excluded, module):
            return False
        if fields.target_modules == "all-linear":
            return not is_output
        if self._targets is None or not named(self._targets, module):
            return self._targets is None and not self._parameters
        return isinstance(self._targets, NamePattern) or module in self._targets or self._in_layers(module)

    def saves(self, module: str) -> bool:
        """True if the adapter has the module's whole weight."""
        return named(self._saved, module)

    def _in_layers(self, module: str) -> bool:
        if self._chosen is None:
            return True
        found = next((found for names in self._layers if (found := names.fullmatch(module))), None)
        return found is not None and int(found[1]) in self._chosen


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


def check_context_length(context_length: int, config: WorkerConfig) -> None:
    """Refuse an adapter that was trained with positions scaled for more tokens than its model has positions for.

    Such an adapter has `context_length` in its configuration. Chen et al. 2023 ("LongLoRA") divide positions by the
    ratio of the two, rounded up, which is `rope_type` "linear".

    Raises:
        ValueError: the text says with which options it can be served.
    """
    values = read_configs(Path(config.model_path), config.trust_remote_code)[0] | config.hf_overrides
    text = {**values, **(values.get("text_config") or {})}
    limit = next((n for name in POSITIONS if isinstance(n := text.get(name), int) and n > 0), context_length)
    if context_length > limit:
        own = text.get("rope_parameters") or text.get("rope_scaling") or {}
        factor = -(-context_length // limit)
        scaling = {"rope_type": "linear", "factor": factor * own.get("factor", 1.0)}
        if "rope_theta" in own:  # where versions of transformers since 5 have it
            scaling["rope_theta"] = own["rope_theta"]
        overrides = {"rope_scaling": scaling, "max_position_embeddings": limit * factor}
        raise ValueError(
            f"it was trained for {context_length} tokens, and this model has positions for {limit}: all requests "
            "of an engine have one rotary embedding. Serve it in an engine of its own, with hf_overrides="
            f"{json.dumps(overrides)}"
        )


def kind_of(given: str | list[str] | None, match_time: MatchTime) -> NamePattern | frozenset[str] | None:
    """Modules as a configuration names them: by a regular expression, or by the ends of their names."""
    if isinstance(given, str):
        return NamePattern(given, NAME, match_time)
    return None if given is None else frozenset(given)


def named(kind: NamePattern | frozenset[str], module: str) -> bool:
    """True if a regular expression matches a module's name, or one of several names is the end of it."""
    if isinstance(kind, NamePattern):
        return kind.fullmatch(module) is not None
    parts = module.split(".")
    return any(".".join(parts[first:]) in kind for first in range(len(parts)))


def by_end(values: Mapping[str, Number], match_time: MatchTime) -> list[tuple[NamePattern, Number]]:
    """Values by regular expressions of the end of a module's name."""
    return [
        (NamePattern(rf"(.*\.)?({pattern})", NAME, match_time), value) for pattern, value in values.items()
    ]


def first_match(values: Iterable[tuple[NamePattern, Number]], module: str, default: Number) -> Number:
    """The value of the first pattern that a module's name matches."""
    return next((value for names, value in values if names.fullmatch(module)), default)
