"""The parts of a loaded model that adapters may change, by the names of their modules in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pagewire.kernels.adapted import Adapted
from pagewire.kernels.deltas import Shapes
from pagewire.kernels.layer import Layer, product_shapes
from pagewire.kernels.linear import Linear
from pagewire.kernels.reduced import Reduced
from pagewire.workers.adapters.division import whole_shape
from pagewire.workers.adapters.embedding import AdaptedEmbedding
from pagewire.workers.errors import LoadError
from pagewire.workers.model.attention import current_adapters
from pagewire.workers.model.encoder import EncoderModel
from pagewire.workers.model.loading import LoadedModel
from pagewire.workers.model.model import Model
from pagewire.workers.model.parallel_layers import DividedEmbedding, GatheredLinear
from pagewire.workers.model.pooling_model import Headless
from pagewire.workers.model.shards import Cut
from pagewire.workers.model.stack import DecoderStack
from pagewire.workers.model.transforms import LinearModule, QuantisedEmbedding

BASE, OUTPUT = "model", "lm_head"
"""The names of the base and of the output layer in a model whose layers run as a stack."""
EMBEDDINGS = (nn.Embedding, QuantisedEmbedding)
"""Types of embeddings that adapters can change."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a module's outputs are: those from `first` on, `num_out` in number, of a product of the model.

    cut: how the module is divided over the ranks, of which this one has these outputs and `num_in` inputs.
    linear: None for a module of another stage, which is in no product of this one.
    """

    product: int
    first: int
    num_out: int
    num_in: int
    linear: Linear | None
    is_output: bool = False
    cut: Cut | None = None

    @property
    def is_elsewhere(self) -> bool:
        """True if another stage of the pipeline has the module: what an adapter has for it is checked only."""
        return self.linear is None

    @property
    def whole(self) -> tuple[int, int]:
        """The outputs and inputs of the module on all ranks."""
        return whole_shape((self.num_out, self.num_in), self.cut)

    def bias(self, device: torch.device) -> Tensor:
        """The module's own bias on this rank, float32 [num_out]; zeros if it has none. device: of the model."""
        if self.linear is None:
            return torch.zeros(self.num_out)
        row = self.linear(torch.zeros(1, self.num_in, dtype=self.linear.dtype, device=device))
        return row[0, self.first : self.first + self.num_out].float().cpu()


@dataclass
class Targets:
    """The linear layers and the embedding of a model, and where their products are.

    places: of linear layers by name. embedding: its name, and its rows and their size (V, H); empty if it cannot be
    adapted. vectors: other parameters that adapters may repeat. dtype: of the model.
    cuts: how parameters are divided over the ranks, by name.
    has_embedding: False if another stage has it. Vectors of other stages are on the meta device.
    """

    dtype: torch.dtype
    device: torch.device
    prefix: str = f"{BASE}."
    places: dict[str, Place] = field(default_factory=dict)
    embedding: str = ""
    embedding_shape: tuple[int, int] = (0, 0)
    vectors: dict[str, Tensor] = field(default_factory=dict)
    shapes: Shapes = ()
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    has_embedding: bool = True

    @classmethod
    def of(cls, loaded: LoadedModel, device: torch.device) -> Targets:
        """Find the parts of a model that was just loaded, and make them ask for the adapters of their rows.

        Raises:
            LoadError: its layers are not called with all rows of a step.
        """
        model = loaded.model
        if isinstance(model, EncoderModel) and not model.packed:
            raise LoadError(
                "enable_lora: this encoder runs prompt by prompt, for which adapters are not served"
            )
        targets = cls(loaded.dtype, device, cuts=loaded.cuts)
        if model.causal is not None:
            is_headless = isinstance(model.causal, Headless)
            targets.prefix = "" if is_headless else f"{model.causal.base_model_prefix}."
        if isinstance(model.base, DecoderStack):
            targets._add_stack(model.base)
        else:
            targets._add_modules(model.base, targets.prefix)
        targets._add_head(model)
        return targets

    def find(self, module: str) -> str:
        """The name under which a module is known here: with or without the prefix of the base model."""
        names = (
            module,
            f"{self.prefix}{module}",
            module.removeprefix(self.prefix),
            module.removeprefix("model."),
        )
        return next((name for name in names if name in self.places or name == self.embedding), module)

    def _add_stack(self, stack: DecoderStack) -> None:
        layers = stack.stack.layers
        self.shapes = product_shapes(layers)
        for number, (place, layer) in enumerate(zip(stack.stack_layers, layers, strict=True)):
            for name, found in stack_places(4 * number, layer).items():
                full = f"{self.prefix}layers.{place.index}.{name}"
                self.places[full] = replace(found, cut=self.cuts.get(f"{full}.weight"))
        if stack.embed_tokens is not None:
            stack.embed_tokens = self._adapted_embedding("embed_tokens", stack.embed_tokens)

    def _add_modules(self, module: nn.Module, prefix: str) -> None:
        """Wrap the linear layers within a module, and its embedding of tokens."""
        for name, child in list(module.named_children()):
            full = f"{prefix}{name}"
            if isinstance(child, LinearModule):
                child.product = self._adapted(full, child.product)
            elif type(child) in (*EMBEDDINGS, DividedEmbedding) and not self.embedding:
                setattr(module, name, self._adapted_embedding(full.removeprefix(self.prefix), child))
            else:
                for leaf, parameter in child.named_parameters(recurse=False):
                    self.vectors[f"{full}.{leaf}"] = parameter.detach()
                self._add_modules(child, f"{full}.")

    def _add_head(self, model: Model) -> None:
        if model.causal is None:  # packed weights of an earlier start
            head: Any = model.head
            if model.makes_logits:
                model.head = self._adapted(OUTPUT, head, is_output=True)
            return
        for name, child in model.causal.named_modules():
            if isinstance(child, LinearModule):
                whole = child.product
                child.product = self._adapted(name, whole, is_output=True)
                if model.head is whole:
                    model.head = child.product

    def _adapted(self, name: str, linear: Linear, is_output: bool = False) -> Linear:
        """The layer that asks for adapters; over several ranks it does so before it puts their parts together."""
        if isinstance(linear, Reduced | GatheredLinear):
            linear.linear = self._adapted(name, linear.linear, is_output)
            return linear
        product = len(self.shapes)
        shape = (linear.out_features, linear.in_features)
        self.shapes = (*self.shapes, shape)
        self.places[name] = Place(product, 0, *shape, linear, is_output, self.cuts.get(f"{name}.weight"))
        return Adapted(linear, product, current_adapters)

    def _adapted_embedding(self, name: str, module: nn.Module) -> nn.Module:
        if isinstance(module, DividedEmbedding):
            module.rows = self._adapted_embedding(name, module.rows)
            return module
        if type(module) not in EMBEDDINGS:
            return module
        adapted = AdaptedEmbedding(module)
        self.embedding = f"{self.prefix}{name}"
        self.embedding_shape = whole_shape(adapted.shape, self.cuts.get(f"{self.embedding}.weight"))
        return adapted


def stack_places(first: int, layer: Layer) -> dict[str, Place]:
    """The modules of a stack's layer, whose products have the numbers from `first` on."""
    heads, kv_heads = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    groups = [
        (layer.qkv, {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads, "self_attn.v_proj": kv_heads}),
        (layer.out, {"self_attn.o_proj": layer.out.out_features}),
    ]
    if layer.gate_up is not None and layer.down is not None:
        mlp = "mlp" if layer.mixture is None else "mlp.shared_expert"
        size = layer.down.in_features
        groups.append((layer.gate_up, {f"{mlp}.gate_proj": size, f"{mlp}.up_proj": size}))
        groups.append((layer.down, {f"{mlp}.down_proj": layer.down.out_features}))
    places = {}
    for product, (linear, modules) in enumerate(groups, first):
        start = 0
        for name, size in modules.items():
            places[name] = Place(product, start, size, linear.in_features, linear)
            start += size
    return places
