"""A recorded step as a CUDA graph has it: the operations and launches, over the memory that they had."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pagewire.workers.device.waits import why_it_waits
from tests.kernels.cuda.emulate.launcher import EmulatedLauncher

REFUSED = "operation not permitted when stream is capturing"
ON_HOST = ("tolist", "numpy", "cpu", "__array__")
"""Methods by which the host looks at a tensor, without an operation if it is a CPU's."""


class Tape(TorchDispatchMode):
    """A context whose operations and launches are kept, to be run again.

    Numbers that the host computes meanwhile are those of the recording for ever, as in a CUDA graph. What a graph
    cannot have is refused.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Callable[[], object]] = []
        self._kept: list[object] = []
        self._made: set[int] = set()

    def record(self, work: Callable[[], Tensor]) -> Tensor:
        """Run `work`, and keep what it does.

        Raises:
            RuntimeError: it waits for the device.
        """
        launch = EmulatedLauncher.launch

        def kept_launch(
            launcher: EmulatedLauncher,
            variant: Any,
            grid: Any,
            block: Any,
            parameters: Any,
            shared_bytes: int = 0,
        ) -> None:
            arguments = (launcher, variant, grid, block, parameters.copy(), shared_bytes)
            launch(*arguments)
            self._calls.append(lambda: launch(*arguments))

        with pytest.MonkeyPatch.context() as patch, self._hidden_from_host(), self:
            patch.setattr(EmulatedLauncher, "launch", kept_launch)
            return work()

    def replay(self) -> None:
        """Do all of it again, on the same memory."""
        for call in self._calls:
            call()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if reason := why_it_waits(func, args):
            raise RuntimeError(f"{REFUSED}: {reason}")
        result = func(*args, **kwargs)
        self._kept.append((args, kwargs, result))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        self._made |= {x.untyped_storage()._cdata for x in made} - given
        if func._schema.is_mutable:
            self._calls.append(lambda: func(*args, **kwargs))
        elif "empty" not in func.name() and any(x.untyped_storage()._cdata not in given for x in made):
            self._calls.append(lambda: copy_all(func(*args, **kwargs), made))
        return result

    @contextmanager
    def _hidden_from_host(self) -> Iterator[None]:
        """A context in which the host cannot look at tensors that were made on the tape."""
        with pytest.MonkeyPatch.context() as patch:
            for name in ON_HOST:
                look = getattr(torch.Tensor, name)

                def checked(x: Tensor, *args: Any, look: Any = look, **kwargs: Any) -> Any:
                    if x.untyped_storage()._cdata in self._made:
                        raise RuntimeError(f"{REFUSED}: the host looks at a tensor")
                    return look(x, *args, **kwargs)

                patch.setattr(torch.Tensor, name, checked)
            yield


def copy_all(result: Any, targets: Sequence[Tensor]) -> None:
    """Copy the tensors of a result into others, in order."""
    for target, source in zip(
        targets, [x for x in tree_leaves(result) if isinstance(x, Tensor)], strict=True
    ):
        target.copy_(source)
