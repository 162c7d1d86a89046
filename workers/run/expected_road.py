"""How the layers of a model should run on a CPU, and steps that only decode (`network/expected.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.kernels.cpu.build import REFERENCE
from pagewire.kernels.cpu.library import expected_isa
from pagewire.workers.families.routers import RouterParts
from pagewire.workers.families.structures import LayerParts, OtherStructureError
from pagewire.workers.module.configuration import load_config
from pagewire.workers.module.experts import has_limits
from pagewire.workers.module.matrices import is_linear
from pagewire.workers.network.expected import network_options, parts_on_meta, refuse_options
from pagewire.workers.network.pooling_info import spec_of
from pagewire.workers.network.proof import check_config
from pagewire.workers.network.road import ENCODER_DECODER, Road, road_summary
from pagewire.workers.run.decoding import (
    MODULE_HEAD,
    MODULE_LAYERS,
    NO_COMPILED_STACK,
    OTHER_KINDS,
    refusal_by_options,
)


class ExpectedRoad(NamedTuple):
    """How layers should run, and steps that only decode.

    why_not: why these are no compiled call; empty: they should be one. None: the model pools.
    """

    road: Road
    why_not: str | None

    @property
    def sentence(self) -> str:
        """Both in a sentence."""
        return road_summary(self.road, self.why_not)


def expected_road(worker_config: WorkerConfig) -> ExpectedRoad:
    """How a model should run in one worker on a CPU.

    Raises:
        LoadError: it is not served; the text says why.
    """
    config = load_config(worker_config)
    check_config(config)
    spec = spec_of(worker_config)
    if getattr(config, "is_encoder_decoder", False):
        return ExpectedRoad(Road(None, ENCODER_DECODER), MODULE_LAYERS)
    try:
        module, parts = parts_on_meta(worker_config)
    except OtherStructureError as error:
        refuse_options(config, network_options(worker_config), str(error))
        return ExpectedRoad(Road(None, str(error)), None if spec is not None else MODULE_LAYERS)
    halves = sum(len(part.halves) for part in parts)
    road = Road(halves, next((part.why for part in parts if part.halves), ""))
    if spec is not None:
        return ExpectedRoad(road, None)
    if reason := refusal_by_options(worker_config):
        return ExpectedRoad(road, reason)
    compiles = expected_isa() != REFERENCE
    return ExpectedRoad(road, refusal_by_parts(module, parts) if compiles else NO_COMPILED_STACK)


def refusal_by_parts(causal: Any, parts: Sequence[LayerParts]) -> str:
    """Why layers of these parts and what is behind them are no compiled decoder, as `open_decoder` says it.

    Empty: they should be one.
    """
    if not all(map(is_compiled, parts)):
        return NO_COMPILED_STACK
    names, children = zip(*causal.named_children(), strict=True)
    beside = [child for name, child in zip(names, children, strict=True) if name != causal.base_model_prefix]
    first = names.index(causal.base_model_prefix) + 1 if causal.base_model_prefix in names else len(names)
    behind = [child for child in children[first:] if any(True for _ in child.parameters())]
    if sum(map(is_linear, beside)) != 1 or not all(map(is_linear, behind)):
        return MODULE_HEAD
    return OTHER_KINDS if any(part.halves for part in parts) else ""


def is_compiled(part: LayerParts) -> bool:
    """True if stack.cpp has all that a layer computes."""
    if part.value_dim is not None or part.value_scale != 1.0:
        return False
    if part.limited is not None or (part.mixture is not None and has_limits(part.mixture.experts)):
        return False
    return not part.softplus_gates and not (
        isinstance(part.router, RouterParts) and part.router.routing.by_logits
    )
