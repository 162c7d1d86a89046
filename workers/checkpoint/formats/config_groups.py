"""The settings of a compressed-tensors checkpoint: several ways of quantising, and which modules have which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagewire.ipc.quoting import quoted
from pagewire.workers.checkpoint.formats.checks import integer_setting, pattern, switch
from pagewire.workers.errors import LoadError
from pagewire.workers.name_patterns import NamePattern

STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")
FORMATS = (
    *("dense", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)
MIXED = "mixed-precision"
"""The format of a checkpoint whose groups have several."""


@dataclass(frozen=True)
class WeightSettings:
    """How the matrices of a group of modules were quantised."""

    kind: str
    """ "int" or "float"."""
    bits: int
    """From 1 to 8; 4 or 8 for floats."""
    symmetric: bool
    strategy: str
    """What has a scale: the whole "tensor", a "channel" (a row), a "group" of columns of a row, a "block".

    A "tensor_group" is a group whose scales have a factor for the whole tensor.
    """
    group: int
    """The columns of a group or of a block; 0 for the other strategies."""
    block_rows: int
    """The rows of a block; 0 for the other strategies."""
    rounds_rows: bool = False
    """Activations have 8 bits, too, of the same kind."""

    @staticmethod
    def of(config: Mapping[str, Any], where: str, activations: object = None) -> WeightSettings:
        """The settings in the field `weights` of a group. where: its name, for messages.

        activations: the field `input_activations`.

        Raises:
            LoadError: they are not served.
        """
        kind, bits = str(config.get("type") or "int").lower(), integer_setting(config, ["num_bits"], 8)
        if kind not in ("int", "float") or not 1 <= bits <= 8 or (kind == "float" and bits not in (4, 8)):
            raise LoadError(
                f"{where}: weights of type {kind!r} with {bits} bits are not served; "
                "int with 1 to 8 bits and float with 4 or 8 are"
            )
        group = integer_setting(config, ["group_size"], 0)
        default = "tensor" if group == 0 else "channel" if group == -1 else "group"
        strategy = str(config.get("strategy") or default).lower()
        if strategy not in STRATEGIES:
            raise LoadError(f"{where}: the strategy {strategy!r} is not served; {', '.join(STRATEGIES)} are")
        rows, columns = _block(config.get("block_structure"), where) if strategy == "block" else (0, 0)
        if strategy in ("group", "tensor_group"):
            columns = group
        if strategy in ("group", "tensor_group", "block") and columns < 1:
            raise LoadError(f"{where}: groups of {columns} columns are not served")
        if strategy == "tensor_group" and (kind, bits) != ("float", 4):
            raise LoadError(f"{where}: the strategy {strategy!r} is served only for floats of 4 bits")
        symmetric = switch(config, "symmetric", True)
        if kind == "float" and not symmetric:
            raise LoadError(f"{where}: floats with zeros are not served")
        rounds_rows = isinstance(activations, Mapping) and bits == 8 and _of_8_bits(activations, kind)
        return WeightSettings(kind, bits, symmetric, strategy, columns, rows, rounds_rows)


def _of_8_bits(activations: Mapping[str, Any], kind: str) -> bool:
    return activations.get("num_bits", 8) == 8 and str(activations.get("type") or "int").lower() == kind


def _block(value: Any, where: str) -> tuple[int, int]:
    if isinstance(value, str):
        value = [int(size) if size.isdecimal() else 0 for size in value.split("x")]
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
        raise LoadError(
            f"{where}: block_structure must be two numbers of rows and columns, not {quoted(value)}"
        )
    return value[0], value[1]


@dataclass(frozen=True)
class Names:
    """Names of modules: in full, as patterns, or by the names of their classes."""

    full: frozenset[str]
    patterns: tuple[NamePattern, ...]
    classes: tuple[str, ...]

    @staticmethod
    def of(texts: Any, where: str) -> Names:
        """The names in a list. where: the name of the field, for messages.

        Raises:
            LoadError: it is no list of strings, or a pattern cannot be compiled.
        """
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise LoadError(f"{where} must be a list of strings, not {quoted(texts)}")
        patterns = tuple(pattern(text.removeprefix("re:")) for text in texts if text.startswith("re:"))
        classes = tuple(text for text in texts if text[:1].isupper())
        return Names(frozenset(texts), patterns, classes)

    def match(self, name: str) -> bool:
        """Whether the name of a module is one of these, or fits a pattern."""
        return name in self.full or any(names.match(name) for names in self.patterns)


@dataclass(frozen=True)
class Group:
    """One of `config_groups`."""

    targets: Names
    weights: WeightSettings


@dataclass
class ConfigGroups:
    """Which matrices are quantised, and how."""

    groups: list[Group] = field(default_factory=list)
    ignored: Names = field(default_factory=lambda: Names.of([], "ignore"))
    static: bool = False
    """There are scales of activations in the checkpoint."""

    @staticmethod
    def of(config: Mapping[str, Any]) -> ConfigGroups:
        """The groups in a `quantization_config`.

        Raises:
            LoadError: one of them is malformed or not served.
        """
        fields = config.get("config_groups") or {}
        if not isinstance(fields, Mapping):
            raise LoadError(f"config_groups must be an object, not {quoted(fields)}")
        found = ConfigGroups(ignored=Names.of(config.get("ignore") or [], "ignore"))
        for key, group in fields.items():
            where = f"config_groups[{key!r}]"
            if not isinstance(group, Mapping):
                raise LoadError(f"{where} must be an object with all settings, not {quoted(group)}")
            _check_format(group.get("format") or config.get("format"), where)
            for activations in (group.get("input_activations"), group.get("output_activations")):
                # "local": groups have scales of their own, and a static one for all of them.
                found.static |= isinstance(activations, Mapping) and activations.get("dynamic") is not True
            if isinstance(weights := group.get("weights"), Mapping):
                targets = Names.of(group.get("targets") or [], f"{where}: targets")
                settings = WeightSettings.of(weights, where, group.get("input_activations"))
                found.groups.append(Group(targets, settings))
        return found

    def settings(self, name: str) -> WeightSettings:
        """How the matrix of a quantised module was quantised.

        Raises:
            LoadError: no group has such a module, or one cannot know which: classes are not known here.
        """
        if self.ignored.match(name):
            raise LoadError(f"{name} is quantised, although quantization_config has it in `ignore`")
        for group in self.groups:
            if name in group.targets.full:
                return group.weights
        for group in self.groups:
            if group.targets.match(name):
                return group.weights
        by_class = {group.weights: group.targets.classes for group in self.groups if group.targets.classes}
        if len(by_class) == 1:
            return next(iter(by_class))
        if by_class:
            raise LoadError(
                f"{name} may be of several of config_groups, since they name its class only: {[*by_class.values()]}"
            )
        raise LoadError(f"{name} is quantised, and in none of config_groups")


def _check_format(name: Any, where: str) -> None:
    if name not in (None, MIXED, *FORMATS):
        raise LoadError(
            f"{where}: the format {name!r} of compressed-tensors is not served; {', '.join(FORMATS)} are"
        )
