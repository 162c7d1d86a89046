"""`pagewire quantize`: a quantised copy of a model, as a checkpoint of compressed-tensors."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pagewire.cli.commands import SUMMARIES
from pagewire.cli.console.parser import UsageError
from pagewire.cli.console.terminal import show

GROUPS = (32, 64, 128)


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "quantize",
        help=SUMMARIES["quantize"],
        description="Write a copy of a model whose linear layers have weights of 8 or 4 bits, as a checkpoint of "
        "compressed-tensors, which pagewire and vLLM serve. Embedding, output layer and what chooses among experts "
        "stay as they are. One matrix is in memory at a time.",
    )
    parser.add_argument(
        "model", metavar="MODEL", help="model folder or Hugging Face id, with .safetensors files"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="new folder")
    parser.add_argument(
        "--scheme",
        choices=("int8", "int4"),
        required=True,
        help="int8: 8 bits with a scale for each output, for activations of 8 bits (W8A8); int4: 4 bits in "
        "groups of inputs with a scale and a zero each, for activations of 16 bits (W4A16)",
    )
    parser.add_argument(
        "--group",
        type=int,
        choices=GROUPS,
        help="inputs that share a scale: fewer are more exact (default: 32 for int4). With int8: weights of 8 bits "
        "in groups, for activations of 16 bits (W8A16), which keeps more accuracy than W8A8",
    )
    parser.add_argument("--revision", metavar="REVISION", help="branch, tag or commit of a Hugging Face id")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the checkpoint, with a progress bar on a terminal, and print what was written.

    Raises:
        UsageError: OUT exists. ValueError, OSError: the model cannot be quantised, or OUT not be written.
    """
    if options.out.exists():
        raise UsageError(f"{options.out} exists: it is not overwritten")
    from tqdm import tqdm

    from pagewire.cli.quantise.checkpoint import quantise_checkpoint
    from pagewire.cli.quantise.integers import CompressedIntegers
    from pagewire.ipc.files.hub import model_folder

    bits = 8 if options.scheme == "int8" else 4
    scheme = CompressedIntegers(bits, options.group or (32 if bits == 4 else None))
    folder = model_folder(options.model, revision=options.revision)
    with tqdm(disable=None, unit=" parameters", unit_scale=True, file=sys.stderr) as bar:
        written = quantise_checkpoint(folder, options.out, scheme, bar.update)
    form = f"groups of {scheme.group}" if scheme.group else "a scale for each output"
    show(
        f"{options.out}: {written.num_bytes / 1e6:.1f} MB, {written.num_matrices} matrices of {bits} bits, {form}; "
        f"they differ by {written.error:.2%} of their norm"
    )
    return 0
