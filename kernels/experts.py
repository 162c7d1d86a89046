"""Experts: each token is sent to a few feed-forward halves, and their outputs are added, weighted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from pagewire.kernels.adapted import adapt
from pagewire.kernels.data.deltas import first_adapted, plain
from pagewire.kernels.data.layer import Experts
from pagewire.kernels.data.weight import Linear
from pagewire.kernels.dispatch import implementation_for
from pagewire.kernels.ops import activate_and_mul, activate_each
from pagewire.kernels.reference.kernels import GroupedProduct, Kernels

Between = Callable[[Tensor], Tensor]
"""A function of rows [R, N] to rows [R, I], each computed on its own."""
RoutedProduct = Callable[[Tensor, Sequence[int], Tensor], Tensor]
"""A `GroupedProduct` that is also given the token int64 [R] that each row is of."""


class GroupedExperts:
    """The experts of a layer: x [T, H], ids int64 [T, C] and weights [T, C] to the weighted sum [T, H].

    Each token goes to C experts. All of it is one call, or each product is, where the device's kernels allow it. A
    token's results are multiplied with their weights and added in ascending order of the experts, all in float32,
    and rounded once. On the CPU its bits depend on nothing but the token. On a GPU the host waits for the device,
    to learn how many rows each expert gets, unless all is one call.

    compiled: that call; None: there is none.
    """

    def __init__(
        self,
        experts: Experts,
        device: torch.device,
        between: Between | None = None,
        after: Between | None = None,
    ) -> None:
        """The experts on a device.

        between: the activation, needed where `experts.activation` is None. after: of rows [R, H], before they are
        weighted.
        """
        self.experts = experts
        self.num_bytes = experts.num_bytes
        self.compiled = None
        if experts.activation is not None:
            function: Callable[..., Tensor] = activate_and_mul if experts.gated else activate_each
            between = partial(function, activation=experts.activation)
            if after is None:
                self.compiled = kernels_of(experts.up, device).experts(experts)
        self.between, self.after = between, after
        if self.compiled is None:
            self._up, self._down = (
                adapted(grouped_product(linears, device), linears) for linears in (experts.up, experts.down)
            )

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum [T, H].

        Raises:
            ValueError: shapes or dtypes do not fit, or an id is of no expert.
        """
        if self.compiled is not None:
            return self.compiled(x, ids, weights)
        return self._weighted(x, ids, weights, self._up, self._down)

    def one_by_one(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The same by a product for each expert: to the same bits, but for dense weights on a GPU."""
        up, down = (adapted(one_by_one(each), each) for each in (self.experts.up, self.experts.down))
        return self._weighted(x, ids, weights, up, down)

    def _weighted(
        self, x: Tensor, ids: Tensor, weights: Tensor, up: RoutedProduct, down: RoutedProduct
    ) -> Tensor:
        def last(rows: Tensor, counts: Sequence[int], sources: Tensor) -> Tensor:
            rows = down(rows, counts, sources)
            return rows if self.after is None else self.after(rows)

        assert self.between is not None
        return weighted_experts(
            x,
            ids,
            weights,
            len(self.experts.up),
            up,
            self.between,
            last,
            weighs_inputs=self.experts.weighs_inputs,
        )


def kernels_of(linears: Sequence[Linear], device: torch.device) -> Kernels:
    """The kernels for linear layers on a device."""
    return implementation_for(torch.empty(0, dtype=linears[0].dtype, device=device))


def grouped_product(linears: Sequence[Linear], device: torch.device) -> GroupedProduct:
    """The product of several linear layers without adapters, in one call where the device's kernels allow it."""
    return kernels_of(linears, device).grouped(linears) or one_by_one(linears)


def one_by_one(linears: Sequence[Linear]) -> GroupedProduct:
    """The product of several linear layers without adapters, one after the other."""
    linears = [plain(linear) for linear in linears]

    def product(rows: Tensor, counts: Sequence[int]) -> Tensor:
        parts = zip(linears, torch.split(rows, list(counts)), strict=True)
        results = [linear(part) for linear, part in parts if len(part)]
        return torch.cat(results) if results else rows.new_empty(0, linears[0].out_features)

    return product


def adapted(product: GroupedProduct, linears: Sequence[Linear]) -> RoutedProduct:
    """The product of the experts' rows with their linear layers, with what adapters of the rows change in it."""
    first = first_adapted(linears)

    def run(rows: Tensor, counts: Sequence[int], sources: Tensor) -> Tensor:
        out = product(rows, counts)
        if first is not None and len(rows) and (adapters := first.rows()) is not None:
            adapt(rows, out, adapters.grouped(sources, counts), first.number)
        return out

    return run


def weighted_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    num_experts: int,
    up: RoutedProduct,
    between: Callable[[Tensor], Tensor],
    down: RoutedProduct,
    *,
    weighs_inputs: bool = False,
) -> Tensor:
    """See `GroupedExperts`; `between` is the activation, and `weighs_inputs` that of `Experts`.

    Raises:
        ValueError: an id is of no expert.
    """
    order = ids.flatten().argsort(stable=True)
    counts = torch.bincount(ids.flatten(), minlength=num_experts).tolist()
    if len(counts) > num_experts:
        raise ValueError(f"an id is of none of {num_experts} experts")
    sources = order // ids.shape[1]
    rows = x[sources]
    if weighs_inputs:
        rows = (rows.float() * weights.flatten()[order, None].float()).to(x.dtype)
        weights = torch.ones_like(weights)
    rows = down(between(up(rows, counts, sources)), counts, sources)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    total = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    for place in places.view_as(ids).sort(1).values.unbind(1):  # ascending places: ascending experts
        total += weights.flatten()[order[place], None].to(total.dtype) * rows[place].to(total.dtype)
    return total.to(x.dtype)
