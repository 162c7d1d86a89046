"""Mixers of states: what a layer computes between its first and its last product in place of attention.

Each has a causal convolution, and most a state beside it that every token changes. `pagewire.kernels.mixers` says
what they compute. Numbers that are the same for all tokens are laid out as the kernels read them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from torch import Tensor

from pagewire.kernels.data.weight import Linear


@dataclass(frozen=True, slots=True)
class Convolution:
    """A causal convolution of single channels, see `StateKernels.causal_conv`."""

    taps: Tensor
    """[K, C], the newest input's last."""
    bias: Tensor | None
    """[C]."""
    silu: bool

    @property
    def channels(self) -> int:
        """The number C of channels."""
        return self.taps.shape[1]

    @property
    def state(self) -> tuple[int, ...]:
        """The inputs before a token."""
        return len(self.taps) - 1, self.channels


@dataclass(frozen=True, slots=True)
class OutputGate:
    """Opens a result by gates, and maybe norms it: see `StateKernels.open_by`."""

    group: int
    """The numbers D of a token that are normed together."""
    weight: Tensor | None = None
    """Of the norm, [D] or [G, D] for each group; None: there is no norm."""
    eps: float = 0.0
    sigmoid: bool = False
    """A gate opens by its sigmoid; else by SiLU."""
    first: bool = False
    """What the gate has opened is normed; else what is normed is opened."""
    single: bool = False
    """A group has one gate, not one for each of its numbers."""


@dataclass(frozen=True, slots=True)
class StateMixer:
    """A mixer between a product of normed states [T, H] to [T, N], and one of what it gives [T, M].

    The kinds below have the same methods. `linear_names`: the fields that are linear layers of their own.
    """

    linear_names: ClassVar[tuple[str, ...]] = ()

    conv: Convolution

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers N that it takes of a token, and M that it gives."""
        raise NotImplementedError

    @property
    def states(self) -> list[tuple[int, ...]]:
        """The shapes of its states after one token; their numbers are float32."""
        return [self.conv.state]

    @property
    def linears(self) -> dict[str, Linear]:
        """Its linear layers by the names of their fields."""
        found = {name: getattr(self, name) for name in self.linear_names}
        return {name: linear for name, linear in found.items() if linear is not None}

    def with_linears(self, linears: dict[str, Linear]) -> StateMixer:
        """The same with other linear layers, by the names of their fields."""
        changed: dict[str, Any] = {**linears}
        return replace(self, **changed)

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights."""
        parts = [self, *(getattr(self, field.name) for field in fields(self))]
        held = [part for part in parts if isinstance(part, StateMixer | Convolution | OutputGate)]
        own = [getattr(part, field.name) for part in held for field in fields(part)]
        tensors = sum(part.nbytes for part in own if isinstance(part, Tensor))
        return tensors + sum(linear.num_bytes for linear in self.linears.values())


@dataclass(frozen=True, slots=True)
class Beside:
    """A mixer of states beside attention, which takes the same; what both give is added (Falcon-H1)."""

    taken: Linear
    """[T, H] to what the mixer takes, [T, N]."""
    mixer: StateMixer
    out: Linear
    """What it gives, [T, M], to [T, H]."""

    @property
    def linears(self) -> dict[str, Linear]:
        """Its first and last linear layer, by names that no other one of a layer has."""
        return {"beside": self.taken, "beside_out": self.out}

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights."""
        return self.taken.num_bytes + self.mixer.num_bytes + self.out.num_bytes


@dataclass(frozen=True, slots=True)
class ShortConv(StateMixer):
    """LFM2's: a convolution between two gates. It takes gates before, gates after, and values: [T, 3 C]."""

    @property
    def sizes(self) -> tuple[int, int]:
        """See `StateMixer`."""
        return 3 * self.conv.channels, self.conv.channels


@dataclass(frozen=True, slots=True)
class GatedDelta(StateMixer):
    """A gated delta rule (Qwen3.5). It takes queries, keys, values and gates: [T, 2 Hk Dk + 2 Hv Dv].

    A step is of a head, or of a row of its state (n is Hv, or Hv Dk), as in Kimi's delta attention. Steps and gates
    may come by fewer numbers, of which linear layers make them.
    """

    linear_names: ClassVar[tuple[str, ...]] = ("factors", "steps", "gates")

    factors: Linear
    """[T, H] to [T, Hv + n]: how much of a value is new, and steps; or R numbers for `steps`, and R for `gates`."""
    bias: Tensor
    """float32 [n], of steps."""
    decay: Tensor
    """float32 [n], below 0: the logarithm of what a step of 1 leaves."""
    gate: OutputGate
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    norm_eps: float
    """Under the square root of the length of queries and keys, by which they are divided."""
    rate: float = 1.0
    """The most of a value that is new."""
    steps: Linear | None = None
    """[T, R] to [T, n]; None: `factors` gives steps."""
    gates: Linear | None = None
    """[T, R] to [T, Hv Dv]; None: the mixer takes gates."""

    @property
    def sizes(self) -> tuple[int, int]:
        """See `StateMixer`."""
        values = self.value_heads * self.value_dim
        return self.conv.channels + (values if self.gates is None else 0), values

    @property
    def factor_sizes(self) -> list[int]:
        """The numbers of a token that `factors` gives for values, steps and gates."""
        steps = len(self.bias) if self.steps is None else self.steps.in_features
        return [self.value_heads, steps, 0 if self.gates is None else self.gates.in_features]

    @property
    def states(self) -> list[tuple[int, ...]]:
        """See `StateMixer`."""
        return [self.conv.state, (self.value_heads, self.key_dim, self.value_dim)]


@dataclass(frozen=True, slots=True)
class StateSpace(StateMixer):
    """Mamba 2's. It takes gates, values, inputs and outputs of the space, and steps: [T, 2 H P + 2 G N + H]."""

    bias: Tensor
    """float32 [H], of steps."""
    decay: Tensor
    """float32 [H], below 0: the logarithm of what a step of 1 leaves."""
    skip: Tensor
    """float32 [H]: how much of its values a head gives beside what its state gives."""
    limits: tuple[float, float]
    """The least and the largest step."""
    gate: OutputGate
    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int

    @property
    def sizes(self) -> tuple[int, int]:
        """See `StateMixer`."""
        values = self.num_heads * self.head_dim
        return values + self.conv.channels + self.num_heads, values

    @property
    def states(self) -> list[tuple[int, ...]]:
        """See `StateMixer`."""
        return [self.conv.state, (self.num_heads, self.state_dim, self.head_dim)]


@dataclass(frozen=True, slots=True)
class SelectiveScan(StateMixer):
    """Mamba 1's, where each channel has decays of its own. It takes values and gates: [T, 2 C]."""

    linear_names: ClassVar[tuple[str, ...]] = ("factors", "steps")

    factors: Linear
    """Convolved values [T, C] to [T, R + 2 N]: of steps, and inputs and outputs of the space."""
    steps: Linear
    """[T, R] to [T, C]."""
    decay: Tensor
    """float32 [N, C], below 0: the logarithm of what a step of 1 leaves."""
    skip: Tensor
    """float32 [C]."""
    gate: OutputGate
    norms: tuple[Tensor, Tensor, Tensor] | None = None
    """Weights [R], [N] and [N] of RMS norms of the three factors (Jamba)."""
    eps: float = 0.0
    """Of these norms."""

    @property
    def state_dim(self) -> int:
        """The number N of a channel's decays."""
        return len(self.decay)

    @property
    def sizes(self) -> tuple[int, int]:
        """See `StateMixer`."""
        return 2 * self.conv.channels, self.conv.channels

    @property
    def states(self) -> list[tuple[int, ...]]:
        """See `StateMixer`."""
        return [self.conv.state, tuple(self.decay.shape)]
