"""The most memory that tensors take at a time: what a GPU's allocator measures, of tensors on a CPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorPeak(TorchDispatchMode):
    """A context in which the memory of new tensors is counted, by PyTorch's operations.

    most: bytes of those that lived at the same time, at most.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = self._now = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = {storage_of(x)._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self._count(storage_of(x), given)
        return result

    def _count(self, storage: Any, given: set[int]) -> None:
        """Count a storage if it is new. given: those of the operation's arguments."""
        key, size = storage._cdata, storage.nbytes()
        if key in given or key in self._alive or not size:
            return
        self._alive[key] = size
        self._now += size
        self.most = max(self.most, self._now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._now -= self._alive.pop(key)


def storage_of(tensor: Tensor) -> Any:
    """The memory of a tensor, which views have in common."""
    return tensor.untyped_storage()
