"""The parts of a loaded model that adapters may change, by the names of their modules in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pagewire.ipc.lora import LoRAConfig
from pagewire.kernels.adapted import Adapted
from pagewire.kernels.deltas import Shapes
from pagewire.kernels.experts import GroupedExperts
from pagewire.kernels.layer import Layer, Mixture, mixture_products, product_shapes
from pagewire.kernels.linear import Linear
from pagewire.kernels.reduced import Reduced
from pagewire.workers.adapters.config import AdapterConfig
from pagewire.workers.adapters.division import whole_shape
from pagewire.workers.adapters.embedding import AdaptedEmbedding
from pagewire.workers.adapters.experts import ExpertPlaces, FoundExperts, later_name, split_experts
from pagewire.workers.adapters.place import Place
from pagewire.workers.adapters.size_limit import file_bytes, low_rank_numbers, whole_numbers
from pagewire.workers.errors import LoadError
from pagewire.workers.model.attention import current_adapters
from pagewire.workers.model.experts import up_name
from pagewire.workers.model.loaded import LoadedModel
from pagewire.workers.model.module import ModuleBase, ModuleHead, ModuleScores
from pagewire.workers.model.network import Network
from pagewire.workers.model.parallel_layers import DividedEmbedding, GatheredLinear
from pagewire.workers.model.shards import Cut
from pagewire.workers.model.transforms import LinearModule, QuantisedEmbedding

EMBEDDINGS = (nn.Embedding, QuantisedEmbedding)
"""Types of embeddings that adapters can change."""


@dataclass
class Targets:
    """The linear layers and the embedding of a model, and where their products are.

    places: of linear layers by name. experts: of mixtures, by the name of the module of all of a layer's.
    embedding: its name, and its rows and their size (V, H); empty if it cannot be adapted.
    vectors: other parameters that adapters may repeat. dtype: of the model.
    cuts: how parameters are divided over the ranks, by name.
    has_embedding: False if another stage has it. Vectors of other stages are on the meta device.
    """

    dtype: torch.dtype
    device: torch.device
    prefix: str
    places: dict[str, Place] = field(default_factory=dict)
    experts: dict[str, ExpertPlaces] = field(default_factory=dict)
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
        if isinstance(model.base, ModuleBase) and not model.base.packed:
            raise LoadError(
                "enable_lora: this encoder runs prompt by prompt, for which adapters are not served"
            )
        targets = cls(loaded.dtype, device, f"{model.path}." if model.path else "", cuts=loaded.cuts)
        if isinstance(model.base, Network):
            targets._add_network(model.base)
        else:
            targets._add_modules(model.base.module, targets.prefix)
        targets._add_head(loaded)
        return targets

    def find(self, module: str) -> str:
        """The name under which a module is known here: with or without the prefix of the base model."""
        names = self._names(module)
        return next((name for name in names if name in self.places or name == self.embedding), module)

    def find_experts(self, module: str) -> FoundExperts | None:
        """The experts that a module belongs to, or is; None if it does not."""
        if not self.experts:
            return None
        owner, rest = split_experts(module)
        name = next((name for name in self._names(owner) if name in self.experts), None)
        return None if name is None else FoundExperts.of(owner, name, rest, self.experts[name])

    def max_file_bytes(self, config: AdapterConfig, limits: LoRAConfig) -> int:
        """The most bytes that the tensors of an adapter that is served can have in a file."""
        rank, extra = min(config.max_rank, limits.max_lora_rank), limits.extra_vocab_size
        num_tokens, size = self.embedding_shape
        table = (num_tokens + extra, size)
        shapes = [table, *(place.whole for place in self.places.values())]
        for places in self.experts.values():
            shapes += places.whole_shapes()
        whole = [place.whole for name, place in self.places.items() if config.saves(name)]
        # Embedding and output layer may be there as a whole, also where the configuration does not say so.
        outputs = (place.whole for place in self.places.values() if place.is_output)
        whole += [table, *((num_out + extra, num_in) for num_out, num_in in outputs)]
        vectors = sum(vector.numel() for vector in self.vectors.values())
        return file_bytes(low_rank_numbers(rank, shapes) + whole_numbers(whole) + vectors)

    def _names(self, module: str) -> tuple[str, ...]:
        """The names under which a module may be known here."""
        later = later_name(module)
        names = (
            module,
            f"{self.prefix}{module}",
            module.removeprefix(self.prefix),
            module.removeprefix("model."),
        )
        return names if later == module else (*names, later, f"{self.prefix}{later}")

    def _add_network(self, network: Network) -> None:
        layers = network.stack.layers
        self.shapes = product_shapes(layers)
        of_mixtures = mixture_products(layers)
        for number, (place, layer) in enumerate(zip(network.places, layers, strict=True)):
            if layer.mixture is not None:
                mlp = f"{self.prefix}layers.{place.layer}.mlp"
                self._add_mixture(mlp, of_mixtures[number], layer.mixture)
            for name, found in stack_places(4 * number, layer).items():
                full = f"{self.prefix}layers.{place.layer}.{name}"
                self.places[full] = replace(found, cut=self.cuts.get(f"{full}.weight"))
        if network.embedding is not None:
            network.embedding.words = self._adapted_embedding("embed_tokens", network.words)

    def _add_mixture(self, mlp: str, product: int, mixture: Mixture) -> None:
        """Add a stack's mixture, whose products have the numbers from `product` on."""
        gates = {"gate": mixture.router.linear, "shared_expert_gate": mixture.shared_gate}
        for number, (name, linear) in enumerate(gates.items(), product):
            if linear is not None:
                shape = (linear.out_features, linear.in_features)
                self.places[f"{mlp}.{name}"] = Place(number, 0, *shape, linear, is_optional=True)
        experts = ExpertPlaces(product + len(gates), mixture.experts.up, mixture.experts.down)
        self._add_experts(f"{mlp}.experts", experts)

    def _add_experts(self, name: str, places: ExpertPlaces) -> None:
        up_cut, down_cut = (self.cuts.get(f"{name}.{parameter}") for parameter in places.parameters)
        self.experts[name] = replace(places, up_cut=up_cut, down_cut=down_cut)

    def _add_module_of_experts(self, name: str, module: Any) -> None:
        """Add experts of a module of transformers."""
        experts = module.grouped.experts
        module.first_product = len(self.shapes)
        linears = (*experts.up, *experts.down)
        self.shapes = (*self.shapes, *((linear.out_features, linear.in_features) for linear in linears))
        is_joined = module.has_gate and module.is_concatenated
        places = ExpertPlaces(module.first_product, experts.up, experts.down, up_name(module), is_joined)
        self._add_experts(name, places)

    def _add_modules(self, module: nn.Module, prefix: str) -> None:
        """Wrap the linear layers within a module, and its embedding of tokens."""
        for name, child in list(module.named_children()):
            full = f"{prefix}{name}"
            if isinstance(child, LinearModule):
                child.product = self._adapted(full, child.product)
            elif type(child) in (*EMBEDDINGS, DividedEmbedding) and not self.embedding:
                setattr(module, name, self._adapted_embedding(full.removeprefix(self.prefix), child))
            else:
                if isinstance(getattr(child, "grouped", None), GroupedExperts):
                    self._add_module_of_experts(full, child)
                for leaf, parameter in child.named_parameters(recurse=False):
                    self.vectors[f"{full}.{leaf}"] = parameter.detach()
                self._add_modules(child, f"{full}.")

    def _add_head(self, loaded: LoadedModel) -> None:
        """Wrap the output layer, or the linear layers of a classifier."""
        model, pooler = loaded.model, loaded.pooler
        behind = model.head if pooler is None else pooler.scores
        if isinstance(behind, ModuleHead | ModuleScores):
            for name, child in behind.module.named_modules():
                if isinstance(child, LinearModule):
                    child.product = self._adapted(name, child.product, is_output=True)
        elif model.head is not None and not isinstance(model.head, ModuleHead):
            model.head = self._adapted(model.output, model.head, is_output=True)

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
    if layer.up is not None and layer.down is not None:
        mlp = "mlp" if layer.mixture is None else "mlp.shared_expert"
        size = layer.down.in_features
        groups.append((layer.up, {f"{mlp}.gate_proj": size, f"{mlp}.up_proj": size}))
        groups.append((layer.down, {f"{mlp}.down_proj": layer.down.out_features}))
    places = {}
    for product, (linear, modules) in enumerate(groups, first):
        start = 0
        for name, size in modules.items():
            places[name] = Place(product, start, size, linear.in_features, linear)
            start += size
    return places
