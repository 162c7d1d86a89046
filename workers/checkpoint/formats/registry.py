"""The formats of quantised checkpoints by the names that checkpoints give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pagewire.workers.checkpoint.formats import (
    aqlm,
    awq,
    bitsandbytes,
    compressed_tensors,
    fp8,
    gptq,
    mxfp4,
    squeezellm,
)
from pagewire.workers.checkpoint.formats.format import Format
from pagewire.workers.errors import LoadError

READERS: dict[str, Callable[[Mapping[str, Any]], Format]] = {
    "aqlm": aqlm.of,
    "awq": awq.of,
    "bitsandbytes": bitsandbytes.of,
    "compressed-tensors": compressed_tensors.of,
    "fbgemm_fp8": fp8.of,
    "fp8": fp8.of,
    "gptq": gptq.of,
    "marlin": gptq.of,
    "mxfp4": mxfp4.of,
    "squeezellm": squeezellm.of,
}
"""`quant_method` to a function from `quantization_config` to a format."""


def format_of(quantization_config: Mapping[str, Any]) -> Format:
    """The format of a checkpoint by its `quantization_config`.

    Raises:
        LoadError: the method is unknown, or this kind of it is not served.
    """
    method = str(quantization_config.get("quant_method", "")).lower().replace("_", "-")
    readers = {name.replace("_", "-"): reader for name, reader in READERS.items()}
    if (reader := readers.get(method)) is None:
        raise LoadError(
            f"checkpoints quantised by {quantization_config.get('quant_method')!r} are not served; "
            f"those of {', '.join(READERS)} are"
        )
    return reader(quantization_config)
