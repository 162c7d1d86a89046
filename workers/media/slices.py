"""Passes through an encoder that stop between its layers and go on in a later step.

An encoder is transformers' own code, which calls its layers one after the other and cannot be left in between.
So a pass in slices has a thread of its own, which works only while `SlicedPass.advance` waits for it: it stops at a
gate before a layer, with all that it has computed so far where it is. The result is that of one piece, to the last
bit: nothing is computed twice, or in another order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import nn

T = TypeVar("T")


class Abandoned(BaseException):
    """Ends a pass that is not wanted any more, at the gate where it has stopped."""


class LayerGate:
    """Stands before each layer of an encoder, and stops the pass that has run its slice.

    layers: of the encoder; none: its passes run in one piece.

    Attributes:
        current: the sliced pass that runs; None: there is none, or another pass runs in one piece.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.num_layers = len(layers)
        self.current: SlicedPass[Any] | None = None
        for layer in layers:
            layer.forward = partial(self._enter, layer.forward)

    def _enter(self, forward: Callable[..., Any], *args: Any, **given: Any) -> Any:
        if self.current is not None:
            self.current.enter_layer()
        return forward(*args, **given)


class SlicedPass(Generic[T]):
    """A pass that runs in slices; nothing runs before the first `advance`.

    run: the pass. gate: before the layers that it calls. device: on which it computes.
    """

    def __init__(self, run: Callable[[], T], gate: LayerGate, device: torch.device) -> None:
        self._run, self._gate = run, gate
        # A new thread has the first GPU and its default stream.
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._num_entered = self._until = 0
        self._result: T | None = None
        self._error: BaseException | None = None
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._work, name="encoder", daemon=True)
        self._thread.start()

    def advance(self, until: int = 0) -> T | None:
        """Go on, and stop before layer `until`; 0: go on to the end. Returns the result; None: it has stopped.

        Raises what the pass raises.
        """
        self._until = until
        self._gate.current = self
        self._go.release()
        self._stopped.acquire()
        self._gate.current = None
        if self._error is not None:
            raise self._error
        return self._result

    def abandon(self) -> None:
        """End the pass where it has stopped, and let go of what it has computed."""
        self._is_abandoned = True
        self._go.release()
        self._thread.join()

    def enter_layer(self) -> None:
        """Stop if the slice ends before this layer; called by the pass."""
        if 0 < self._until <= self._num_entered:
            self._stopped.release()
            self._await_turn()
        self._num_entered += 1

    def _await_turn(self) -> None:
        self._go.acquire()
        if self._is_abandoned:
            raise Abandoned

    def _work(self) -> None:
        try:
            self._await_turn()
            with torch.cuda.stream(self._stream):
                self._result = self._run()
        except Abandoned:
            return
        except BaseException as error:  # is raised again where the pass is waited for
            self._error = error
        self._stopped.release()


def cut_layers(encoder: nn.Module) -> LayerGate:
    """A gate before the layers of an encoder: those of its longest list, if it has a list of two or more."""
    lists = [module for module in encoder.modules() if isinstance(module, nn.ModuleList)]
    longest = max(lists, key=len, default=nn.ModuleList())
    return LayerGate(list(longest) if len(longest) > 1 else [])
