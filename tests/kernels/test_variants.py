"""The list of all CUDA kernels, by which `.ci/run` knows whether all of them have to be compiled again."""

from __future__ import annotations

from pathlib import Path

from pagewire.kernels.cuda.variants import all_variants

LIST = Path(__file__).parent / "cuda" / "variants.txt"
WRITE = "python -m tests.kernels.test_variants"


def lines() -> list[str]:
    """A line for each variant: its source, its name, its parameters, and what it needs."""
    return [
        " ".join(filter(None, (each.source, each.name, each.parameters, each.needs)))
        for each in all_variants()
    ]


def test_the_list_has_all_variants() -> None:
    assert LIST.read_text().splitlines() == lines(), f"if this is as it should be: {WRITE}"


if __name__ == "__main__":
    LIST.write_text("\n".join(lines()) + "\n")
