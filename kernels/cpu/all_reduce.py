"""Sums over ranks for stack.cpp, which calls them in the midst of a step."""

from __future__ import annotations

import ctypes

import torch

from pagewire.kernels.cpu.tensors import DTYPES
from pagewire.kernels.data.reduced import NativeSum, Sum

FUNCTION = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32
)
DTYPE_OF = {code: dtype for dtype, code in DTYPES.items()}


class AllReduce:
    """A sum over ranks as a C function; it calls Python where the ranks have no function of their own.

    function, ranks: addresses of the function, and of its first argument.
    """

    @classmethod
    def of(cls, ranks: Sum | None) -> AllReduce | None:
        """None where nothing is to be added up."""
        return None if ranks is None else cls(ranks)

    def __init__(self, ranks: Sum) -> None:
        self._sum = ranks
        self._error: BaseException | None = None
        self._callback = FUNCTION(self._add_up)
        through_python = ctypes.cast(self._callback, ctypes.c_void_p).value or 0, 0
        self.function, self.ranks = (
            ranks.native_all_reduce if isinstance(ranks, NativeSum) else through_python
        )

    def check(self) -> None:
        """Raise what the ranks' Python code has raised in the last call; the numbers are then wrong."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _add_up(self, _: int | None, address: int, count: int, code: int, num_threads: int) -> None:
        if self._error is not None or count == 0:
            return
        try:
            dtype = DTYPE_OF[code]
            memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
            x = torch.frombuffer(memory, dtype=dtype)
            if (total := self._sum.all_reduce(x)).data_ptr() != address:
                x.copy_(total)
        except BaseException as error:  # an exception cannot pass through C
            self._error = error
