"""Makes what an adapter changes in a model's products, from its configuration and tensors, in pieces."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.lora import LoRAConfig
from pagewire.kernels.cpu.adapters import DeltaMemory, add_changes, room_of
from pagewire.kernels.cuda.lora import table_of
from pagewire.kernels.data.deltas import AdapterWeights, Delta, EmbeddingDelta, panels
from pagewire.workers.adapters.base_weights import BaseWeights
from pagewire.workers.adapters.config import AdapterConfig
from pagewire.workers.adapters.division import own_columns, own_rows, own_shift, own_tokens
from pagewire.workers.adapters.experts import ExpertParts, FoundExperts, missing_experts
from pagewire.workers.adapters.names import Kind, Parts, kinds_of
from pagewire.workers.adapters.pieces import LARGE_BYTES, Piece, Pieces
from pagewire.workers.adapters.place import Place
from pagewire.workers.adapters.targets import Targets

LORA = {Kind.A, Kind.B}
EMBEDDING = {Kind.EMBEDDING_A, Kind.EMBEDDING_B}
WITH_BASE = {Kind.MAGNITUDE, Kind.WEIGHT, Kind.BIAS}
"""Tensors for which weights of the model itself are read."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build(
    config: AdapterConfig, modules: dict[str, Parts], targets: Targets, limits: LoRAConfig, base: BaseWeights
) -> Pieces[tuple[AdapterWeights, int]]:
    """The adapter for a model, and its largest rank.

    modules: the tensors of each module; taken out one by one. base: the model's own weights, which DoRA needs.

    Raises:
        ValueError: it is of another model, broken, larger than the limits, or asks for what is not served.
    """
    builder = _DeltaBuilder(config, targets, limits, base)
    on_cpu = targets.device.type == "cpu"
    # Long pieces come last, so that work changes threads once. A copy to a GPU waits for the step that runs there.
    long = {name for name, parts in modules.items() if not on_cpu or _is_long(parts)}
    for module in sorted(modules, key=long.__contains__):
        yield Piece.LONG if module in long else Piece.SHORT
        builder.add(module, modules.pop(module))
    builder.check_whole()
    weights = targets.weights(builder.embedding, builder.num_extra_tokens())
    memory = DeltaMemory(builder.room) if on_cpu else None
    for product in sorted(builder.deltas):  # nearly the order in which a step reads them
        yield Piece.LONG if long else Piece.SHORT
        own = builder.deltas.pop(product)
        if memory is None:
            weights.add(product, own)
        else:
            add_changes(weights, product, memory.copies(own))
    if not on_cpu:
        yield Piece.LONG
        table_of(weights, targets.device)  # here, so that no step waits for the copy
    return weights, builder.rank


def _is_long(parts: Parts) -> bool:
    """True if taking the tensors of a module in reads much memory, the model's own or theirs."""
    return bool(parts.keys() & WITH_BASE) or any(tensor.nbytes > LARGE_BYTES for tensor in parts.values())


@dataclass
class _DeltaBuilder:
    config: AdapterConfig
    targets: Targets
    limits: LoRAConfig
    base: BaseWeights
    deltas: dict[int, list[Delta]] = field(default_factory=dict)
    embedding: EmbeddingDelta | None = None
    room: int = 0
    """Bytes that all changes take in memory."""
    rank: int = 0
    num_rows: dict[str, int] = field(default_factory=dict)
    """Rows of the whole embedding and output layer, where the adapter has them."""
    seen: set[str] = field(default_factory=set)
    expert_parts: ExpertParts = field(default_factory=ExpertParts)

    def add(self, module: str, parts: Parts) -> None:
        """Take the tensors of a module in."""
        if (found := self.targets.find_experts(module)) is not None:
            self._add_experts(module, found, parts)
            return
        name = self.targets.find(module)
        self.seen.add(name)
        if name == self.targets.embedding or name in self.targets.places:
            parts = self._without_base(module, name, parts)
        if not parts:
            return
        if name == self.targets.embedding:
            self._add_embedding(module, parts)
        elif (place := self.targets.places.get(name)) is not None:
            self._add_linear(module, name, place, parts)
        else:
            raise ValueError(
                f"{quoted(module)} is no linear layer of this model that adapters can change, nor its embedding of "
                f"tokens; the adapter is of {quoted(self.config.fields.base_model_name_or_path)}"
            )

    def check_whole(self) -> None:
        """Refuse an adapter without tensors of modules that its configuration names."""
        fields = self.config.fields
        for name, place in self.targets.places.items():
            if name in self.seen:
                continue
            is_named = fields.target_modules is not None or fields.target_parameters is not None
            is_left_out = place.is_output or place.is_optional  # by "all-linear"
            if self.config.saves(name) or (is_named and self.config.targets(name, is_left_out)):
                raise ValueError(f"its tensors of {quoted(name)} are missing")
        for name, places in self.targets.experts.items():
            for expected in missing_experts(self.config, name, places, self.expert_parts):
                raise ValueError(f"its tensors of {quoted(expected)} are missing")
        for saved_name in fields.modules_to_save or ():
            if not any(name == saved_name or name.endswith(f".{saved_name}") for name in self.seen):
                raise ValueError(f"modules_to_save: the tensors of {quoted(saved_name)} are missing")

    def num_extra_tokens(self) -> int:
        """The tokens behind the model's vocabulary that the adapter brings.

        Raises:
            ValueError: there are too many, or the embedding and the output layer do not agree on them.
        """
        own, limit = self.targets.embedding_shape[0], self.limits.extra_vocab_size
        sizes = dict(self.num_rows)
        if not own or set(sizes.values()) <= {own}:
            return 0
        if len(set(sizes.values())) > 1 or self.targets.find(next(iter(sizes))) != self.targets.embedding:
            raise ValueError(f"for a vocabulary of {own}, its embedding and output layer have rows {sizes}")
        extra = next(iter(sizes.values())) - own
        if extra < 0 or self.targets.device.type != "cpu":
            raise ValueError(
                f"it is of a vocabulary of {own + extra}, not of {own}: a smaller one is not served, and on a GPU "
                "no larger one"
            )
        if extra > limit:
            raise ValueError(f"it brings {extra} tokens, over lora_extra_vocab_size {limit}")
        return extra

    def _add_experts(self, module: str, found: FoundExperts, parts: Parts) -> None:
        if parts.keys() != LORA:
            raise ValueError(
                f"{quoted(module)} has {kinds_of(parts)}: of experts only lora_A and lora_B are served; PEFT's "
                "merge_and_unload makes a model of the adapter"
            )
        places = found.places
        if found.expert is not None:
            place = places.separate(found.leaf, found.expert)
            if place is None:
                raise ValueError(f"{quoted(module)} is no linear layer of this model's {len(places)} experts")
            self.expert_parts.add_separate(found)
            self._add_linear(module, module, place, parts)
            return
        parameter = found.parameter(self.config)
        self.expert_parts.add_stacked(found.name, parameter)
        name, (a, b) = f"{found.module}.{parameter}", (parts[Kind.A], parts[Kind.B])
        of_all = places.stacked(parameter, 0)
        count, (num_out, num_in) = len(places), of_all.whole
        rank, scale = self._check_rank(name, len(a) // count if a.dim() == 2 else 0), self.config.scale(name)
        self._check_shape(name, a, (count * rank, num_in))
        self._check_shape(name, b, (num_out, rank * count))
        a = self._held(name, own_columns(a, of_all.cut)).view(count, rank, -1)
        b = self._held(name, own_rows(b, of_all.cut)).view(-1, rank, count)
        for expert in range(count):
            place = places.stacked(parameter, expert)
            delta = Delta(a[expert], panels(b[:, :, expert]), place.first, place.num_out, scale)
            self._keep(place, delta)

    def _keep(self, place: Place, delta: Delta) -> None:
        if place.linear is None:
            return
        delta = place.multiplied(delta)
        self.room += room_of(delta)
        self.deltas.setdefault(place.linear.number, []).append(delta.to(self.targets.device))

    def _add_linear(self, module: str, name: str, place: Place, parts: Parts) -> None:
        if Kind.WEIGHT in parts:
            delta = self._whole(module, place, parts)
        elif parts.keys() & LORA:
            delta = self._low_rank(module, name, place, parts)
        elif parts.keys() == {Kind.BIAS}:
            empty = torch.empty(0, place.num_in, dtype=self._dtype())
            shift = self._vector(module, parts[Kind.BIAS], place) - place.bias(self.targets.device)
            second = panels(torch.empty(place.num_out, 0, dtype=self._dtype()))
            shifted = own_shift(shift, place.cut)
            delta = Delta(empty, second, place.first, place.num_out, shift=shifted)
        else:
            raise ValueError(
                f"{quoted(module)} has {kinds_of(parts)}, which is not served for a linear layer"
            )
        self._keep(place, delta)

    def _without_base(self, module: str, name: str, parts: Parts) -> Parts:
        """The tensors but for a weight that is the model's own: PEFT may save embedding and output layer as is."""
        if Kind.WEIGHT not in parts or self.config.saves(module):
            return parts
        if not self.base.equals(name, parts[Kind.WEIGHT]):
            raise ValueError(
                f"{quoted(module)} has another weight than this model, and modules_to_save does not name it; the "
                f"adapter is of {quoted(self.config.fields.base_model_name_or_path)}"
            )
        return {kind: tensor for kind, tensor in parts.items() if kind is not Kind.WEIGHT}

    def _whole(self, module: str, place: Place, parts: Parts) -> Delta:
        """A weight that takes the place of the model's own."""
        if not parts.keys() <= {Kind.WEIGHT, Kind.BIAS}:
            raise ValueError(
                f"{quoted(module)} has {kinds_of(parts)}: a whole weight with more is not served"
            )
        weight, (whole_out, num_in) = parts[Kind.WEIGHT], place.whole
        if self.config.fields.fan_in_fan_out and weight.shape == (num_in, whole_out):
            weight = weight.T
        num_out = whole_out
        if place.is_output and weight.dim() == 2:
            self.num_rows[module] = num_out = len(weight)
        self._check_shape(module, weight, (num_out, num_in))
        bias = parts.get(Kind.BIAS)
        shift = place.bias(self.targets.device) if bias is None else self._vector(module, bias, place)
        if num_out != whole_out and shift.any():
            raise ValueError(f"{quoted(module)} with a bias for another vocabulary is not served")
        part = place.in_order(own_columns(own_tokens(weight, whole_out, place.cut), place.cut))
        held = self._held(module, part, self.targets.dtype)
        return Delta(held, None, place.first, len(held), shift=own_shift(shift, place.cut))

    def _low_rank(self, module: str, name: str, place: Place, parts: Parts) -> Delta:
        if not parts.keys() >= LORA or parts.keys() & EMBEDDING:
            raise ValueError(f"{quoted(module)} has {kinds_of(parts)}: lora_A and lora_B go together")
        if not any(self.config.targets(known, place.is_output) for known in (module, name)):
            raise ValueError(f"{quoted(module)} has low-rank tensors, but target_modules does not name it")
        a, b, scale = parts[Kind.A], parts[Kind.B], self.config.scale(module)
        rank = self._check_rank(module, len(a) if a.dim() == 2 else 0)
        num_out, num_in = place.whole
        self._check_shape(module, a, (rank, num_in))
        self._check_shape(module, b, (num_out, rank))
        shift = torch.zeros(place.num_out)
        if (of_b := parts.get(Kind.B_BIAS)) is not None:
            shift += scale * self._vector(module, of_b, place)
        gain, own = None, torch.zeros(place.num_out)
        if parts.keys() & {Kind.MAGNITUDE, Kind.BIAS}:
            own = place.bias(self.targets.device)
        if (magnitude := parts.get(Kind.MAGNITUDE)) is not None:
            if of_b is not None:
                raise ValueError(f"{quoted(module)}: DoRA with lora_bias is not served")
            factors = (name, scale, a.float(), b.float(), place.cut)
            norms = 1.0 if place.is_elsewhere else place.in_order(self.base.norms(*factors))
            gain = self._vector(module, magnitude.reshape(-1), place) / norms
            shift -= gain * own
            shift += own
        if (bias := parts.get(Kind.BIAS)) is not None:
            shift += self._vector(module, bias, place) - own
        return Delta(
            self._held(module, own_columns(a, place.cut)),
            panels(self._held(module, place.own_rows(b))),
            place.first,
            place.num_out,
            scale,
            gain,
            own_shift(shift, place.cut) if parts.keys() != LORA else None,
        )

    def _add_embedding(self, module: str, parts: Parts) -> None:
        rows, a, b, scale = None, None, None, 1.0
        if not parts.keys() <= EMBEDDING | {Kind.WEIGHT} or len(parts.keys() & EMBEDDING) == 1:
            raise ValueError(f"{quoted(module)} has {kinds_of(parts)}, which is not served for an embedding")
        num_tokens, size = self.targets.embedding_shape
        num_rows, cut = num_tokens, self.targets.cuts.get(f"{self.targets.embedding}.weight")
        if (weight := parts.get(Kind.WEIGHT)) is not None:
            num_rows = len(weight)
            self._check_shape(module, weight, (num_rows, size))
            self.num_rows = {module: num_rows, **self.num_rows}  # it says first how many there are
            part = own_tokens(weight, num_tokens, cut)
            rows = self._held(module, part, self.targets.dtype).to(self.targets.device, copy=True)
        if Kind.EMBEDDING_A in parts:
            first, second = parts[Kind.EMBEDDING_A], parts[Kind.EMBEDDING_B]
            scale, rank = self.config.scale(module), self._check_rank(module, len(first))
            self._check_shape(module, first, (rank, num_rows))
            self._check_shape(module, second, (size, rank))
            part = own_tokens(first.T, num_tokens, cut)
            a = self._held(module, part).float().to(self.targets.device, copy=True)
            b = self._held(module, second).float().to(self.targets.device, copy=True)
        if self.targets.has_embedding:
            self.embedding = EmbeddingDelta(rows, a, b, scale)

    def _check_rank(self, module: str, rank: int) -> int:
        if rank != self.config.rank(module):
            raise ValueError(
                f"{quoted(module)} has rank {rank}, its configuration says {self.config.rank(module)}"
            )
        if rank > self.limits.max_lora_rank:
            raise ValueError(
                f"{quoted(module)} has rank {rank}, over max_lora_rank {self.limits.max_lora_rank}"
            )
        self.rank = max(self.rank, rank)
        return rank

    def _check_shape(self, module: str, tensor: Tensor, shape: tuple[int, int]) -> None:
        if tensor.shape != shape:
            raise ValueError(
                f"{quoted(module)} has a tensor of shape {tuple(tensor.shape)} where this model needs {shape}; the "
                f"adapter is of {quoted(self.config.fields.base_model_name_or_path)}"
            )

    def _vector(self, module: str, tensor: Tensor, place: Place) -> Tensor:
        """This rank's part [num_out] of a vector of a module, in float32."""
        if tensor.shape != place.whole[:1]:
            raise ValueError(
                f"{quoted(module)} has a vector of shape {tuple(tensor.shape)} for {place.whole[0]} outputs"
            )
        return self._held(module, place.own_rows(tensor), torch.float32)

    def _dtype(self) -> torch.dtype:
        """The dtype in which low-rank matrices are held: the model's, or float32 where the limits say another."""
        chosen = DTYPES.get(self.limits.lora_dtype, self.targets.dtype)
        return self.targets.dtype if chosen == self.targets.dtype else torch.float32

    def _held(self, module: str, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor in a dtype, by default that of low-rank matrices, rounded to `lora_dtype`; contiguous.

        A tensor that needs no change is still memory of the file.
        """
        if dtype is None:
            tensor, dtype = tensor.to(DTYPES.get(self.limits.lora_dtype, self.targets.dtype)), self._dtype()
        held = tensor.to(dtype).contiguous()
        if not bool(torch.isfinite(held).all()):
            raise ValueError(f"{quoted(module)} has numbers that are not finite in {held.dtype}")
        return held
