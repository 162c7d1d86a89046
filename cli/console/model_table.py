"""What a model is and what its parts take, as lines for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagewire.workers.estimate.figures import Footprint


def head(sizes: Footprint) -> Iterator[str]:
    """What a model is, in two lines."""
    dimensions = sizes.dimensions
    files = f"{sizes.num_files} files" if sizes.num_files > 1 else "1 file"
    yield f"model     {dimensions.architecture}, {dimensions.num_layers} layers; {sizes.form} in {files}"
    quantization = sizes.quantization or "not quantised"
    yield f"weights   {sizes.parameters:,} parameters, {quantization}; run in {sizes.dtype}"


def table(sizes: Footprint, unowned: str = "in the mapped file") -> Iterator[str]:
    """The parts of a model, one in a line. unowned: where a part is that takes no memory of its own."""
    from pagewire.workers.estimate.fit import amount

    row = "{:<14}{:>14}{:>8}{:>13}{:>13}{:>13}  {}"
    yield row.format("part", "parameters", "bits", "in files", "in memory", "token reads", "held as")
    for part in sizes.parts:
        bits = f"{part.bits:.2f}" if part.parameters else "tied"
        held = sizes.dtype if part.held.startswith("float") else part.held
        yield row.format(
            part.part,
            f"{part.parameters:,}",
            bits,
            amount(part.file_bytes),
            amount(part.packed_bytes),
            amount(part.read_bytes),
            held if part.packed_bytes else f"{held}, {unowned}",
        )
