"""All variants of all kernels, which `pagewire kernels build` and the tests compile, and those of one model."""

from typing import NamedTuple

import torch

from pagewire.kernels.cuda import (
    attention,
    experts,
    gates,
    indexing,
    kv,
    latents,
    linear,
    lora,
    norms,
    probes,
    quantised_linear,
    sampling,
    states,
)
from pagewire.kernels.cuda.compile import OLDEST
from pagewire.kernels.cuda.source import Variant

MODULES = (
    attention,
    experts,
    gates,
    indexing,
    kv,
    latents,
    linear,
    lora,
    norms,
    probes,
    quantised_linear,
    sampling,
    states,
)


class Launches(NamedTuple):
    """What decides which kernels a model may launch.

    kv_dtype: of its KV cache. head_dim: of its attention, or the size of its latents; 0: no layer attends.
    encodes: it is an encoder, which keeps keys and values for a layer only.
    recurrent: it has layers with states. mixture: it has experts. packed: weights may stay packed.
    capability: the compute capability of the device. invariant: bits must not depend on the batch.
    indexed: in some layers an indexer chooses the keys that a token sees.
    """

    dtype: torch.dtype
    kv_dtype: torch.dtype
    head_dim: int
    encodes: bool = False
    recurrent: bool = False
    mixture: bool = False
    packed: bool = True
    capability: tuple[int, int] = OLDEST
    invariant: bool = False
    indexed: bool = False


def all_variants() -> list[Variant]:
    """The variants of every module, module by module."""
    return [variant for module in MODULES for variant in module.variants()]


def variants_of(launches: Launches) -> list[Variant]:
    """The kernels that a model may launch. Float32 models have those of sampling and of state spaces only."""
    dtype, head_dim = launches.dtype, launches.head_dim
    result = [sampling.variant(kernel, dtype) for kernel in sampling.SHARED_BYTES if dtype in sampling.DTYPES]
    if dtype not in norms.DTYPES:
        return [*result, *(states.variants(dtype) if launches.recurrent else ())]
    result += [gates.variant(dtype, activation) for activation in gates.ACTIVATIONS]
    result += [norms.variant(dtype, shape, add) for shape in norms.SHAPES for add in (False, True)]
    if launches.packed:
        result += linear.variants(dtype, dense=False)
        result += quantised_linear.variants(dtype, capability=launches.capability)
    if launches.invariant:
        result += linear.dense_variants(dtype)
    if launches.mixture:
        result += experts.variants(dtype, packed=launches.packed)
    if launches.encodes:
        result.append(kv.variant(dtype, dtype))
        if head_dim in attention.TWO_SIDED_HEAD_DIMS:
            warpgroups = attention.has_warpgroups(launches.capability, dtype, dtype, head_dim)
            result += attention.two_sided_variants(dtype, head_dim, warpgroups=warpgroups)
        return result
    result += lora.variants(dtype)
    if launches.recurrent:
        result += states.variants(dtype)
    if launches.indexed:
        result += [indexing.variant(dtype, size) for size in indexing.SIZES]
    if head_dim in latents.LATENTS:
        return result + latents.variants_of(launches.capability, dtype, head_dim, indexed=launches.indexed)
    for cache_dtype in dict.fromkeys((dtype, launches.kv_dtype)) if head_dim else ():
        result.append(kv.variant(dtype, cache_dtype))
        if head_dim in attention.HEAD_DIMS:
            capability = launches.capability
            kinds = (dtype, cache_dtype, head_dim)
            result += attention.causal_variants(*kinds, capability, invariant=launches.invariant)
    return result
