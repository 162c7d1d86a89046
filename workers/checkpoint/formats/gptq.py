"""GPTQ checkpoints: integers of 2, 3, 4 or 8 bits, whose columns may have been quantised in another order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pagewire.workers.checkpoint.formats.checks import (
    check_complete,
    check_divides,
    check_shape,
    integer_setting,
    marlin_shape,
    need,
    need_scales,
    parts_by_module,
    pattern,
    switch,
)
from pagewire.workers.checkpoint.formats.format import (
    Dtype,
    Held,
    Parts,
    Tensor,
    Tensors,
    Weight,
    described,
    grouped,
)
from pagewire.workers.errors import LoadError
from pagewire.workers.name_patterns import NamePattern

BITS = (2, 3, 4, 8)
LAYOUTS = ("gptq", "gptq_v2", "marlin")
"""`checkpoint_format`: zeros are stored less one; as they are; there are none, and all else lies differently."""
MARLIN_PARTS = {"B", "s"}
SPARSE_PARTS = {"B_24", "B_meta"}


@dataclass(frozen=True)
class GPTQSettings:
    """How the matrix of a module was quantised."""

    bits: int
    group: int
    """Columns with a scale; -1: all of a row."""
    symmetric: bool
    """All zeros are `2 ** (bits - 1)`."""

    @staticmethod
    def of(config: Mapping[str, Any], default: GPTQSettings) -> GPTQSettings:
        """The settings in a config, or in one of its overrides.

        Raises:
            LoadError: they are not served.
        """
        bits = integer_setting(config, ("bits", "w_bit"), default.bits)
        group = integer_setting(config, ("group_size", "q_group_size"), default.group)
        if bits not in BITS:
            raise LoadError(f"GPTQ of {bits} bits is not served; {', '.join(map(str, BITS))} bits are")
        if group != -1 and group < 1:
            raise LoadError(f"GPTQ with groups of {group} columns is not served")
        return GPTQSettings(bits, group, switch(config, "sym", default.symmetric))


def of(config: Mapping[str, Any]) -> GptqFormat:
    """The format of a checkpoint by its `quantization_config`.

    Raises:
        LoadError: this kind of GPTQ is not served.
    """
    layout = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
    if switch(config, "is_marlin_format", False) or config.get("quant_method") == "marlin":
        layout = "marlin"
    if layout not in LAYOUTS:
        raise LoadError(f"GPTQ with checkpoint_format={layout!r} is not served; {', '.join(LAYOUTS)} are")
    words = str(config.get("pack_dtype") or "int32").removeprefix("torch.")
    if words != "int32":
        raise LoadError(f"GPTQ with pack_dtype={words!r} is not served; 'int32' is")
    if layout == "marlin":
        settings = GPTQSettings.of(config, GPTQSettings(4, 128, True))
        if settings.bits != 4 or not settings.symmetric:
            raise LoadError("GPTQ in the marlin layout is served only with 4 bits and sym=true")
    else:
        # A config that does not say so may be of either kind: then the zeros are read.
        settings = GPTQSettings.of(config, GPTQSettings(4, 128, False))
    return GptqFormat(layout, settings, Overrides(config.get("dynamic") or {}, settings))


class Overrides:
    """Settings of modules whose names match patterns: the field `dynamic`."""

    def __init__(self, dynamic: Any, settings: GPTQSettings) -> None:
        """Compile the patterns. settings: of the other modules.

        Raises:
            LoadError: the field is malformed, or the settings are not served.
        """
        if not isinstance(dynamic, Mapping):
            raise LoadError(f"quantization_config: dynamic must be an object, not {dynamic!r}")
        self._settings = settings
        self._dense: list[NamePattern] = []
        self._others: list[tuple[NamePattern, GPTQSettings]] = []
        for text, fields in dynamic.items():
            if text.startswith("-:"):
                self._dense.append(pattern(text.removeprefix("-:")))
            elif isinstance(fields, Mapping):
                self._others.append((pattern(text.removeprefix("+:")), GPTQSettings.of(fields, settings)))
            else:
                raise LoadError(f"quantization_config: dynamic[{text!r}] must be an object, not {fields!r}")

    def settings(self, name: str) -> GPTQSettings | None:
        """The settings of a module by its name; None: it is not quantised."""
        if any(dense.match(name) for dense in self._dense):
            return None
        return next((settings for names, settings in self._others if names.match(name)), self._settings)


class GptqFormat:
    """How matrices lie in a GPTQ checkpoint, where b is the number of bits.

    - gptq, gptq_v2: qweight int32 [K * b / 32, N], qzeros int32 [G, N * b / 32], scales [G, N], and often
      g_idx [K], the groups of the columns
    - marlin: B int32 [K / 16, 2 * N] and s [G, N]
    """

    name = "gptq"

    def __init__(self, layout: str, settings: GPTQSettings, overrides: Overrides) -> None:
        self._layout, self._settings, self._overrides = layout, settings, overrides
        parts = {"qweight", "qzeros", "scales", "g_idx"}
        self._needed = parts - {"g_idx"}
        if layout == "marlin":
            # The kernel's workspace is saved by some, and holds nothing.
            self._needed, parts = MARLIN_PARTS, MARLIN_PARTS | {"workspace"}
        self.suffixes = frozenset(parts)

    def check(self, names: Iterable[str]) -> None:
        """See `Format.check`."""
        names = list(names)
        if sparse := sorted(parts_by_module(names, SPARSE_PARTS)):
            raise LoadError(
                f"{sparse[0]} is in the layout of marlin_24, which is not served: 2 of 4 weights are left out"
            )
        check_complete(names, self._needed, self.suffixes)
        for module in parts_by_module(names, self._needed):
            self._of_module(module)

    def stored(self, name: str, tensors: Parts) -> Held:
        """See `Format.stored`."""
        settings = self._of_module(name)
        if self._layout == "marlin":
            return marlin_shape(name, tensors, "B", "s", settings.group)
        words, zeros = (need(name, tensors, suffix, "I32") for suffix in ("qweight", "qzeros"))
        check_divides(name, "bits in a column", words.shape[0] * 32, settings.bits)
        num_in, num_out = words.shape[0] * 32 // settings.bits, words.shape[1]
        check_divides(name, "bits in a row of zeros", num_out * settings.bits, 32)
        group = num_in if settings.group == -1 else settings.group
        num_groups = -(-num_in // group)
        check_shape(name, "qzeros", zeros, (num_groups, num_out * settings.bits // 32))
        scales = need_scales(name, tensors, "scales", (num_groups, num_out))
        held = grouped(settings.bits, num_in, group, scales, not settings.symmetric)
        return (num_out, num_in), held

    def weight(self, name: str, tensors: Tensors, dtype: Dtype) -> Weight:
        """See `Format.weight`."""
        import torch

        from pagewire.workers.checkpoint.formats.grouped import GroupedIntegers, group_index
        from pagewire.workers.checkpoint.formats.marlin import marlin_integers
        from pagewire.workers.checkpoint.formats.packing import unpacked

        settings = self._of_module(name)
        (_, num_in), _ = self.stored(name, described(tensors))
        if self._layout == "marlin":
            return marlin_integers(name, tensors, "B", "s", settings.group).weight(dtype)
        words, scales = tensors["qweight"].T.contiguous(), tensors["scales"].T
        # Four bits are in pairs already.
        codes = words.view(torch.uint8) if settings.bits == 4 else unpacked(words, settings.bits)
        zeros = self._zeros(name, tensors["qzeros"], settings)
        index = group_index(name, tensors, "g_idx", (num_in, scales.shape[1]))
        group = num_in if settings.group == -1 else settings.group
        integers = GroupedIntegers(
            f"{name}.scales", settings.bits, num_in, codes, scales, zeros, group, index
        )
        return integers.weight(dtype)

    def _of_module(self, name: str) -> GPTQSettings:
        if (settings := self._overrides.settings(name)) is None:
            raise LoadError(
                f"{name} is quantised, although quantization_config says in `dynamic` that it is not"
            )
        return settings

    def _zeros(self, name: str, words: Tensor, settings: GPTQSettings) -> Tensor | None:
        """The zeros uint8 [N, G] of words int32 [G, N * bits / 32]; None for symmetric integers.

        Raises:
            LoadError: the integers should be symmetric, and are not.
        """
        from pagewire.workers.checkpoint.formats.packing import unpacked

        bits, middle = settings.bits, 2 ** (settings.bits - 1)
        if settings.symmetric:
            # `checkpoint_format` may be wrong: kernels for symmetric integers read no zeros, and do not notice.
            stored = unpacked(words, bits)
            if not any((stored == value).all() for value in (middle, middle - 1)):
                raise LoadError(
                    f"{name}.qzeros are not all {middle}, although quantization_config says sym=true"
                )
            return None
        if self._layout == "gptq_v2":
            return unpacked(words, bits).T
        if bits == 3:
            return (unpacked(words, bits) + 1 & 7).T
        # Whole words were decremented: a zero of 0 has borrowed from the next.
        return unpacked(words + sum(1 << place for place in range(0, 32, bits)), bits).T
