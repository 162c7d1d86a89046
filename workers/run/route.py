"""Which way a step takes, and why no faster one: the one answer for the choice, the log and the metrics.

The fast ways are one compiled call from rows to tokens (`decoding.py`), or from prompts to what is pooled
(`encoding.py`), and on a GPU a replay of what was recorded (`graphs.py`). The general way is `StepLauncher._launch`
and `RunningStep`, which is their reference: the tokens are the same.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from pagewire.ipc.wire.worker_messages import StepPlan, Way
from pagewire.kernels.data.paging import Cache
from pagewire.workers.adapters.interface import WorkerAdapters
from pagewire.workers.batch.slots import Slots
from pagewire.workers.network.loaded import LoadedModel
from pagewire.workers.run.interface import DecodingWay, EncodingWay, RecordedShape, RecordedSteps

logger = logging.getLogger("pagewire.worker")


class StepRoute(NamedTuple):
    """The way of a step."""

    way: Way
    why: str = ""
    """Why it takes none of the faster ways; empty on these."""
    shape: RecordedShape | None = None
    """To which a replay pads the step."""


class Routes:
    """Finds the routes of a worker's steps. Each new reason for the general way is logged once, at debug level."""

    def __init__(
        self, decoding: DecodingWay, encoding: EncodingWay, slots: Slots, adapters: WorkerAdapters
    ) -> None:
        self.decoding, self.encoding = decoding, encoding
        self._slots, self._adapters = slots, adapters
        self._reasons: set[str] = set()

    def use(self, loaded: LoadedModel, caches: Sequence[Cache], states: Sequence[Tensor]) -> None:
        """Steps run this model from now on, with these caches of its layers and their states."""
        self.decoding.use(loaded, caches, states)
        self.encoding.use(loaded)

    def forget(self) -> None:
        """Let go of the model and its caches."""
        self.decoding.forget()
        self.encoding.forget()

    def of(self, plan: StepPlan, graphs: RecordedSteps | None, *, profiled: bool) -> StepRoute:
        """The route of a plan that was applied to the slots.

        graphs: what is recorded; None: nothing is. profiled: a profiler looks on, which cannot see into a call.
        """
        if not plan.rows:
            return StepRoute(Way.GENERAL)
        if graphs is not None:
            shape = graphs.shape_for(plan, self._slots, self._adapters)
            return self._general(shape) if isinstance(shape, str) else StepRoute(Way.RECORDED, shape=shape)
        if profiled:
            return self._general("a profiler looks on")
        pools = plan.rows[0].pool
        why = self.encoding.refusal(plan) if pools else self.decoding.refusal(plan)
        return self._general(why) if why else StepRoute(Way.ENCODING if pools else Way.DECODING)

    def _general(self, why: str) -> StepRoute:
        if why not in self._reasons:
            self._reasons.add(why)
            logger.debug("some steps run operation by operation: %s", why)
        return StepRoute(Way.GENERAL, why)
