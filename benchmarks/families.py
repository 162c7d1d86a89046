"""docs/families.md, which `python -m benchmarks.parity --all --write` makes, and the list of it in docs/models.md.

python -m benchmarks.families                            # makes the list anew
python -m benchmarks.families --roads [NAME ...]         # how each decoder runs: as a stack, or why as a module
python -m benchmarks.families --roads --write            # and keeps the table in docs/families.md
python -m benchmarks.families --matrix [NAME ...]        # what each decoder is served with, or why it is refused
python -m benchmarks.families --matrix --write [NAME ...]  # and keeps the rows in docs/families.md
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PATH, MODELS = ROOT / "docs" / "families.md", ROOT / "docs" / "models.md"
HEADER = "| model type | class | | why |\n|---|---|---|---|"
WIDTH = 120  # of the lines of docs/models.md
PARAGRAPH = re.compile(r"^\*\*Served\*\* \(.*?(?=\n\n)", re.MULTILINE | re.DOTALL)
INTRODUCTION = """\
# Model families

Every language model of transformers {version}, and every encoder that is served. Each is a tiny random model in
float32 with the layers of its family, whose biases, norms and buffers all have an effect; and once more with those
settings of its family that change numbers: soft caps, scales, biases, groups of experts, angles of YaRN, a tied or
untied output layer.

- **equal**: after each of 107 tokens (random prompts of 2 to 41 tokens, longer than windows and chunks, and what is
  sampled behind them, batched) the log probabilities of all tokens of the vocabulary are those of transformers'
  forward pass within 0.001; of an encoder all hidden states
- **text only**: it is equal for text, and its pictures or sounds are refused ([media.md](media.md))
- **refused**: it is refused when it is loaded, with this reason
- **untested**: there is nothing to compare with, for this reason; no model counts as equal whose log probabilities
  are even, always highest for the same few tokens, or do not depend on the order of tokens

This file is made by `python -m benchmarks.parity --all --write` (with Pillow, scipy, timm and torchvision), its
last sections by `python -m benchmarks.families --roads --write` and `--matrix --write`, and the list in
[Models](models.md) by `python -m benchmarks.families`.
"""
ENCODERS = "## Encoders"
ROADS = """\
## How decoders run

A stack is plain data, which the compiled kernels run in one call ([ARCHITECTURE.md](../ARCHITECTURE.md)). What no
stack describes runs as transformers' module, layer by layer: the same tokens, more slowly, and for text on one
device alone. Adapters, several workers, draft models, CUDA graphs and pictures are refused by name, until somebody
describes the layers ([own_models.md](own_models.md)). On the CPU, in float32.
"""
MATRIX = """\
## What decoders are served with

Tiny models in float32 on the CPU, each loaded with the option as a start loads it: "refused" is followed by what
the start says. Drafts of n-grams, cached prefixes and preemptions have run, with the same tokens as without.
Whether steps are recorded as a CUDA graph was asked of an emulated GPU, in bfloat16.
"""
SECTIONS = (ROADS, MATRIX)
"""The introductions of the last sections of docs/families.md, in their order."""


class ModelRow(NamedTuple):
    """A model type, its class in transformers, and what came of it: "equal", "refused", "untested", and why."""

    model_type: str
    class_name: str
    verdict: str
    why: str = ""

    @property
    def line(self) -> str:
        """Its line of the table."""
        return f"| {self.model_type} | {self.class_name} | {self.verdict} | {self.why.replace('|', '/')} |"


def summary(families: Sequence[ModelRow]) -> str:
    """How many model types each verdict has."""
    counts = Counter(family.verdict for family in families)
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())


def document(
    families: Sequence[ModelRow], encoders: Sequence[ModelRow], version: str, sections: str = ""
) -> str:
    """The text of docs/families.md. version: of transformers. sections: its last ones."""
    introduction = INTRODUCTION.format(version=version)
    return f"{introduction}\n{table(families)}\n{ENCODERS}\n\n{table(encoders)}{sections}"


def section(text: str, introduction: str) -> str:
    """The section of docs/families.md that begins so, given its text; empty if there is none."""
    _, title, rest = text.partition(f"\n{introduction}")
    for other in SECTIONS:
        rest = rest.partition(f"\n{other}")[0]
    return title + rest


def last_sections(text: str) -> str:
    """All of `SECTIONS` in docs/families.md, given its text."""
    return "".join(section(text, introduction) for introduction in SECTIONS)


def with_section(text: str, introduction: str, content: str) -> str:
    """The text of docs/families.md with another content of one of `SECTIONS`."""
    made = {each: section(text, each) for each in SECTIONS} | {introduction: f"\n{introduction}\n{content}"}
    return text.removesuffix(last_sections(text)) + "".join(made.values())


def table(families: Sequence[ModelRow]) -> str:
    """A table, below the numbers of its verdicts."""
    lines = "\n".join(family.line for family in families)
    return f"**{summary(families)}**\n\n{HEADER}\n{lines}\n"


def read(text: str) -> list[ModelRow]:
    """The families of docs/families.md, given its text; without encoders."""
    rows = text.partition(ENCODERS)[0].partition(HEADER)[2].strip().splitlines()
    return [ModelRow(*(cell.strip() for cell in row.strip("|").split("|"))) for row in rows]


def paragraph(families: Sequence[ModelRow]) -> str:
    """The list of the families that are served."""
    names = sorted(family.model_type for family in families if family.verdict == "equal")
    listed = ", ".join(f"`{name}`" for name in names)
    # A name is in one piece.
    lines = textwrap.wrap(listed, WIDTH, break_on_hyphens=False, break_long_words=False)
    return f"**Served** ({len(names)} model types):\n" + "\n".join(lines) + "."


def with_list(page: str, families: Sequence[ModelRow]) -> str:
    """The text of docs/models.md with its list of families made anew."""
    return PARAGRAPH.sub(lambda _: paragraph(families), page, count=1)


def show_roads(names: Sequence[str], *, write: bool) -> None:
    """Print how decoders run, all or those of these names; write: keep it in docs/families.md."""
    from benchmarks import roads  # loads models

    found = []
    for road in roads.roads(names):
        found.append(road)
        print(road.line, flush=True)
    print(roads.summary(found))
    if write:
        PATH.write_text(with_section(PATH.read_text(), ROADS, roads.table(found)))


def show_matrix(names: Sequence[str], *, write: bool) -> None:
    """Print what decoders are served with, all or those of these names.

    write: keep each row in docs/families.md as soon as it is known.
    """
    from benchmarks import matrix  # loads models

    print(matrix.HEADER)
    found = []
    for row in matrix.rows(names):
        found.append(row)
        print(row.line, flush=True)
        if write:
            text = PATH.read_text()
            rows = matrix.merged(matrix.read(section(text, MATRIX)), [row])
            PATH.write_text(with_section(text, MATRIX, matrix.table(rows)))
    print(matrix.summary(found))


def make_list() -> None:
    """Make the list in docs/models.md anew."""
    MODELS.write_text(with_list(MODELS.read_text(), read(PATH.read_text())))


def main() -> None:
    """Make the list in docs/models.md anew, or show how decoders run and what they are served with."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--roads", action="store_true", help="show how each decoder runs")
    parser.add_argument("--matrix", action="store_true", help="show what each decoder is served with")
    parser.add_argument("--write", action="store_true", help="keep it in docs/families.md")
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args()
    if options.roads:
        show_roads(options.names, write=options.write and not options.names)
    elif options.matrix:
        show_matrix(options.names, write=options.write)
    else:
        make_list()


if __name__ == "__main__":
    main()
