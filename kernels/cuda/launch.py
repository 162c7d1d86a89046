"""Launches kernels: one parameter struct each, on torch's current stream."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from pagewire.kernels.cuda.source import Variant, parameter_dtype

Parameters = np.ndarray[tuple[int, ...], np.dtype[np.void]]


class Device(Protocol):
    """What the kernels' Python faces need of a device. Tests put an emulation in its place."""

    multiprocessors: int
    capability: tuple[int, int]

    def launch(
        self,
        variant: Variant,
        grid: Sequence[int],
        block: Sequence[int],
        parameters: Parameters,
        shared_bytes: int = 0,
    ) -> None:
        """Start a kernel on the current stream.

        Args:
            grid: how many blocks, along one to three axes; none of them 0.
            block: how many threads, likewise.
            parameters: from `pack`.
            shared_bytes: dynamic shared memory per block.
        """


def pack(variant: Variant, **fields: Any) -> Parameters:
    """A variant's parameter struct: tensors give their address, None is a null pointer.

    Raises:
        TypeError: the fields are not those of the struct.
    """
    dtype = parameter_dtype(variant.source, variant.parameters)
    names = dtype.names or ()
    if fields.keys() != set(names):
        odd = ", ".join(sorted(fields.keys() ^ set(names)))
        raise TypeError(f"{variant.parameters}: missing or unknown fields: {odd}")
    return np.array([tuple(_number(fields[name]) for name in names)], dtype)


def _number(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.data_ptr()
    return 0 if value is None else value
