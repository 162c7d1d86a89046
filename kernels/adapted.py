"""Linear layers whose rows may have LoRA adapters.

The rows of a step are ordered by adapter once (`AdapterRows`). An adapter's part is added to the product's
result, after that was rounded: it does not matter what the product's weight is made of. Every adapter keeps its own
rank. On the CPU a row's bits do not depend on the other rows, nor on their adapters.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from pagewire.kernels.data.deltas import AdapterRows
from pagewire.kernels.data.weight import Linear
from pagewire.kernels.dispatch import implementation_for


def adapt(x: Tensor, out: Tensor, rows: AdapterRows, product: int) -> None:
    """Change the result of a product in the rows that have adapters, in place.

    Args:
        x: [..., K], the input of the product.
        out: [..., N], contiguous: its result.
        rows: those of the batch, T in number, that have adapters.
        product: the number of the product in the model.

    Raises:
        ValueError: x or out are not of T rows, or not of the product's shape or dtype.
    """
    flat_x, flat_out = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    rows.check(product, flat_x, flat_out)
    implementation_for(x, out).adapt(flat_x, flat_out, rows, product)


class Adapted:
    """A linear layer whose rows may have adapters.

    number: its own among all of a model that adapters may change.
    rows: gives the rows of the running step that have adapters; None: none has.
    """

    def __init__(self, linear: Linear, number: int, rows: Callable[[], AdapterRows | None]) -> None:
        self.linear, self.number, self.rows = linear, number, rows
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype, self.num_bytes = linear.dtype, linear.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in_features] to [..., out_features], or wider by the tokens that adapters of the rows bring.

        Raises:
            ValueError: there are adapters, and x is not the rows of the step.
        """
        out = self.linear(x)
        if (rows := self.rows()) is not None:
            if extra := rows.num_extra(self.number):
                out = functional.pad(out, (0, extra))
            adapt(x, out, rows, self.number)
        return out
