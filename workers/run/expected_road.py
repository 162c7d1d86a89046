"""How the layers of a model should run on a CPU, by its module on the meta device: no weights are read.

The module is taken apart as `network/build.py` does it, up to where the values of weights decide: whether norms and
products compute what the kernels do. There the proof has the last word (`network/proof.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.kernels.cpu.build import REFERENCE
from pagewire.kernels.cpu.library import expected_isa
from pagewire.workers.families.structures import LayerParts, OtherStructureError
from pagewire.workers.module.configuration import load_config, resolve_dtype, state_layers
from pagewire.workers.module.matrices import is_linear
from pagewire.workers.module.text_base import base_path, without_picture_layers
from pagewire.workers.module.transforms import tabulate_rotary
from pagewire.workers.module.weights import Weights
from pagewire.workers.network.build import layers_of
from pagewire.workers.network.build_module import module_on_meta, quantisation
from pagewire.workers.network.loaded import ENCODER_DECODER, Road, road_summary
from pagewire.workers.network.loading import ONE_BY_ONE
from pagewire.workers.network.pooling_info import module_class, spec_of
from pagewire.workers.network.proof import check_config
from pagewire.workers.run.decoding import (
    MODULE_HEAD,
    MODULE_LAYERS,
    NO_COMPILED_STACK,
    OTHER_KINDS,
    refusal_by_options,
)

NUM_POSITIONS = 1  # rows of the tables of angles: only their shape matters here


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
    encodes = spec is not None and spec.encoder
    if worker_config.lora is not None and (encodes or state_layers(config)):
        return ExpectedRoad(Road(None, ONE_BY_ONE), None if spec is not None else MODULE_LAYERS)
    quantisation(worker_config, config)  # takes its settings out of the configuration
    dtype = resolve_dtype(worker_config, config)
    module = module_on_meta(worker_config, config, dtype, module_class(spec))
    base = without_picture_layers(module.get_submodule(base_path(module)))
    tabulate_rotary(module, NUM_POSITIONS)
    try:
        parts = layers_of(base, Weights(module), encodes=encodes)
    except OtherStructureError as error:
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
    if not all(map(is_compiled, parts)) or len({sizes_of(part) for part in parts if part.attends}) > 1:
        return NO_COMPILED_STACK
    behind = [child for name, child in causal.named_children() if name != causal.base_model_prefix]
    if sum(map(is_linear, behind)) != 1:
        return MODULE_HEAD
    return OTHER_KINDS if any(part.halves for part in parts) else ""


def is_compiled(part: LayerParts) -> bool:
    """True if stack.cpp has all that a layer computes."""
    ends_plain = part.input_gate is None and part.output_scale is None and part.of_sum is None
    has_plain_values = part.value_norm is None and part.value_dim is None and part.value_scale == 1.0
    return ends_plain and has_plain_values and part.source is None and not part.values_are_keys


def sizes_of(part: LayerParts) -> tuple[int, ...]:
    """The sizes of a layer's attention, which are equal in all layers of a compiled stack that attend."""
    return part.head_dim, *(linear.weight.shape[0] for linear in part.qkv)
