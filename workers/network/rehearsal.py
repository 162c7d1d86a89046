"""Runs a module on the meta device, where tensors have shapes and no numbers, before any of its weights are read.

So a model that cannot be served is refused in a moment, whatever its size. What depends on numbers cannot be run
there; then the proof (`proof.py`) has the first word.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.overrides import TorchFunctionMode

from pagewire.kernels.data.paging import AttentionBatch
from pagewire.kernels.data.states import StateBatch
from pagewire.workers.caches.kv import KVShape
from pagewire.workers.caches.states import StateShape
from pagewire.workers.errors import LoadError, first_line
from pagewire.workers.module import attention
from pagewire.workers.module.configuration import state_layers
from pagewire.workers.module.invariant import OTHER_PRODUCT
from pagewire.workers.module.matrices import is_experts, is_linear, is_transposed
from pagewire.workers.module.refusals import refuse
from pagewire.workers.module.replaced_methods import METHODS
from pagewire.workers.network.module_base import ModuleHead, arithmetic
from pagewire.workers.network.proof import NOT_REPLACED, check_calls, check_windows
from pagewire.workers.step.context import StepContext
from pagewire.workers.step.recorder import AttentionCalls
from pagewire.workers.versions import name_attention

logger = logging.getLogger("pagewire.worker")

NUM_TOKENS = 4
PRODUCTS = {F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__}
EXPERTS = "pagewire-shapes"
"""The name under which transformers finds experts that compute nothing."""


class ShapesContext(StepContext):
    """A step on the meta device: it records calls of attention, and counts states. Results have shapes only."""

    __slots__ = ("calls", "num_states")

    def __init__(self, positions: Tensor, calls: AttentionCalls) -> None:
        none = torch.zeros(0, dtype=torch.int32)
        super().__init__(AttentionBatch(none, none, none, none, NUM_TOKENS, NUM_TOKENS), positions, [])
        self.calls, self.num_states = calls, 0

    def hand_on(
        self, shape: StateShape, values: Tensor, kernel: Callable[[Tensor, StateBatch], Tensor]
    ) -> Tensor:
        self.num_states += 1
        return torch.empty_like(values)

    @property
    def places(self) -> Tensor:
        """The positions: the tokens are the first of a sequence."""
        return self.positions

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if layer in self.calls.num_calls:  # some repeat all layers many times
            raise LoadError(f"layer {layer} calls attention more than once")
        self.calls.add(layer, KVShape.of(k, v), kwargs.get("window") or kwargs.get("chunk"))
        return q.new_empty(*q.shape[:2], v.shape[2])


class LinearWeight(Tensor):
    """The weight of a linear layer; whatever is computed from it is one as well."""


class LayersOnly(TorchFunctionMode):
    """A context in which no product may be computed with the weight of a linear layer beside the layer itself.

    Packed layers have no such weight (`LinearModule`).
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by PyTorch in place of each of its functions; the mode is off within."""
        if func in PRODUCTS and any(isinstance(arg, LinearWeight) for arg in args):
            raise LoadError(OTHER_PRODUCT)
        return func(*args, **kwargs or {})


@torch.inference_mode()
def rehearse(causal: Any, max_model_len: int) -> None:
    """Refuse a module on the meta device if its layers or its logits are not as they must be.

    A copy runs, since some modules remember what they have computed.

    Raises:
        LoadError: it cannot be served; the text says why.
    """
    config = causal.config
    if not hasattr(causal, causal.base_model_prefix):
        raise refuse(config, f"{type(causal).__name__} has no base model {causal.base_model_prefix!r}")
    twin = _without_arithmetic(deepcopy(causal))
    ids = torch.zeros(1, NUM_TOKENS, dtype=torch.long, device="meta")
    hidden = torch.empty(NUM_TOKENS, _width(twin), dtype=twin.dtype, device="meta")
    calls = AttentionCalls(num_steps=1)
    step = ShapesContext(ids[0], calls)
    with LayersOnly(), step:
        if _on_shapes(
            config,
            "its forward pass fails",
            lambda: twin(input_ids=ids, position_ids=ids, use_cache=False),
        ):
            check_calls(config, calls)
            check_windows(config, calls, max_model_len)
            if step.num_states == 0 and (kinds := state_layers(config)):
                raise refuse(config, f"it does not let its layers of type {', '.join(kinds)} be replaced")
        elif not calls.num_calls and not _may_call_ours(twin):
            raise refuse(config, NOT_REPLACED)
        head = ModuleHead(twin, arithmetic(batch_invariant=False))
        reason = "its output layers need more than the hidden states of its base model"
        _on_shapes(config, reason, lambda: head(hidden))


def _may_call_ours(causal: Any) -> bool:
    """True if some part of a module calls the attention that its configuration names, or is ours in part."""
    from transformers import PreTrainedModel

    return any(
        type(module).__name__ in METHODS
        or type(module).__module__.startswith("pagewire.")
        or (isinstance(module, PreTrainedModel) and module._can_set_attn_implementation())
        for module in causal.modules()
    )


def _width(causal: Any) -> int:
    """The size of the hidden states that a module's output layers take."""
    output = causal.get_output_embeddings()
    size: int = causal.config.get_text_config().hidden_size if output is None else output.weight.shape[1]
    return size


def _on_shapes(config: Any, reason: str, run: Callable[[], object]) -> bool:
    """Run something on the meta device; False if it depends on numbers.

    Raises:
        LoadError: it fails for this reason.
    """
    try:
        run()
    except LoadError as error:
        raise refuse(config, str(error)) from error
    except Exception as error:
        if "meta" in str(error):
            logger.debug("not rehearsed: %s", first_line(error))
            return False
        raise refuse(config, f"{reason} ({type(error).__name__}: {first_line(error)})") from error
    return True


def _without_arithmetic(causal: Any) -> Any:
    """A module that calls our attention, and whose linear layers and experts compute nothing but shapes."""
    from transformers.integrations.moe import ExpertsInterface

    attention.register()
    name_attention(causal, attention.NAME)
    ExpertsInterface.register(EXPERTS, lambda module, hidden, ids, weights: torch.empty_like(hidden))
    modules: list[Any] = list(causal.modules())
    for module in modules:
        if is_experts(module):
            module.config._experts_implementation = EXPERTS
        elif is_linear(module):
            weight = module._parameters["weight"].detach()
            module.forward = partial(_shaped, weight.shape[1 if is_transposed(module) else 0])
            module._parameters["weight"] = weight.as_subclass(LinearWeight)
    return causal


def _shaped(out_features: int, x: Tensor) -> Tensor:
    """The result of a linear layer for x [..., K], of which there is only the shape."""
    return x.new_empty(*x.shape[:-1], out_features)
