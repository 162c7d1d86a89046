"""AutoRound checkpoints: its settings, around the layouts of GPTQ, AWQ and 4-bit floats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import regex

from pagewire.ipc.quoting import quoted
from pagewire.workers.checkpoint.formats import awq, floats, gptq
from pagewire.workers.checkpoint.formats.checks import integer_setting
from pagewire.workers.checkpoint.formats.format import Format
from pagewire.workers.errors import LoadError

PREFIX = "auto_round:"
LAYOUTS = {"auto_gptq": "gptq", "auto_round": "gptq_v2", "gptqmodel": "gptq_v2"}
"""Its names of GPTQ's layouts: zeros are stored less one in the first, as they are in the others."""
FLOATS = ("nv_fp", "mx_fp", "fp")
"""How names of data types begin that are floats; the others are integers."""
DENSE_BITS = 16


def of(config: Mapping[str, Any]) -> Format:
    """The format of a checkpoint by its `quantization_config`.

    Raises:
        LoadError: this kind of AutoRound is not served.
    """
    if config.get("rotation_config"):
        raise LoadError("AutoRound with a rotation_config is not served: activations would be rotated, too")
    if str(config.get("data_type") or "int").startswith(FLOATS):
        return floats.ScaledFloats("auto-round")
    packing = str(config.get("packing_format") or config.get("backend") or "auto_gptq")
    layout = packing.removeprefix(PREFIX)
    others = _others(config.get("extra_config") or {})
    if "awq" in layout:
        if differing := sorted(name for name, fields in others.items() if fields is not None):
            raise LoadError(
                f"AutoRound in AWQ's layout is served with one setting, and {differing[0]} has another"
            )
        return awq.of({**config, "version": "gemm", "zero_point": True})
    if layout not in LAYOUTS:
        raise LoadError(
            f"AutoRound with packing_format {quoted(packing)} is not served; "
            f"{', '.join((*LAYOUTS, 'auto_awq'))} are"
        )
    dynamic = {f"{'-' if fields is None else '+'}:{name}": fields or {} for name, fields in others.items()}
    return gptq.of({**config, "checkpoint_format": LAYOUTS[layout], "dynamic": dynamic})


def _others(layers: Any) -> dict[str, dict[str, Any] | None]:
    """Settings that differ, by patterns of names of modules; None: they are not quantised.

    Raises:
        LoadError: the field `extra_config` is malformed.
    """
    if not isinstance(layers, Mapping) or not all(isinstance(fields, Mapping) for fields in layers.values()):
        raise LoadError(
            f"quantization_config: extra_config must be an object of objects, not {quoted(layers)}"
        )
    found: dict[str, dict[str, Any] | None] = {}
    for name, fields in layers.items():
        # A name with other characters than those of modules is a pattern already.
        text = name if regex.search(r"[^\w.]", name) else f"{regex.escape(name)}$"
        if integer_setting(fields, ["bits"], 0) >= DENSE_BITS:
            found[text] = None
            continue
        found[text] = {
            key: fields[key] for key in ("bits", "group_size", "sym") if fields.get(key) is not None
        }
    return found
