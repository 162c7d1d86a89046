"""Chooses the implementation of the kernels by the device and the dtypes of tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from pagewire.kernels.cpu import kernels as cpu_kernels
from pagewire.kernels.cpu.tensors import DTYPES
from pagewire.kernels.data.kv_codes import DTYPE as KV_CODES
from pagewire.kernels.data.paging import Cache
from pagewire.kernels.reference.kernels import Kernels, reference
from pagewire.kernels.reference.states import StateKernels

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

as_they_are = torch._C.DisableTorchFunction
"""A context in which no `TorchFunctionMode` sees PyTorch's functions, of which `Tensor.stride` is one, too."""


def implementation_for(*tensors: Tensor) -> Kernels:
    """The fastest implementation for tensors on this device and of these dtypes. None of them keeps gradients.

    tensors: the first is of the model's dtype; caches among the others may be of 8 bits.

    Raises:
        NotImplementedError: the tensors are neither on the CPU nor on a GPU.
        LaunchError, CompileError: the CUDA kernels cannot be loaded, see `cuda.launch`.
    """
    first = tensors[0]
    if first.is_cpu:
        dtype = first.dtype
        if dtype in DTYPES and {tensor.dtype for tensor in tensors} <= {dtype, KV_CODES}:
            return cpu_kernels.load() or reference
        return reference
    if first.is_cuda:
        from pagewire.kernels.cuda import kernels as cuda_kernels  # never imported where there is no GPU

        return cuda_kernels.load(first.device.index) if cuda_kernels.serves(tensors) else reference
    raise NotImplementedError(f"no kernels for device {first.device.type!r}: 'cpu' and 'cuda' are served")


def states_for(first: Tensor) -> StateKernels:
    """The kernels of layers with states, for inputs like a tensor. On a GPU they say themselves what they lack.

    Raises:
        NotImplementedError, LaunchError, CompileError: see `implementation_for`.
    """
    if not first.is_cuda:
        return implementation_for(first).states
    from pagewire.kernels.cuda import kernels as cuda_kernels  # never imported where there is no GPU

    return cuda_kernels.load(first.device.index).states


def dispatched(method: Callable[Concatenate[Kernels, Arguments], Result]) -> Callable[Arguments, Result]:
    """A method of `Kernels` as a function, which calls the implementation for the tensors among its arguments."""
    name = method.__name__

    @functools.wraps(method)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with as_they_are():
            kernels = implementation_for(*_operands((*args, *kwargs.values())))
            return getattr(kernels, name)(*args, **kwargs)  # type: ignore[no-any-return]

    return call


def dispatched_states(
    method: Callable[Concatenate[StateKernels, Tensor, Arguments], Result],
) -> Callable[Concatenate[Tensor, Arguments], Result]:
    """A method of `StateKernels` as a function. Its first tensor decides: states and factors are float32 anyway."""
    name = method.__name__

    @functools.wraps(method)
    def call(first: Tensor, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with as_they_are():
            return getattr(states_for(first), name)(first, *args, **kwargs)  # type: ignore[no-any-return]

    return call


def _operands(arguments: Iterable[object]) -> list[Tensor]:
    """The tensors of numbers among the arguments of a kernel; neither indices nor masks."""
    found: list[Tensor] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            if argument.dtype.is_floating_point:
                found.append(argument)
        elif isinstance(argument, Cache):
            found += argument.k, argument.v
        elif isinstance(argument, tuple):  # angles
            found += _operands(argument)
    return found
