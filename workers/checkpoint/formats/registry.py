"""The formats of quantised checkpoints by the names that checkpoints give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pagewire.ipc.quantization import FAMILIES, method_of
from pagewire.workers.checkpoint.formats import (
    aqlm,
    auto_round,
    awq,
    bitsandbytes,
    compressed_tensors,
    floats,
    gptq,
    hqq,
    mxfp4,
    squeezellm,
    torchao,
)
from pagewire.workers.checkpoint.formats.format import Format
from pagewire.workers.errors import LoadError

READERS: dict[str, Callable[[Mapping[str, Any]], Format]] = {
    "aqlm": aqlm.of,
    "auto-round": auto_round.of,
    "awq": awq.of,
    "bitsandbytes": bitsandbytes.of,
    "compressed-tensors": compressed_tensors.of,
    "fbgemm_fp8": floats.of,
    "fp8": floats.of,
    "gptq": gptq.of,
    "hqq": hqq.of,
    "modelopt": floats.of_modelopt,
    "mxfp4": mxfp4.of,
    "mxfp8": floats.of,
    "quark": floats.of_quark,
    "squeezellm": squeezellm.of,
    "torchao": torchao.of,
}
"""A family of `ipc.quantization.FAMILIES` to a function from `quantization_config` to a format."""


def format_of(quantization_config: Mapping[str, Any]) -> Format:
    """The format of a checkpoint by its `quantization_config`.

    Raises:
        LoadError: the method is unknown, or this kind of it is not served.
    """
    try:
        family = FAMILIES[str(method_of(quantization_config))]
        if (reader := READERS.get(family)) is None:
            raise LoadError(
                f"tensors in safetensors files are not quantised with {family!r}; name the file itself"
            )
        return reader(quantization_config)
    except LoadError:
        raise
    except KeyError as error:
        raise LoadError(f"quantization_config lacks {error.args[0]!r}") from error
    except ValueError as error:
        raise LoadError(str(error)) from error
