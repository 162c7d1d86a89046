"""Routers of transformers' mixtures of experts as numbers (`Routing`), found by trying.

A feed-forward half runs as it is, but with a router's weights of ours, and with parts in place of its experts that
keep what they are given. A form is taken if it makes of the same logits what the half makes of them, whatever a
family names its numbers and wherever it computes with them. No weights are read for it, so it does not matter which
values those of a checkpoint have.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pagewire.kernels.data.layer import Router
from pagewire.kernels.data.routing import ExpertGroups, Routing
from pagewire.kernels.data.weight import dense_weight
from pagewire.kernels.reference.routing import choose, for_choice, scores_of
from pagewire.workers.module.products import packed
from pagewire.workers.module.structure import EXPERTS, GIVEN_NORMS, SHARED, SHARED_GATE
from pagewire.workers.module.transforms import pack_joined, tolerance
from pagewire.workers.module.weights import Weights

logger = logging.getLogger("pagewire.worker")

SPREADS = ((1.0, 0.0), (4.0, 0.0), (1.0, -20.0), (1.0, -120.0))
"""How far logits that are tried lie apart, and around which number: the sigmoids of some are almost 0, or 0."""
ROWS = 16  # of each of them
EPSILONS = (0.0, 1e-20, 1e-6)  # that stand in no configuration
EXPERTS_GIVE, SHARED_GIVES, GATE_GIVES = 2.0, 1.0, 0.0
"""What stands in for the parts of a half gives its input times. The sigmoid of the last one is a half."""
AVERAGE = 0.5
"""What Cohere 2 MoE multiplies the sum by of what experts give, and of what the one for every token gives."""
FACTOR = ("routed_scaling_factor", "route_scale", "router_scaling_factor")
GROUPS, KEPT_GROUPS = ("num_group", "n_group"), ("topk_group",)
EPSILON, JITTER = ("norm_min",), ("router_jitter_noise",)
"""The names that families give the numbers of their routers."""

Place = tuple[Any, str]
"""A module, and the name of a parameter or a buffer of its own."""


class StandIn(nn.Module):
    """In place of a part of a half: keeps what it is given, and gives the first of it, states, times a factor.

    shift: by so many places; so it is seen what of a sum is whose.
    """

    def __init__(self, factor: float, shift: int = 0) -> None:
        super().__init__()
        self.factor, self.shift = factor, shift
        self.states = torch.empty(0)
        self.others: tuple[Any, ...] = ()

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Tensor:
        """x [..., H] to [..., H]."""
        self.states, self.others = x, (*others, *named.values())
        return self.factor * x.roll(self.shift, -1)


@dataclass(frozen=True)
class RouterRun:
    """What a half makes of logits of ours.

    states: [T, H]. matrix: [E, H]. logit_bias: [E], or None. bias: float32 [E], of the choice, or None.
    ids, weights: [T, C], of the experts that are chosen, in any order. weighs_inputs: see `Experts`.
    shared_factor: what the expert that every token gets gives is multiplied by it.
    """

    states: Tensor
    matrix: Tensor
    logit_bias: Tensor | None
    bias: Tensor | None
    ids: Tensor
    weights: Tensor
    weighs_inputs: bool
    shared_factor: float = 1.0

    def logits(self, dtype: torch.dtype) -> Tensor:
        """The logits [T, E] of a product in a dtype."""
        bias = None if self.logit_bias is None else self.logit_bias.to(dtype)
        return functional.linear(self.states.to(dtype), self.matrix.to(dtype), bias)

    def is_of(self, routing: Routing) -> bool:
        """True if these numbers make the same of the logits; of experts that are equal, either may be chosen."""
        logits = self.logits(torch.float32)
        ids, weights = choose(logits, routing, self.bias)
        basis = logits if routing.by_logits else scores_of(logits, routing)
        by = for_choice(basis, self.bias, routing.groups)
        pairs = [(by.gather(1, ids), by.gather(1, self.ids)), (weights, self.weights.float())]
        return all(
            torch.allclose(
                ours.sort(1).values, theirs.sort(1).values, tolerance(torch.float32), 1e-6, equal_nan=True
            )
            for ours, theirs in pairs
        )

    def difference(self, routing: Routing, dtype: torch.dtype) -> float:
        """How far these numbers are from the half's, with logits of a product in a dtype."""
        ids, weights = choose(self.logits(dtype).float(), routing, self.bias)
        ours, theirs = (
            torch.zeros(len(ids), len(self.matrix)).scatter(1, at, values.float().nan_to_num())
            for at, values in ((ids, weights), (self.ids, self.weights))
        )
        return float((ours - theirs).abs().mean())


@dataclass(frozen=True)
class RouterParts:
    """A router of a half of experts, and where its weights are.

    half: the module of all of it. gate: the name of what has the router's weights in it.
    routing: what it computes, in float32. linear: the module with the matrix of the logits, `weight` [E, H], and
    their `bias`, if it has one. bias: that of the choice; None: it has none. weighs_inputs: see `Experts`.
    shared_factor: see `RouterRun`.
    """

    half: Any
    gate: str
    routing: Routing
    linear: Any
    bias: Place | None
    weighs_inputs: bool = False
    shared_factor: float = 1.0

    def packed(self, weights: Weights, device: torch.device, dtype: torch.dtype) -> Router:
        """The router with its weights, packed on a device, in the dtypes in which the half computes it.

        dtype: of the layer's states.
        """
        read: dict[Place, Tensor] = {}
        for module, name, _ in owned(self.half, self.gate):
            tensor = weights.read(module, name)
            assert tensor is not None
            read[module, name] = tensor
        outcome = run(self, lambda place: read[place].dtype, dtype)
        routing = replace(self.routing, dtype=outcome.weights.dtype)
        own, wide = (outcome.difference(routing, each) for each in (dtype, torch.float32))
        matrix = dense_weight(read[self.linear, "weight"].to(dtype if own <= wide else torch.float32))
        linear = packed(matrix, read.get((self.linear, "bias")), device)
        weights.let_go()
        bias = None if self.bias is None else read[self.bias].flatten().to(device, torch.float32)
        return Router(linear, routing, bias)


@dataclass(frozen=True)
class SumRouterParts:
    """A router of Gemma 4. `SumTaker` says what it takes, and how weights are scaled behind it."""

    module: Any
    num_chosen: int

    @property
    def linear(self) -> Any:
        """The module with the matrix of the logits, `weight` [E, H]."""
        return self.module.proj

    @property
    def weighs_inputs(self) -> bool:
        """See `Experts`."""
        return False

    def packed(self, weights: Weights, device: torch.device, dtype: torch.dtype) -> Router:
        """The router with its weights, packed on a device. dtype: of the layer's states, and of logits."""
        linear = pack_joined([self.linear], weights, device)
        assert linear.dtype is dtype
        return Router(linear, Routing(self.num_chosen, normalised=True, dtype=torch.float32))


def router_parts(half: Any) -> RouterParts | None:
    """The router of a feed-forward half with experts; None if it computes what no numbers say."""
    try:
        with torch.no_grad():
            return _found(half)
    except Exception as error:  # what nobody has seen may fail in any way
        logger.debug("a %s cannot be tried: %r", type(half).__name__, error)
        return None


def _found(half: Any) -> RouterParts | None:
    apart = {EXPERTS, SHARED_GATE, *SHARED, *GIVEN_NORMS}
    (gate,) = {name for name, child in half.named_children() if any(True for _ in child.parameters())} - apart
    (linear,) = (m for m in getattr(half, gate).modules() if getattr(m, "weight", None) is not None)
    of_linear = {(linear, "weight"), (linear, "bias")}
    others = {(module, name): tensor for module, name, tensor in owned(half, gate)}
    others = {place: tensor for place, tensor in others.items() if place not in of_linear}
    if len(others) > 1 or any(tensor.numel() != len(linear.weight) for tensor in others.values()):
        return None
    routing = Routing(1, False, torch.float32)
    parts = RouterParts(half, gate, routing, linear, next(iter(others), None))
    outcome = run(parts, lambda _: torch.float32, torch.float32)
    modules = [half, *getattr(half, gate).modules()]
    forms = routings(modules, outcome.ids.shape[1], len(outcome.matrix))
    found = next((form for form in forms if outcome.is_of(form)), None)
    if found is None:
        return None
    own = outcome.weighs_inputs, outcome.shared_factor
    return replace(parts, routing=found, weighs_inputs=own[0], shared_factor=own[1])


def owned(half: Any, gate: str) -> Iterator[tuple[Any, str, Tensor]]:
    """The parameters and buffers of a half itself and of all within its router, with their modules and names."""
    for module in (half, *getattr(half, gate).modules()):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield module, name, tensor


def routings(modules: list[Any], num_chosen: int, num_experts: int) -> Iterator[Routing]:
    """What a router may compute by the numbers that its modules have as attributes, in float32."""

    numbers = partial(numbers_of, modules)
    count, kept = (int(numbers(names, 1)[0]) for names in (GROUPS, KEPT_GROUPS))
    groups: list[ExpertGroups | None] = [None]
    if kept < count:
        groups += [ExpertGroups(count, kept, best) for best in (1, 2) if best <= num_experts // count]
    for group, (sigmoid, by_logits), normalised, epsilon, factor, jitter in product(
        groups,
        ((False, False), (True, False), (True, True)),
        (False, True),
        numbers(EPSILON, *EPSILONS),
        numbers(FACTOR, 1.0, AVERAGE),
        numbers(JITTER, 0.0),
    ):
        if normalised or epsilon == 0:
            own = (normalised, torch.float32, sigmoid, group, epsilon, factor, 2 * jitter, by_logits)
            yield Routing(num_chosen, *own)


def numbers_of(modules: list[Any], names: tuple[str, ...], *usual: float) -> list[float]:
    """The numbers that modules have as attributes of these names, and the usual ones."""
    found = (getattr(module, name, None) for name in names for module in modules)
    return list(dict.fromkeys([*(float(n) for n in found if isinstance(n, int | float)), *usual]))


def run(parts: RouterParts, dtype_of: Callable[[Place], torch.dtype], dtype: torch.dtype) -> RouterRun:
    """Run a half with weights and states of ours. dtype_of: of a weight. dtype: of states.

    Raises:
        ValueError: it does not add up what its parts give.
    """
    generator = torch.Generator().manual_seed(0)
    num_experts, size = parts.linear.weight.shape

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    matrix = random(num_experts, size) / size**0.5
    matrix[:, 0] = 1.0
    values = {
        (module, name): matrix.to(dtype_of((module, name)))
        if (module, name) == (parts.linear, "weight")
        else (0.3 * random(*tensor.shape)).to(dtype_of((module, name)))
        for module, name, tensor in owned(parts.half, parts.gate)
    }
    states = torch.cat([spread * random(ROWS, size) for spread, _ in SPREADS])
    states[:, 0] = torch.tensor([centre for _, centre in SPREADS]).repeat_interleave(ROWS)
    states = states.to(dtype)
    half = _with_values(parts.half, values)
    half._modules[parts.gate] = _with_values_below(getattr(parts.half, parts.gate), values)
    experts, shared = StandIn(EXPERTS_GIVE), 0.0
    modules = [half, *getattr(half, parts.gate).modules()]
    half._modules[EXPERTS] = experts
    for name in SHARED & half._modules.keys():
        if half._modules[name] is not None:
            is_gated = half._modules.get(SHARED_GATE) is not None
            half._modules[name] = StandIn(SHARED_GIVES, 1)
            shared += SHARED_GIVES / 2 if is_gated else SHARED_GIVES
    if half._modules.get(SHARED_GATE) is not None:
        half._modules[SHARED_GATE] = StandIn(GATE_GIVES)
    half._modules |= dict.fromkeys(GIVEN_NORMS & half._modules.keys(), nn.Identity())
    result = half(states[None])
    result = result[0] if isinstance(result, tuple) else result
    given = experts.states.view(-1, *states.shape)  # of each expert, where all get their own
    added = EXPERTS_GIVE * given.sum(0), shared * states.roll(1, -1)
    for factor, shared_factor in product(numbers_of(modules, FACTOR, 1.0, AVERAGE), (1.0, AVERAGE)):
        expected = factor * added[0] + shared_factor * added[1]
        if torch.allclose(result.view_as(states), expected, rtol=tolerance(dtype)):
            break
    else:
        raise ValueError("it does not add up what its parts give")
    weighs_inputs = not experts.others
    ids, weights = _shares(given, states) if weighs_inputs else experts.others
    bias = None if parts.bias is None else values[parts.bias].flatten().float()
    matrix, logit_bias = (values.get((parts.linear, name)) for name in ("weight", "bias"))
    assert matrix is not None
    own = ids, weights * factor
    return RouterRun(states, matrix, logit_bias, bias, *own, weighs_inputs, shared_factor if shared else 1.0)


def _shares(given: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """The experts int64 [T, C] that get states [T, H] times weights [T, C], by what each is given, [E, T, H]."""
    rows, own = given.float(), states.float()
    shares = ((rows * own).sum(-1) / (own * own).sum(-1)).T
    weights, ids = shares.topk(int((shares > 0).sum(1).max()))
    return ids, weights.to(states.dtype)


def _with_values(module: Any, values: dict[Place, Tensor]) -> Any:
    """A module with these parameters and buffers of its own, and the same modules within."""
    twin = copy(module)
    twin._parameters = {name: values.get((module, name)) for name in module._parameters}
    twin._buffers = {name: values.get((module, name)) for name in module._buffers}
    twin._modules, twin.training = dict(module._modules), False
    for name, method in vars(module).items():
        if isinstance(method, MethodType) and method.__self__ is module:  # see `replaced_methods.py`
            setattr(twin, name, MethodType(method.__func__, twin))
    return twin


def _with_values_below(module: Any, values: dict[Place, Tensor]) -> Any:
    """The same with those of all modules within."""
    twin = _with_values(module, values)
    for name, child in module.named_children():
        twin._modules[name] = _with_values_below(child, values)
    return twin
