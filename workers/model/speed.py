"""How long a token should take, by the bytes that it reads and the rate at which this machine reads them.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagewire.workers.model.footprint import Footprint

# The share of the machine's reading rate that all products of a step of one row reach together, by how weights are
# held: `python -m benchmarks.inspect_accuracy` with a Llama of 300M on two cores of an AMD EPYC, to a tenth; 4 bits
# reach 0.7 there, and 0.5 with SmolLM2-135M, whose matrices are small.
# Alone, a product reaches more (`benchmarks.kernels_cpu`). Integers are unpacked as they are read.
REACHED = {"float32": 0.7, "float16": 0.7, "int8": 0.7, "int4": 0.6}
STEP_SECONDS = 400e-6  # of a step beside its layers: messages, batch, sampling
STACK_LAYER_SECONDS = 12e-6  # of a layer beside reading its weights, where all layers run in one call
MODULE_LAYER_SECONDS = 350e-6  # the same where transformers' modules run


@dataclass(frozen=True)
class Speed:
    """The expected speed of a request that runs alone."""

    read_rate: float
    """Bytes per second that the machine reads, by measurement."""
    token_seconds: float
    """A token with little context."""
    context_seconds: float
    """What each thousand tokens of context add to that."""

    @property
    def tokens_per_second(self) -> float:
        """With little context."""
        return 1 / self.token_seconds


def expected_speed(sizes: Footprint, read_rate: float) -> Speed:
    """The speed of a model on a machine that reads `read_rate` bytes per second with the worker's threads."""
    reading = sum(part.read_bytes / REACHED[part.held.partition("/")[0]] for part in sizes.parts) / read_rate
    layer = STACK_LAYER_SECONDS if sizes.is_stack else MODULE_LAYER_SECONDS
    return Speed(
        read_rate=read_rate,
        token_seconds=reading + STEP_SECONDS + sizes.dimensions.num_layers * layer,
        context_seconds=1000 * sizes.kv_token_bytes / read_rate,
    )
