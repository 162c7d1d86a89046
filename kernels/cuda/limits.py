"""The limits of kernels. A launch over one is refused by name, which drivers do not do. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

WARP = 32
REGISTERS = 65536
"""Of a multiprocessor, from sm_80 to sm_100: a block's registers must fit."""
REGISTER_UNIT = 8
"""The registers of a thread are allotted in multiples of this."""

MOST_SHARED_BYTES = {
    (8, 0): 163 << 10,
    (8, 7): 163 << 10,
    (9, 0): 227 << 10,
    (10, 0): 227 << 10,
    (10, 3): 227 << 10,
}
"""Shared memory that a block may have, by compute capability."""
LEAST_SHARED_BYTES = 99 << 10
"""That of all others."""
LATENTS = {288: 256, 576: 512}
"""Elements of latents that attention has kernels for, with the rotated ones; and of the values among them."""


class NoKernelError(ValueError):
    """No kernel takes rows of such a size, stride or alignment. The text says which."""


class LaunchError(RuntimeError):
    """A device cannot run kernels, or not this one. The message names it."""


def most_shared_bytes(capability: tuple[int, int]) -> int:
    """Bytes of shared memory that a block may have on devices of a compute capability, or a few less."""
    return MOST_SHARED_BYTES.get(capability, LEAST_SHARED_BYTES)


def check_launch(
    name: str,
    block: Sequence[int],
    *,
    bound: int,
    registers: int,
    shared_bytes: int,
    most_shared_bytes: int,
) -> None:
    """Refuse a launch that a device cannot run.

    Args:
        name: of the kernel.
        block: threads along each axis.
        bound: see `Cubin.bound`.
        registers: of a thread.
        shared_bytes: of a block, static and dynamic.
        most_shared_bytes: that the device allows a block.

    Raises:
        LaunchError: the block has too many threads, registers or bytes of shared memory.
    """
    threads = math.prod(block)
    if bound and threads > bound:
        raise LaunchError(f"{name}: {threads} threads in a block, but it is compiled for {bound} at most")
    warps = -(-threads // WARP)
    used = warps * WARP * -(-registers // REGISTER_UNIT) * REGISTER_UNIT
    if used > REGISTERS:
        raise LaunchError(f"{name}: {threads} threads of {registers} registers, but a block has {REGISTERS}")
    if shared_bytes > most_shared_bytes:
        raise LaunchError(
            f"{name}: {shared_bytes} bytes of shared memory, but the device has {most_shared_bytes} for a block"
        )
