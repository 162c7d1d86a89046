"""The modules that other stages of a pipeline have, by which every rank checks a whole adapter.

Each stage finds the modules of its own layers in what it has loaded, and sends their names and sizes to the others.
So all ranks refuse what one worker would refuse, in the same words, and each keeps what belongs to its own layers.
"""

from __future__ import annotations

import msgspec
import torch

from pagewire.ipc.wire.worker_messages import Parallel
from pagewire.workers.adapters.division import whole_shape
from pagewire.workers.adapters.experts import ExpertPlaces
from pagewire.workers.adapters.place import Place
from pagewire.workers.adapters.targets import Targets
from pagewire.workers.ranks.agreement import from_rank
from pagewire.workers.ranks.interface import Collective


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
    vectors: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, targets: Targets) -> StageModules:
        """Those of this rank's stage."""
        linears = {name: place.elsewhere() for name, place in targets.places.items()}
        experts = {name: StageExperts.of(places) for name, places in targets.experts.items()}
        vectors = {name: whole_vector(name, targets) for name in targets.vectors}
        return cls(linears, experts, targets.embedding, targets.embedding_shape, vectors)


def whole_vector(name: str, targets: Targets) -> tuple[int, ...]:
    """The shape of a parameter on all ranks of its stage together."""
    shape = tuple(targets.vectors[name].shape)
    return (whole_shape((shape[0], 1), targets.cuts.get(name))[0], *shape[1:]) if shape else shape


def add_other_stages(targets: Targets, ranks: Collective, parallel: Parallel) -> None:
    """Add the modules of the other stages to those of this one, in the order of the stages.

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
        for name, shape in stage.vectors.items():
            targets.vectors.setdefault(name, torch.empty(shape, device="meta"))
        if stage.embedding and not targets.embedding:
            targets.embedding, targets.embedding_shape = stage.embedding, stage.embedding_shape
            targets.has_embedding = False
    targets.places, targets.experts = places, experts
