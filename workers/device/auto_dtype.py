"""The dtype of a model for `dtype="auto"`. Imports no torch: sizes are estimated before that is loaded."""

from __future__ import annotations

from pagewire.kernels.cpu.build import multiplies_bfloat16


def auto_dtype(checkpoint: str, isa: str | None) -> str:
    """The name of the dtype of a model whose checkpoint has another one: half as large where that is also faster.

    checkpoint: the checkpoint's. isa: the instruction set of the CPU; None: a GPU.

    A checkpoint in float32 runs in float16 on a GPU, and in bfloat16 on a CPU that multiplies it. Other CPUs would
    convert each weight to float32 again. All other checkpoints run as they are.
    """
    if checkpoint != "float32":
        return checkpoint
    if isa is None:
        return "float16"
    return "bfloat16" if multiplies_bfloat16(isa) else "float32"
