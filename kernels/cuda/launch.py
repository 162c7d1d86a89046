"""Launching kernels: each takes one parameter struct and runs on torch's current stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pagewire.kernels.cuda import compile
from pagewire.kernels.cuda.cubin import Cubin
from pagewire.kernels.cuda.limits import LaunchError, check_launch
from pagewire.kernels.cuda.source import Variant, parameter_dtype

Parameters = np.ndarray[tuple[int, ...], np.dtype[np.void]]
Function = Callable[..., None]
"""A loaded kernel: called with grid, block, arguments, bytes of shared memory, and stream."""

HOPPER = (9, 0)
"""The compute capability that has the products of warpgroups (compiled for sm_90a)."""
DEFAULT_SHARED_BYTES = 48 << 10
"""Shared memory, static and dynamic, that every kernel may use; more must be allowed before the launch."""


class KernelLauncher(Protocol):
    """Launches kernels on one device and describes the device. Tests use an emulation."""

    capability: tuple[int, int]
    """The device's compute capability."""
    multiprocessors: int
    """The device's number of multiprocessors."""

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
            grid: number of blocks along each of one to three axes; none of them 0.
            block: number of threads along each of one to three axes.
            parameters: from `pack`.
            shared_bytes: dynamic shared memory per block.
        """

    def load(
        self, variants: Sequence[Variant], progress: Callable[[int, int, Variant], object] | None = None
    ) -> None:
        """Prepare variants ahead of their first launch, see `CudaLauncher.load`."""


def pack(variant: Variant, **fields: Any) -> Parameters:
    """A variant's parameter struct: a tensor becomes its address, None a null pointer.

    Raises:
        TypeError: the fields are not those of the struct.
    """
    dtype = parameter_dtype(variant.source, variant.parameters)
    names = dtype.names or ()
    if fields.keys() != set(names):
        mismatch = ", ".join(sorted(fields.keys() ^ set(names)))
        raise TypeError(f"{variant.parameters}: missing or unknown fields: {mismatch}")
    return np.array([tuple(_field_value(fields[name]) for name in names)], dtype)


def _field_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.data_ptr()
    return 0 if value is None else value


class Driver(Protocol):
    """The driver calls of a launcher: those that need a device."""

    def load(self, image: bytes, symbol: str) -> Function:
        """Load a cubin and return the kernel named `symbol`."""

    def allow_shared(self, function: Function, num_bytes: int) -> None:
        """Raise a kernel's limit of dynamic shared memory to `num_bytes` per block."""

    def stream(self) -> Any:
        """Torch's current stream, in the form that `Function` takes."""

    def most_shared(self) -> int:
        """The bytes of shared memory that a block may have, once they are allowed."""


class CudaLauncher:
    """Launches kernels on one GPU, torch's current device. Kernels are compiled and loaded at first use."""

    def __init__(self, capability: tuple[int, int], multiprocessors: int, driver: Driver) -> None:
        """Use `CudaLauncher.at` for a device of this machine.

        Raises:
            compile.CompileError: there is no compiler, or it does not support this capability.
        """
        self.capability, self.multiprocessors = capability, multiprocessors
        self.arch = compile.architecture(capability)
        self._driver = driver
        self._functions: dict[Variant, Function] = {}
        self._cubins: dict[Variant, Cubin] = {}
        self._allowed: dict[tuple[Variant, tuple[int, ...]], int] = {}

    @classmethod
    def at(cls, index: int) -> CudaLauncher:
        """The launcher for the device `cuda:index`.

        Raises:
            LaunchError: torch finds no such device.
            compile.CompileError: see `__init__`.
        """
        if index >= torch.cuda.device_count():
            raise LaunchError(
                f"no device cuda:{index}: torch {torch.__version__} finds {torch.cuda.device_count()}"
            )
        properties = torch.cuda.get_device_properties(index)
        compile.nvrtc()  # raises a clear error where CuPy is missing, before CupyDriver imports it
        return cls((properties.major, properties.minor), properties.multi_processor_count, CupyDriver(index))

    def load(
        self, variants: Sequence[Variant], progress: Callable[[int, int, Variant], object] | None = None
    ) -> None:
        """Compile and load variants ahead of their first launch; during a graph's capture nothing may be loaded.

        Args:
            progress: see `compile.build`.

        Raises:
            compile.CompileError: see `compile.build`.
        """
        missing = [variant for variant in variants if variant not in self._functions]
        for variant, cubin in compile.build(missing, self.arch, progress).items():
            self._functions[variant] = self._driver.load(cubin.image, cubin.symbol)
            self._cubins[variant] = cubin

    def launch(
        self,
        variant: Variant,
        grid: Sequence[int],
        block: Sequence[int],
        parameters: Parameters,
        shared_bytes: int = 0,
    ) -> None:
        """See `KernelLauncher.launch`.

        Raises:
            LaunchError: the device cannot run it; the text names the kernel.
        """
        if (function := self._functions.get(variant)) is None:
            self.load([variant])
            function = self._functions[variant]
        if shared_bytes > self._allowed.get((variant, block := tuple(block)), -1):
            self._allow(variant, block, shared_bytes)
        try:
            # Of an array with fields, NumPy would first describe each to CuPy, which takes longer than the launch.
            plain = parameters.view(f"V{parameters.itemsize}")
            function(tuple(grid), block, (plain,), shared_bytes, self._driver.stream())
        except Exception as error:  # CuPy's own types, which name no kernel
            raise LaunchError(f"{variant.name}, grid {tuple(grid)}, block {block}: {error}") from error

    def _allow(self, variant: Variant, block: tuple[int, ...], shared_bytes: int) -> None:
        """Check the first launch of a shape, and raise the kernel's limit of shared memory if it has to be.

        Raises:
            LaunchError: the device cannot run it.
        """
        cubin = self._cubins[variant]
        check_launch(
            variant.name,
            block,
            bound=cubin.bound,
            registers=cubin.registers,
            shared_bytes=shared_bytes + cubin.shared_bytes,
            most_shared_bytes=self._driver.most_shared(),
        )
        self._allowed[variant, block] = shared_bytes
        most = max(allowed for (other, _), allowed in self._allowed.items() if other == variant)
        if most + cubin.shared_bytes > DEFAULT_SHARED_BYTES:
            self._driver.allow_shared(self._functions[variant], most)


class CupyDriver:
    """The driver calls, through CuPy."""

    def __init__(self, index: int) -> None:
        import cupy

        self._index, self._cuda = index, cupy.cuda
        self._streams: dict[int, Any] = {}

    def load(self, image: bytes, symbol: str) -> Function:
        """See `Driver.load`."""
        with self._cuda.Device(self._index):
            module = self._cuda.Module()
            module.load(image)
            function: Function = module.get_function(symbol)
        return function

    def allow_shared(self, function: Function, num_bytes: int) -> None:
        """See `Driver.allow_shared`."""
        driver = self._cuda.driver
        attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.funcSetAttribute(function.ptr, attribute, num_bytes)  # type: ignore[attr-defined]

    def most_shared(self) -> int:
        """See `Driver.most_shared`."""
        runtime = self._cuda.runtime
        attribute = runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin
        return int(runtime.deviceGetAttribute(attribute, self._index))

    def stream(self) -> Any:
        """See `Driver.stream`."""
        address = torch._C._cuda_getCurrentRawStream(self._index)  # without an object of PyTorch's
        if (stream := self._streams.get(address)) is None:
            stream = self._streams[address] = self._cuda.ExternalStream(address, self._index)
        return stream
