"""The weights of a module, read one by one where they are used.

A module is built on the meta device, where weights have a shape and no memory. A weight that is packed is read,
packed and let go; a weight that is used as it is becomes the module's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pagewire.kernels.cpu.memory import give_back_freed
from pagewire.kernels.weight import Weight, dense_weight
from pagewire.workers.model.checkpoint import Checkpoint
from pagewire.workers.model.conversion import check_names, conversions
from pagewire.workers.model.gguf import GgufCheckpoint


class Weights:
    """The weights of a causal module that holds them itself."""

    def __init__(self, causal: Any) -> None:
        self.causal = causal

    def read(self, module: nn.Module, name: str) -> Tensor | None:
        """A parameter or buffer of a module within the causal one; None if the module has none of that name."""
        tensor: Tensor | None = getattr(module, name)
        return None if tensor is None else tensor.detach()

    def matrix(self, module: nn.Module, name: str = "weight") -> Weight:
        """A parameter [N, K] as the checkpoint holds it, to be packed."""
        return dense_weight(getattr(module, name).detach())

    def stacked(self, module: nn.Module, name: str, transposed: bool = False) -> Iterator[Weight]:
        """The matrices [N, K] of a parameter [E, N, K], one by one; [E, K, N] if it is transposed."""
        matrices = self.read(module, name)
        assert matrices is not None
        for matrix in matrices:
            yield dense_weight(matrix.T if transposed else matrix)

    def fill(self, module: nn.Module) -> None:
        """Read all weights of a module, and of those within it, that it does not hold yet."""

    def let_go(self) -> None:
        """Give back the memory of mapped files. A weight that is still in use comes from its file again."""

    @contextmanager
    def streamed(self) -> Iterator[None]:
        """A context in which the causal module runs as it is, with a single layer's weights in memory at a time."""
        yield


class CheckpointWeights(Weights):
    """The weights of a causal module on the meta device, read from a checkpoint."""

    def __init__(self, causal: Any, checkpoint: Checkpoint | GgufCheckpoint, dtype: torch.dtype) -> None:
        """Find the tensors of each weight, and make the buffers that no checkpoint holds.

        dtype: of the weights, but for those that transformers keeps in float32.

        Raises:
            ImportError: this version of transformers has no tables for converting checkpoints.
            LoadError: weights are missing or have another shape, or the checkpoint is of another model.
        """
        super().__init__(causal)
        self._checkpoint = checkpoint
        self._modules = dict(causal.named_modules())
        self._names = {module: name for name, module in self._modules.items()}
        self._conversions, unexpected = conversions(causal, checkpoint.names, checkpoint.on_meta)
        plan = causal._get_dtype_plan(dtype)
        self._dtypes = {
            re.compile(pattern.replace("*", ".*")): exception for pattern, exception in plan.items()
        }
        self._ties = _ties(causal.all_tied_weights_keys, self._conversions.keys())
        missing = set(causal.state_dict()) - self._conversions.keys() - self._ties.keys()
        check_names(causal, set(missing), unexpected)
        self._initialize(missing)

    def read(self, module: nn.Module, name: str) -> Tensor | None:
        """See `Weights.read`."""
        own = getattr(module, name)
        if own is None or own.device.type != "meta":
            return super().read(module, name)
        target, holder = self._target(module, name)
        if holder.device.type != "meta":
            return holder.detach()
        return self._converted(target).to(self._dtype(target, own))

    def matrix(self, module: nn.Module, name: str = "weight") -> Weight:
        """See `Weights.matrix`."""
        own = getattr(module, name)
        target, holder = self._target(module, name)
        if holder.device.type != "meta":
            return dense_weight(holder.detach())
        return dense_weight(self._converted(target), self._dtype(target, own))

    def stacked(self, module: nn.Module, name: str, transposed: bool = False) -> Iterator[Weight]:
        """See `Weights.stacked`. Matrices that the checkpoint holds apart are never stacked."""
        own = getattr(module, name)
        target, _ = self._target(module, name)
        members = self._conversions[target].members() if own.device.type == "meta" else None
        if members is None:
            yield from super().stacked(module, name, transposed)
            return
        dtype = self._dtype(target, own)
        for names in members:
            yield Weight.joined([dense_weight(self._checkpoint.read(part), dtype) for part in names])

    def fill(self, module: nn.Module) -> None:
        """See `Weights.fill`."""
        self._fill(_empty_places(module))

    def let_go(self) -> None:
        """See `Weights.let_go`. What was freed of converted weights is given back as well."""
        self._checkpoint.let_go()
        give_back_freed()

    @contextmanager
    def streamed(self) -> Iterator[None]:
        """See `Weights.streamed`. Weights outside of the layers are held until the end."""
        layers = list(_layers(self.causal))
        within = {module for layer in layers for module in layer.modules()}
        outside = [place for place in _empty_places(self.causal) if place.module not in within]
        with ExitStack() as stack:
            stack.callback(self._empty, outside)
            self._fill(outside)
            for layer in layers:
                self._stream(layer, stack)
            yield

    def _stream(self, layer: nn.Module, stack: ExitStack) -> None:
        """Fill a layer whenever it is called, and empty it after, until the stack is closed."""
        places = list(_empty_places(layer))

        def before(*_: Any) -> None:
            self._fill(places)

        def after(*_: Any) -> None:
            self._empty(places)

        stack.callback(layer.register_forward_pre_hook(before).remove)
        stack.callback(layer.register_forward_hook(after).remove)

    def _fill(self, places: Iterable[_Place]) -> None:
        for place in places:
            tensor = self.read(place.module, place.name)
            assert tensor is not None
            place.put(tensor)

    def _empty(self, places: Iterable[_Place]) -> None:
        for place in places:
            place.tensors[place.name] = place.empty
        self.let_go()

    def _target(self, module: nn.Module, name: str) -> tuple[str, Tensor]:
        """The full name of a weight, or of the one that it is tied to, and the tensor that its module holds now."""
        full = ".".join(filter(None, (self._names[module], name)))
        target = self._ties.get(full, full)
        owner, _, leaf = target.rpartition(".")
        return target, getattr(self._modules[owner], leaf)

    def _converted(self, target: str) -> Tensor:
        """A weight in the checkpoint's dtype, or in its own if tensors must be converted to make it."""
        conversion = self._conversions[target]
        if conversion.transform is None:
            return self._checkpoint.read(conversion.sources[0][0])
        dtype = self._dtype(target, self.causal.get_parameter_or_buffer(target))
        return conversion.run(self.causal, lambda name: self._checkpoint.read(name).to(dtype))[target]

    def _dtype(self, target: str, empty: Tensor) -> torch.dtype:
        return next((d for pattern, d in self._dtypes.items() if pattern.search(target)), empty.dtype)

    def _initialize(self, missing: set[str]) -> None:
        """Make buffers that are computed, and weights that transformers does not expect in a checkpoint."""
        made = missing | {name for name, _ in self.causal.named_non_persistent_buffers()}
        for place in _empty_places(self.causal):
            if ".".join(filter(None, (self._names[place.module], place.name))) in made:
                place.put(torch.empty_like(place.empty, device="cpu"))
            else:
                place.empty._is_hf_initialized = True  # type: ignore[attr-defined] # so transformers leaves it alone
        self.causal.initialize_weights()


class _Place(NamedTuple):
    """Where a module holds a weight or buffer on the meta device."""

    module: nn.Module
    tensors: dict[str, Any]
    """The module's parameters or buffers."""
    name: str
    empty: Tensor
    """The empty tensor that it holds there at first."""

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
