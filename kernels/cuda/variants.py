"""All variants of all kernels: `pagewire kernels build` and the tests compile them."""

from pagewire.kernels.cuda import attention, gates, kv, linear, lora, norms, probes, sampling, states
from pagewire.kernels.cuda.source import Variant

MODULES = (attention, gates, kv, linear, lora, norms, probes, sampling, states)


def all_variants() -> list[Variant]:
    """The variants of every module, module by module."""
    return [variant for module in MODULES for variant in module.variants()]
