"""The parts of a loaded model that adapters may change, by the names of their modules in transformers."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from torch import nn

from pagewire.ipc.wire.lora import LoRAConfig
from pagewire.ipc.wire.worker_messages import Parallel
from pagewire.kernels.adapted import Adapted
from pagewire.kernels.data.deltas import AdapterWeights, EmbeddingDelta, Shapes
from pagewire.kernels.data.latents import LatentHeads
from pagewire.kernels.data.layer import Experts, Layer
from pagewire.kernels.data.reduced import Reduced
from pagewire.kernels.linear import Linear
from pagewire.kernels.output import CappedOutput
from pagewire.kernels.stack import Stack
from pagewire.workers.adapters.config import AdapterConfig
from pagewire.workers.adapters.division import whole_shape
from pagewire.workers.adapters.embedding import AdaptedEmbedding
from pagewire.workers.adapters.experts import ExpertPlaces, FoundExperts, later_name, split_experts
from pagewire.workers.adapters.files import file_bytes
from pagewire.workers.adapters.place import Place
from pagewire.workers.errors import LoadError
from pagewire.workers.module.parallel_layers import DividedEmbedding, GatheredLinear
from pagewire.workers.module.transforms import LinearModule, QuantisedEmbedding
from pagewire.workers.network.loaded import LoadedModel
from pagewire.workers.network.module_base import ModuleHead, ModuleScores, linear_of
from pagewire.workers.network.network import ModuleRows, Network
from pagewire.workers.ranks.agreement import from_rank
from pagewire.workers.ranks.cut import Cut
from pagewire.workers.ranks.interface import Collective
from pagewire.workers.step.context import current_adapters

EMBEDDINGS = (nn.Embedding, QuantisedEmbedding)
"""Types of embeddings that adapters can change."""


@dataclass
class Targets:
    """The linear layers and the embedding of a model that adapters may change; it numbers the linear layers.

    places: of linear layers by name. experts: of mixtures, by the name of the module of all of a layer's.
    embedding: its name, and its rows and their size (V, H); empty if it cannot be adapted.
    dtype: of the model.
    linears: by number. output: the number of the output layer; None: another stage has it.
    cuts: how parameters are divided over the ranks, by name.
    has_embedding: False if another stage has it.
    """

    dtype: torch.dtype
    device: torch.device
    prefix: str
    places: dict[str, Place] = field(default_factory=dict)
    experts: dict[str, ExpertPlaces] = field(default_factory=dict)
    embedding: str = ""
    embedding_shape: tuple[int, int] = (0, 0)
    linears: list[Adapted] = field(default_factory=list)
    output: int | None = None
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    has_embedding: bool = True

    @classmethod
    def of(cls, loaded: LoadedModel, device: torch.device) -> Targets:
        """Find the parts of a model that was just loaded, and make them ask for the adapters of their rows.

        Raises:
            LoadError: a half of a layer runs as a module of transformers.
        """
        model = loaded.model
        network = model.network
        assert network is not None, "no adapters are served with another base"
        if network.road.halves:
            raise LoadError(
                f"enable_lora: adapters change linear layers of stacks alone, and {network.road.sentence}; leave "
                "enable_lora out, or describe its layers (docs/own_models.md)"
            )
        targets = cls(loaded.dtype, device, f"{model.path}." if model.path else "", cuts=loaded.cuts)
        targets._add_network(network)
        targets._add_head(loaded)
        return targets

    @functools.cached_property
    def shapes(self) -> Shapes:
        """The outputs and inputs of the linear layers on this rank, by number."""
        return tuple((linear.out_features, linear.in_features) for linear in self.linears)

    @functools.cached_property
    def heads(self) -> list[int]:
        """The numbers of the layers that are `LatentHeads`, whose adapters no kernel has."""
        return [linear.number for linear in self.linears if isinstance(linear.linear, LatentHeads)]

    def weights(self, embedding: EmbeddingDelta | None = None, num_extra_tokens: int = 0) -> AdapterWeights:
        """An adapter of the model that changes no linear layer yet."""
        unchanged = [()] * len(self.shapes)
        return AdapterWeights(unchanged, self.shapes, self.dtype, embedding, num_extra_tokens, self.output)

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
        return file_bytes(rank, shapes, whole)

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
        whole = network.stack
        layers = []
        for layer, modules in zip(whole.layers, network.modules, strict=True):
            layers.append(self._adapted_layer(layer, modules))
        network.stack = Stack(whole.input_norm, layers, norm_first=whole.norm_first)
        if network.embedding is not None:
            network.embedding.words = self._adapted_embedding(network.words_name, network.words)
        if (inputs := network.layer_inputs) is not None:
            inputs.projection = self._adapted(f"{self.prefix}{inputs.projection_name}", inputs.projection)

    def _adapted_layer(self, layer: Layer, modules: dict[str, dict[str, ModuleRows]]) -> Layer:
        """A stack's layer whose linear layers ask for adapters. modules: see `Network.modules`."""

        def change(field: str, linear: Linear) -> Linear:
            if linear.dtype != self.dtype:  # a router of float32 in a model of another dtype
                return linear
            adapted, first = self._numbered(linear), 0
            for module, rows in modules.get(field, {}).items():
                full = f"{self.prefix}{module}"
                self.places[full] = Place(
                    adapted,
                    first,
                    rows.count,
                    linear.in_features,
                    cut=self.cuts.get(f"{full}.weight"),
                    is_optional=field in ("router", "shared_gate"),
                    order=rows.order,
                    factor=rows.factor,
                )
                first += rows.count
            return adapted

        layer = layer.replaced(change)
        if layer.mixture is not None:
            (experts,) = modules["experts"]
            own = layer.mixture.experts
            up = "gate_up_proj" if own.gated else "up_proj"
            self._add_experts(f"{self.prefix}{experts}", own, up, own.gated)
        return layer

    def _add_experts(
        self, name: str, experts: Experts, up_name: str = "gate_up_proj", is_joined: bool = True
    ) -> None:
        """Add experts whose linear layers ask for adapters; see `ExpertPlaces`."""

        def places(parameter: str, linears: Sequence[Linear]) -> list[Place]:
            cut = self.cuts.get(f"{name}.{parameter}")
            return [
                Place(linear, 0, linear.out_features, linear.in_features, cut=cut)
                for linear in linears
                if isinstance(linear, Adapted)
            ]

        up, down = places(up_name, experts.up), places("down_proj", experts.down)
        self.experts[name] = ExpertPlaces(up, down, up_name, is_joined)

    def _add_head(self, loaded: LoadedModel) -> None:
        """Wrap the output layer, or the linear layers of a classifier."""
        model, pooler = loaded.model, loaded.pooler
        behind = model.head if pooler is None else pooler.scores
        if isinstance(behind, ModuleHead | ModuleScores):
            for name, child in behind.module.named_modules():
                if isinstance(child, LinearModule):
                    child.product = self._adapted(name, child.product, is_output=True)
        elif (linear := linear_of(model.head)) is not None:
            model.head = self._adapted(model.output, linear, is_output=True)

    def _adapted(self, name: str, linear: Linear, is_output: bool = False) -> Linear:
        """The layer that asks for adapters; over several ranks it does so before it puts their parts together."""
        if isinstance(linear, Reduced | GatheredLinear | CappedOutput):
            linear.linear = self._adapted(name, linear.linear, is_output)
            return linear
        return self._numbered_place(name, linear, is_output)

    def _numbered_place(self, name: str, linear: Linear, is_output: bool = False) -> Adapted:
        """A linear layer of this name in transformers that asks for adapters."""
        adapted = self._numbered(linear)
        if is_output:
            self.output = adapted.number
        sizes, cut = (linear.out_features, linear.in_features), self.cuts.get(f"{name}.weight")
        self.places[name] = Place(adapted, 0, *sizes, is_output, cut)
        return adapted

    def _numbered(self, linear: Linear) -> Adapted:
        """A linear layer that asks for adapters, with the next number."""
        self.linears.append(adapted := Adapted(linear, len(self.linears), current_adapters))
        return adapted

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


class StageExperts(msgspec.Struct, array_like=True):
    """The experts of a layer, which all have the same sizes; see `ExpertPlaces`."""

    number: int
    up: Place
    down: Place
    up_name: str
    is_joined: bool

    @classmethod
    def of(cls, places: ExpertPlaces) -> StageExperts:
        """Those of this rank's stage."""
        up, down = places.up[0].elsewhere(), places.down[0].elsewhere()
        return cls(len(places), up, down, places.up_name, places.is_joined)

    def places(self) -> ExpertPlaces:
        """Their places for a rank of another stage."""
        return ExpertPlaces([self.up] * self.number, [self.down] * self.number, self.up_name, self.is_joined)


class StageModules(msgspec.Struct):
    """What adapters may change in a stage, by name: see `Targets`; all sizes are those of whole modules."""

    linears: dict[str, Place]
    experts: dict[str, StageExperts]
    embedding: str
    embedding_shape: tuple[int, int]

    @classmethod
    def of(cls, targets: Targets) -> StageModules:
        """Those of this rank's stage."""
        linears = {name: place.elsewhere() for name, place in targets.places.items()}
        experts = {name: StageExperts.of(places) for name, places in targets.experts.items()}
        return cls(linears, experts, targets.embedding, targets.embedding_shape)


def add_other_stages(targets: Targets, ranks: Collective, parallel: Parallel) -> None:
    """Add the modules of the other stages of a pipeline to those of this one, in the order of the stages.

    Each stage sends the names and sizes of its modules to the others. So all ranks refuse what one worker would
    refuse, in the same words, and each keeps what belongs to its own layers.

    ranks: of all stages, which call this together.
    """
    own = msgspec.msgpack.encode(StageModules.of(targets))
    places: dict[str, Place] = {}
    experts: dict[str, ExpertPlaces] = {}
    for first in range(0, parallel.size, parallel.num_shards):
        content = from_rank(first, own, ranks, targets.device)
        stage = msgspec.msgpack.decode(content, type=StageModules)
        for name, place in stage.linears.items():
            places.setdefault(name, targets.places.get(name, place))
        for name, of_layer in stage.experts.items():
            experts.setdefault(name, targets.experts.get(name) or of_layer.places())
        if stage.embedding and not targets.embedding:
            targets.embedding, targets.embedding_shape = stage.embedding, stage.embedding_shape
            targets.has_embedding = False
    targets.places, targets.experts = places, experts
