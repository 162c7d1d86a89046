"""Quantised checkpoints for figures, made of a dense one by rounding.

    python -m benchmarks.make_quantised MODEL OUT [RECIPE ...]

MODEL is a folder with safetensors files; OUT gets a folder for each recipe, by default all of them.
The columns of all matrices must be a multiple of --group.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from tests.workers.checkpoint.formats.checkpoints import RECIPES, write_quantised


def main() -> None:
    """Write them, and print what each takes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=", ".join(RECIPES))
    parser.add_argument("--group", type=int, default=128, help="columns with a scale; default: 128")
    args = parser.parse_args()
    if unknown := set(args.recipes) - RECIPES.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(RECIPES)}")
    torch.set_grad_enabled(False)
    for name in args.recipes or RECIPES:
        written = write_quantised(args.model, args.out / name, RECIPES[name](args.group))
        size = sum(path.stat().st_size for path in written.folder.glob("*.safetensors"))
        print(f"{written.folder}: {size / 2**20:,.1f} MiB")


if __name__ == "__main__":
    main()
