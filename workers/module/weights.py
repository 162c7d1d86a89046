"""The weights of a module, read one by one where they are used.

A module is built on the meta device, where weights have a shape and no memory. A weight that is packed is read,
packed and let go; a weight that is used as it is becomes the module's own. A quantised matrix is packed as it is
held, and dequantised where plain numbers are needed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pagewire.ipc.host.heap import release_spare_memory
from pagewire.kernels.data.integers import Integers
from pagewire.kernels.data.joining import joined
from pagewire.kernels.data.weight import DENSE, Scheme, Weight, dense_weight
from pagewire.kernels.linear import dense
from pagewire.workers.checkpoint.conversion import check_names, conversions
from pagewire.workers.checkpoint.source import WeightSource
from pagewire.workers.module.lockstep import Lockstep
from pagewire.workers.module.matrices import (
    is_experts,
    is_linear,
    is_plain_embedding,
    is_stack,
    is_transposed,
)
from pagewire.workers.module.parallel_layers import Gather
from pagewire.workers.module.shards import Shards, own_part
from pagewire.workers.ranks.cut import Cut

Quantise = Callable[[str, Weight], Weight]
"""A function of a matrix's name (of its module, or of a stack) and the matrix to what is packed in its place."""


def keep(_: str, weight: Weight) -> Weight:
    """A `Quantise` that changes nothing."""
    return weight


def dequantised(_: str, weight: Weight) -> Weight:
    """A `Quantise` that makes plain numbers, in the dtype of the product, of integers with scales."""
    return weight if weight.scheme is DENSE else dense_weight(dense(weight))


class Weights:
    """The weights of a causal module that holds them itself.

    quantise: applied to every matrix before it is packed, and so before it is dequantised for the reference.
    schemes: of the matrices that were read to be packed. notes: what the log says about products, and of how many.
    shards: this rank's parts of the weights, once they are divided.
    """

    def __init__(self, causal: Any, quantise: Quantise = keep) -> None:
        self.causal = causal
        self.schemes: set[Scheme] = set()
        self.notes: Counter[str] = Counter()
        self.shards: Shards | None = None
        self._quantise = quantise
        self._embedding = causal.get_input_embeddings()
        self._whole = copy(causal)  # with its own base model, which another one replaces in `causal`
        self._whole._modules = dict(causal._modules)
        self._modules: dict[str, Any] = dict(causal.named_modules())
        self._names = {module: name for name, module in self._modules.items()}
        if quantise is not keep:
            self._requantise()

    def read(self, module: nn.Module, name: str) -> Tensor | None:
        """A parameter or buffer of a module within the causal one; None if the module has none of that name.

        A matrix is what its product multiplies with, dequantised. It is whole, also where weights are divided.
        """
        if self._quantise is not keep and name == "weight" and self._is_packed(module):
            matrix = dense(self.matrix(module))
            return matrix.T if is_transposed(module) else matrix
        if self._quantise is not keep and is_stack(module, name):
            matrices = [dense(matrix) for matrix in self.stacked(module, name)]
            return torch.stack([matrix.T for matrix in matrices] if is_transposed(module) else matrices)
        return self._read(module, name)

    def divide(self, shards: Shards) -> None:
        """Read only this rank's part of weights from now on, but for `read`."""
        self.shards = shards
        for name, cut in shards.cuts.items():
            owner, _, leaf = name.rpartition(".")
            module: Any = self._modules[owner]
            own = module._parameters.get(leaf)
            if own is None or own.device.type == "meta" or is_linear(module) or is_experts(module):
                continue
            if not isinstance(module, nn.Embedding) and (part := cut.vector(own)) is not None:
                module._parameters[leaf] = nn.Parameter(part, requires_grad=False)

    def cut(self, module: nn.Module, name: str = "weight") -> Cut | None:
        """How a parameter is divided; None if this rank has all of it."""
        return None if self.shards is None else self.shards.cut(self._full(module, name))

    def num_rows(self, linear: Any) -> int:
        """The number of a linear layer's outputs that this rank has."""
        cut = self.cut(linear)
        num_out: int = linear.weight.shape[1 if is_transposed(linear) else 0]
        return num_out if cut is None else sum(map(len, cut.own))

    def own_heads(self, linear: nn.Module) -> tuple[range, range] | None:
        """The query and the key heads that this rank has of the attention that a linear layer is in; None: all."""
        shards, name = self.shards, self._names[linear]
        heads = {} if shards is None else shards.heads
        owner = next((owner for owner in heads if name.startswith(f"{owner}.")), None)
        if shards is None or owner is None:
            return None
        return heads[owner].share(shards.collective.rank, shards.collective.size)

    def gather(self, norm: nn.Module) -> Gather | None:
        """What puts the inputs of a norm together that is over those of all ranks; None: a rank has all."""
        shards = self.shards
        cut = None if shards is None else shards.gathered.get(self._names[norm])
        return None if shards is None or cut is None else Gather(cut.places, shards.collective)

    def matrix(self, module: nn.Module) -> Weight:
        """The weight of a linear layer or an embedding as a matrix [N, K], as it is to be packed."""
        name = self._names[module] if self._is_packed(module) else None
        weight = self._part(self._matrix(module), name, self.cut(module))
        self.schemes.add(weight.scheme)
        return weight

    def part(self, module: nn.Module, name: str) -> Tensor | None:
        """This rank's part of a bias or another parameter; None if it has none.

        What is added once for all ranks is rank 0's.
        """
        tensor = self.read(module, name)
        cut = None if isinstance(module, nn.Embedding) else self.cut(module, name)
        return tensor if tensor is None or cut is None else cut.vector(tensor)

    def stacked(self, module: nn.Module, name: str) -> Iterator[Weight]:
        """The matrices [N, K] of a parameter of experts, one by one, as they are to be packed."""
        full, cut = self._full(module, name), self.cut(module, name)
        for matrix in self._stacked(module, name):
            weight = self._part(matrix, full, cut)
            self.schemes.add(weight.scheme)
            yield weight

    def _part(self, matrix: Weight, name: str | None, cut: Cut | None) -> Weight:
        """See `own_part`. name: for `Quantise`; None: it is not quantised."""
        return own_part(matrix, cut, lambda rows: rows if name is None else self._quantise(name, rows))

    def note_joining(self, parts: Sequence[Weight], whole: Weight) -> None:
        """Remember matrices that had to be brought to another scheme to be joined, for `notes`."""
        names = {part.scheme.name for part in parts}
        if len(names) > 1:
            exactly = "exactly" if isinstance(whole.scheme, Integers) else f"rounded to {whole.dtype}"
            self.notes[f"{' beside '.join(sorted(names))}, held as {whole.scheme.name}, {exactly}"] += 1

    def fill(self, module: nn.Module) -> None:
        """Read all weights of a module, and of those within it, that it does not hold yet."""

    def let_go(self) -> None:
        """Give back the memory of mapped files. A weight that is still in use comes from its file again."""

    @contextmanager
    def streamed(self, lockstep: Lockstep | None = None) -> Iterator[None]:
        """A context in which the causal module runs as it is, with a single layer's weights in memory at a time.

        lockstep: runs several passes of the module, which meet behind each layer, so that it is read once for all.
        """
        yield

    def _full(self, module: nn.Module, name: str) -> str:
        """The full name of a parameter."""
        return ".".join(filter(None, (self._names[module], name)))

    def _read(self, module: nn.Module, name: str) -> Tensor | None:
        tensor: Tensor | None = getattr(module, name)
        return None if tensor is None else tensor.detach()

    def _is_packed(self, module: nn.Module) -> bool:
        """True for what is quantised on request: linear layers and the embedding of tokens."""
        return is_linear(module) or (module is self._embedding and is_plain_embedding(module))

    def _matrix(self, module: nn.Module) -> Weight:
        matrix = self._read(module, "weight")
        assert matrix is not None
        return dense_weight(matrix.T if is_transposed(module) else matrix)

    def _stacked(self, module: nn.Module, name: str) -> Iterator[Weight]:
        matrices = self._read(module, name)
        assert matrices is not None
        for matrix in matrices:
            yield dense_weight(matrix.T if is_transposed(module) else matrix)

    def _requantise(self) -> None:
        """Give the module's own matrices the numbers that they will have when they are packed."""
        for module in self._modules.values():
            for name, own in module._parameters.items():
                if own is not None and own.device.type != "meta":
                    own.data = self.read(module, name)


class CheckpointWeights(Weights):
    """The weights of a causal module on the meta device, read from a checkpoint."""

    def __init__(
        self,
        causal: Any,
        source: WeightSource,
        dtype: torch.dtype,
        quantise: Quantise = keep,
        with_heads: bool = False,
        names: Iterable[str] | None = None,
    ) -> None:
        """Find the tensors of each weight, and make the buffers that no checkpoint holds.

        dtype: of the weights, but for those that transformers keeps in float32.
        with_heads: the checkpoint may also hold what lies behind this module, such as an output layer.
        names: of the tensors that belong to this module; None: all.

        Raises:
            ImportError: this version of transformers has no tables for converting checkpoints.
            LoadError: weights are missing or have another shape, or the checkpoint is of another model.
        """
        super().__init__(causal, quantise)
        self._source = source
        names = source.names if names is None else names
        self._conversions, unexpected = conversions(causal, names, source.on_meta)
        plan = causal._get_dtype_plan(dtype)
        self._dtypes = {
            re.compile(pattern.replace("*", ".*")): exception for pattern, exception in plan.items()
        }
        self._ties = _ties(causal.all_tied_weights_keys, self._conversions.keys())
        missing = set(causal.state_dict()) - self._conversions.keys() - self._ties.keys()
        # Some tools (AutoGPTQ) give every linear layer a bias. A module may do without one that is zero.
        zero_biases = {name for name in unexpected if name.endswith(".bias") and not source.read(name).any()}
        heads = {name for name in unexpected if is_of_head(name, causal)} if with_heads else set()
        check_names(causal, set(missing), unexpected - zero_biases - heads)
        self._initialize(missing)

    def _read(self, module: nn.Module, name: str) -> Tensor | None:
        own = getattr(module, name)
        if own is None or own.device.type != "meta":
            return super()._read(module, name)
        if name == "weight" and self._is_packed(module):  # without plain numbers of another dtype in between
            matrix = dense(self._matrix(module))
            return matrix.T if is_transposed(module) else matrix
        target, holder = self._target(module, name)
        if holder.device.type != "meta":
            return holder.detach()
        return self._converted(target).to(self._dtype(target, own))

    def _matrix(self, module: nn.Module) -> Weight:
        own: Any = module.weight
        target, holder = self._target(module, "weight")
        conversion = self._conversions[target] if holder.device.type == "meta" else None
        if conversion is not None and conversion.transform is None and not is_transposed(module):
            return self._source.weight(conversion.sources[0][0], self._dtype(target, own))
        matrix = holder.detach() if conversion is None else self._converted(target)
        return dense_weight(matrix.T if is_transposed(module) else matrix, self._dtype(target, own))

    def _stacked(self, module: nn.Module, name: str) -> Iterator[Weight]:
        own = getattr(module, name)
        target, holder = self._target(module, name)
        conversion = self._conversions[target] if holder.device.type == "meta" else None
        dtype = self._dtype(target, own)
        if conversion is None:
            yield from super()._stacked(module, name)
        elif (members := conversion.members()) is not None:
            for names in members:
                yield joined([self._source.weight(part, dtype) for part in names])
        elif conversion.transform is None:
            yield from self._source.stacked(conversion.sources[0][0], dtype, is_transposed(module))
        else:
            yield from super()._stacked(module, name)

    def fill(self, module: nn.Module) -> None:
        """See `Weights.fill`."""
        self._fill(_empty_places(module))

    def let_go(self) -> None:
        """See `Weights.let_go`. What was freed of converted weights is given back as well."""
        self._source.let_go()
        release_spare_memory()

    @contextmanager
    def streamed(self, lockstep: Lockstep | None = None) -> Iterator[None]:
        """See `Weights.streamed`. Weights outside of the layers are held until the end."""
        layers = list(_layers(self.causal))
        within = {module for layer in layers for module in layer.modules()}
        outside = [place for place in _empty_places(self.causal) if place.module not in within]
        with ExitStack() as stack:
            stack.callback(self._empty, outside)
            self._fill(outside)
            for layer in layers:
                self._stream(layer, stack, lockstep or Lockstep())
            yield

    def _stream(self, layer: nn.Module, stack: ExitStack, lockstep: Lockstep) -> None:
        """Fill a layer whenever it is called, and empty it after, until the stack is closed."""
        places = list(_empty_places(layer))

        def before(*_: Any) -> None:
            self._fill(place for place in places if place.is_empty)

        def after(*_: Any) -> None:
            lockstep.meet()  # other passes run the layer meanwhile
            if not all(place.is_empty for place in places):
                self._empty(places)

        stack.callback(layer.register_forward_pre_hook(before).remove)
        stack.callback(layer.register_forward_hook(after).remove)

    def _fill(self, places: Iterable[_Place]) -> None:
        for place in places:
            tensor = self.part(place.module, place.name)
            assert tensor is not None
            place.put(tensor)

    def _empty(self, places: Iterable[_Place]) -> None:
        for place in places:
            place.tensors[place.name] = place.empty
        self.let_go()

    def _target(self, module: nn.Module, name: str) -> tuple[str, Tensor]:
        """The full name of a weight, or of the one that it is tied to, and the tensor that its module holds now."""
        full = self._full(module, name)
        target = self._ties.get(full, full)
        return target, self._held(target)

    def _held(self, target: str) -> Tensor:
        """The tensor that a module holds under a full name, also where the causal module has another base now."""
        owner, _, leaf = target.rpartition(".")
        tensor: Tensor = getattr(self._modules[owner], leaf)
        return tensor

    def _converted(self, target: str) -> Tensor:
        """A weight in the checkpoint's dtype, or in its own if tensors must be converted to make it."""
        conversion = self._conversions[target]
        if conversion.transform is None:
            return self._source.read(conversion.sources[0][0])
        dtype = self._dtype(target, self._held(target))
        return conversion.run(self._whole, lambda name: self._source.read(name).to(dtype))[target]

    def _dtype(self, target: str, empty: Tensor) -> torch.dtype:
        return next((d for pattern, d in self._dtypes.items() if pattern.search(target)), empty.dtype)

    def _initialize(self, missing: set[str]) -> None:
        """Make buffers that are computed, and weights that transformers does not expect in a checkpoint."""
        made = missing | {name for name, _ in self.causal.named_non_persistent_buffers()}
        for place in _empty_places(self.causal):
            if self._full(place.module, place.name) in made:
                place.put(torch.empty_like(place.empty, device="cpu"))
            else:
                place.empty._is_hf_initialized = True  # type: ignore[attr-defined] # so transformers leaves it alone
        self.causal.initialize_weights()


def is_of_head(name: str, base: Any) -> bool:
    """True if a tensor of this name belongs to none of the parts of a base model."""
    own = name.removeprefix(f"{base.base_model_prefix}.")
    return own.partition(".")[0] not in dict(base.named_children()) | base._parameters


class _Place(NamedTuple):
    """Where a module holds a weight or buffer on the meta device."""

    module: nn.Module
    tensors: dict[str, Any]
    """The module's parameters or buffers."""
    name: str
    empty: Tensor
    """The empty tensor that it holds there at first."""

    @property
    def is_empty(self) -> bool:
        """True while nothing was put there."""
        return self.tensors[self.name] is self.empty

    def put(self, tensor: Tensor) -> None:
        is_parameter = isinstance(self.empty, nn.Parameter)
        self.tensors[self.name] = nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor


def _empty_places(module: nn.Module) -> Iterator[_Place]:
    """The places on the meta device in a module and in those within it."""
    for child in module.modules():
        for tensors in (child._parameters, child._buffers):
            for name, tensor in list(tensors.items()):
                if tensor is not None and tensor.device.type == "meta":
                    yield _Place(child, tensors, name, tensor)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The layers of a model: the members of its outermost lists of modules."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _layers(child)


def tied_names(causal: Any) -> dict[str, str]:
    """The weights of a module that are others, and the names of these: one of each group of equal weights."""
    return _ties(causal.all_tied_weights_keys, set(causal.all_tied_weights_keys.values()))


def _ties(tied: dict[str, str], present: Iterable[str]) -> dict[str, str]:
    """For each weight that the checkpoint lacks, the weight that it is tied to and that the checkpoint holds.

    tied: pairs of equal weights, as transformers gives them; the checkpoint may hold any of a group.
    """
    present = set(present)
    groups: dict[str, set[str]] = {}
    for name, source in tied.items():
        groups.setdefault(source, {source}).add(name)
    ties = {}
    for group in groups.values():
        if held := sorted(group & present):
            ties.update(dict.fromkeys(group - present, held[0]))
    return ties
