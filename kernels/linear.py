"""Linear layers: most of a model's work, and nearly all of its bytes."""

from collections.abc import Callable

from torch import Tensor

from pagewire.kernels.dispatch import implementation_for

__all__ = ["linear", "pack"]


def pack(weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """A linear layer that owns a copy of its weight, laid out for the fastest product. The original can be freed.

    Args:
        weight: [N, K], K contiguous.
        bias: [N], of the same dtype.

    Returns:
        a function of x [..., K] to `x @ weight.T + bias` [..., N]. Sums are float32. A row's bits do not depend
        on how many rows there are. Raises ValueError where x does not fit.
    """
    return implementation_for(weight).pack(weight, bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, to the bits of the same product over the packed weight, without packing it for good.

    Args:
        x: [..., K].
        weight: [N, K], of the same dtype. It is packed anew in every call, in pieces that fit a processor's cache.
        bias: [N], of the same dtype.

    Returns:
        [..., N].

    Raises:
        ValueError: the shapes or dtypes do not fit.
    """
    return implementation_for(x, weight).linear(x, weight, bias)
