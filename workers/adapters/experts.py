"""Where the matrices of a mixture's experts are among the products of a model, and by which names PEFT saves them.

There are two forms. Separate: an expert's matrices are linear layers of their own, as in transformers 4 and in most
checkpoints ("experts.3.w1"). Stacked: PEFT's `target_parameters` adapts a parameter [E, ...] with the matrices of
all experts. The tensors of one such parameter are named like those of the experts' module; where two are adapted,
PEFT wraps the module twice, and those of the first parameter have ".base_layer" in their names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from pagewire.ipc.quoting import quoted
from pagewire.workers.adapters.config import AdapterConfig
from pagewire.workers.adapters.division import part_of
from pagewire.workers.adapters.names import WRAPPED
from pagewire.workers.adapters.place import Place

SPLIT = re.compile(rf"(.*?)((?:\.\d+\.\w+)|(?:{re.escape(WRAPPED)})*)")
"""A module's name, as that of all experts and what follows it."""
GATE, UP, DOWN = {"gate_proj", "w1"}, {"up_proj", "w3"}, {"down_proj", "w2"}
"""Names of an expert's linear layers."""
OLD_BLOCK, BLOCK = ".block_sparse_moe.", ".mlp."
"""The names of a feed-forward half in transformers 4 and in later versions."""


@dataclass(frozen=True, slots=True)
class ExpertPlaces:
    """Where the matrices of a layer's E experts are.

    up_name: the parameter that has the first matrices. is_joined: they are the gate's and then the rest of the
    first layer's outputs; else they are one linear layer, or both in another order.
    """

    up: Sequence[Place]
    down: Sequence[Place]
    up_name: str = "gate_up_proj"
    is_joined: bool = True

    def __len__(self) -> int:
        """The number E of experts."""
        return len(self.up)

    @property
    def parameters(self) -> tuple[str, str]:
        """The names of the stacked parameters, in the order in which PEFT wraps them."""
        return self.up_name, "down_proj"

    def stacked(self, parameter: str, expert: int) -> Place:
        """The place of an expert's matrix in a stacked parameter."""
        return (self.up if parameter == self.up_name else self.down)[expert]

    def separate(self, leaf: str, expert: int) -> Place | None:
        """The place of an expert's linear layer of this name; None if it has none."""
        if expert >= len(self):
            return None
        if leaf in DOWN:
            return self.down[expert]
        whole = self.up[expert]
        if self.up_name in UP:
            return whole if leaf in UP else None
        if not self.is_joined or leaf not in GATE | UP:
            return None
        own, size = whole.num_out // 2, whole.whole[0] // 2
        cut = part_of(whole.cut, size if leaf in UP else 0, size)
        return replace(whole, first=own if leaf in UP else 0, num_out=own, cut=cut)

    def whole_shapes(self) -> list[tuple[int, int]]:
        """The outputs and inputs of every linear layer of every expert, on all ranks."""
        (num_out, num_in), down = self.up[0].whole, self.down[0].whole
        up = [(num_out, num_in)] if self.up_name in UP else [(num_out // 2, num_in)] * 2
        return [*up, down] * len(self)


@dataclass(frozen=True, slots=True)
class FoundExperts:
    """What a module's name says: the experts `places` by their name here, and which of their matrices.

    module: of all experts, as the adapter names it. depth: how often it is wrapped in a stacked form.
    expert: its number in a separate form, with the name `leaf` of its linear layer; None in a stacked one.
    """

    name: str
    module: str
    places: ExpertPlaces
    depth: int = 0
    expert: int | None = None
    leaf: str = ""

    @classmethod
    def of(cls, module: str, name: str, rest: str, places: ExpertPlaces) -> FoundExperts:
        """The experts `name`, which an adapter calls `module`. rest: what follows it, see `SPLIT`."""
        if rest.startswith(WRAPPED) or not rest:
            return cls(name, module, places, rest.count(WRAPPED))
        _, expert, leaf = rest.split(".")
        return cls(name, module, places, 0, int(expert), leaf)

    def parameter(self, config: AdapterConfig) -> str:
        """The stacked parameter that the tensors are of.

        Raises:
            ValueError: the configuration names no such parameter.
        """
        named = [name for name in self.places.parameters if config.adapts(f"{self.module}.{name}")]
        if self.depth >= len(named):  # the last one is wrapped last
            raise ValueError(
                f"{quoted(self.module)} has low-rank tensors that target_parameters does not name"
            )
        return named[len(named) - 1 - self.depth]


@dataclass
class ExpertParts:
    """The matrices of experts that an adapter has.

    separate: by the experts' name, numbers and names of linear layers. stacked: likewise, names of parameters.
    leaves: the names that linear layers have in any experts.
    """

    separate: dict[str, set[tuple[int, str]]] = field(default_factory=dict)
    stacked: dict[str, set[str]] = field(default_factory=dict)
    leaves: set[str] = field(default_factory=set)

    def add_separate(self, found: FoundExperts) -> None:
        """Add the tensors of an expert's linear layer."""
        assert found.expert is not None
        self.separate.setdefault(found.name, set()).add((found.expert, found.leaf))
        self.leaves.add(found.leaf)

    def add_stacked(self, name: str, parameter: str) -> None:
        """Add the tensors of a parameter of experts."""
        self.stacked.setdefault(name, set()).add(parameter)


def missing_experts(
    config: AdapterConfig, name: str, places: ExpertPlaces, parts: ExpertParts
) -> Iterator[str]:
    """The parameters and linear layers of the experts `name` that a configuration names and an adapter lacks."""
    for parameter in places.parameters:
        if config.adapts(f"{name}.{parameter}") and parameter not in parts.stacked.get(name, ()):
            yield f"{name}.{parameter}"
    has = parts.separate.get(name, set())
    for leaf in sorted(parts.leaves):
        for expert in range(len(places)):
            if (expert, leaf) in has:
                continue
            full = f"{name}.{expert}.{leaf}"
            if any(config.targets(possible, False) for possible in {full, older_name(full)}):
                yield full


def split_experts(module: str) -> tuple[str, str]:
    """A module's name as that of all experts, if it is one of theirs, and what follows it."""
    found = SPLIT.fullmatch(module)
    return (module, "") if found is None else (found[1], found[2])


def later_name(module: str) -> str:
    """The name that a module of transformers 4 has in later versions."""
    return module.replace(OLD_BLOCK, BLOCK)


def older_name(module: str) -> str:
    """The name that a module had in transformers 4."""
    return module.replace(BLOCK, OLD_BLOCK)
