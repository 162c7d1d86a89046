"""Chooses the implementation of the kernels by the device and the dtypes of tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from importlib import import_module
from types import ModuleType
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

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
        compiled = _of_cpus()
        return (compiled.load() if compiled.serves(tensors) else None) or reference
    if first.is_cuda:
        compiled = _of_gpus()
        return compiled.load(first.device.index) if compiled.serves(tensors) else reference
    raise NotImplementedError(f"no kernels for device {first.device.type!r}: 'cpu' and 'cuda' are served")


def states_for(first: Tensor) -> StateKernels:
    """The kernels of layers with states, for inputs like a tensor. On a GPU they say themselves what they lack.

    Raises:
        NotImplementedError, LaunchError, CompileError: see `implementation_for`.
    """
    if not first.is_cuda:
        return implementation_for(first).states
    return _of_gpus().load(first.device.index).states  # type: ignore[no-any-return]


# What runs on one kind of device is known by its name alone, and imported when the first tensor of such a device
# comes: who calls a kernel depends on `Kernels`, not on a device. It has `serves(tensors)`, and `load` makes them.
@functools.cache
def _of_cpus() -> ModuleType:
    return import_module("pagewire.kernels.cpu.kernels")


@functools.cache
def _of_gpus() -> ModuleType:
    return import_module("pagewire.kernels.cuda.kernels")


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
