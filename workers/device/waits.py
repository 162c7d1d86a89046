"""Finds operations for which the host waits for a GPU: a step with one cannot be recorded as a graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITING = {
    "aten::_local_scalar_dense",  # item, and what decides by a number
    "aten::bincount",
    "aten::equal",
    "aten::masked_select",
    "aten::nonzero",
    "aten::repeat_interleave.Tensor",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::unique_dim",
}
"""Operations whose results have sizes or values that the host must know."""
FROM_HOST = "aten::lift_fresh"
"""PyTorch's `tensor` makes its result by this; on a GPU it copies numbers there, and waits."""
COPIES = {"aten::_to_copy", "aten::copy_"}
INDEXING = {"aten::index.Tensor", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
"""Operations that look for the places of a mask, if they are given one."""


class WaitsError(RuntimeError):
    """The host would wait for the device. The message says in what."""


class WaitFinder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which operations that wait for the device raise WaitsError."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation that does not wait.

        Raises:
            WaitsError: it does.
        """
        if reason := why_it_waits(func, args):
            raise WaitsError(reason)
        result = func(*args, **(kwargs or {}))
        if len(set(devices_of((args, result), with_numbers=func.name() in COPIES))) > 1:
            raise WaitsError(f"{func.name()} copies between the host and the device")
        return result


def why_it_waits(func: Any, args: Sequence[Any]) -> str:
    """Why the host waits in an operation with these arguments; empty if it does not."""
    name = str(func.name())
    if name == FROM_HOST:
        return f"{name} copies numbers from the host"
    if name in WAITING:
        return f"{name} has a result that the host must know"
    if name in INDEXING and any(
        x.dtype in (torch.bool, torch.uint8) for x in tree_leaves(args[1]) if isinstance(x, Tensor)
    ):
        return f"{name} looks for the places of a mask"
    return ""


def devices_of(values: Any, *, with_numbers: bool) -> Iterator[str]:
    """The kinds of devices of tensors.

    with_numbers: also of single numbers on the host, which operations take as they are, but for copies.
    """
    for x in tree_leaves(values):
        if isinstance(x, Tensor) and (with_numbers or x.dim() > 0 or x.device.type != "cpu"):
            yield x.device.type
