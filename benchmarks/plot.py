"""Draws the results of `benchmarks.compare` as SVG: this engine beside its peers, by work, with spreads.

    python -m benchmarks.plot                    # all of benchmarks/results into docs/images/plots, light and dark
    python -m benchmarks.plot FILE ... --out DIR

A bar is the median speed of an engine over the median of this engine's, so longer is faster, for times as well; the
line over it goes from the slowest to the fastest run, and the number beside it is the median itself. It needs
matplotlib (the extra `docs`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS, PLOTS = ROOT / "benchmarks" / "results", ROOT / "docs" / "images" / "plots"
OURS = "pagewire"
NAMES = {
    "llama_cpp": "llama.cpp",
    "openvino": "OpenVINO GenAI",
    "vllm": "vLLM (CPU)",
    "pagewire:bf16": "pagewire, bfloat16",
    "pagewire:Q4_0": "pagewire, Q4_0",
    "pagewire:before": "pagewire, before decoding was compiled",
}
COLOURS = {
    "pagewire": "#0969da",
    "pagewire:bf16": "#79b8ff",
    "pagewire:Q4_0": "#79b8ff",
    "pagewire:before": "#79b8ff",
    "openvino": "#bf8700",
    "vllm": "#8250df",
    "llama_cpp": "#1a7f37",
}
SHADES = {"light": "#1f2328", "dark": "#e6edf3"}  # of text and lines
UNITS = {"out/s": "tokens/s", "tpot": "ms a token", "ttft": "s to the first token"}
QUANTISED = {'{"quantization": "int8"}': "8 bits", '{"quantization": "int4"}': "4 bits"}


class Bar(NamedTuple):
    """An engine at a work.

    speed, slowest, fastest: of its runs, over this engine's median. value: its median, as text.
    """

    engine: str
    speed: float
    slowest: float
    fastest: float
    value: str


def unit_of(work: str) -> str:
    """The key in `UNITS` of a work, which is the last word of its name.

    Raises:
        ValueError: the unit is unknown.
    """
    if (unit := work.rpartition(" ")[2]) not in UNITS:
        raise ValueError(f"work {work!r}: unit {unit!r} is none of {', '.join(UNITS)}")
    return unit


def bars(work: str, runs: dict[str, Sequence[float]]) -> list[Bar]:
    """The bars of a work, this engine first. runs: measurements by engine, rates or times."""
    unit = unit_of(work)
    rates = {
        engine: [value if unit == "out/s" else 1 / value for value in values]
        for engine, values in runs.items()
    }
    base = median(rates[OURS])
    order = sorted(rates, key=lambda engine: (engine != OURS, engine))
    return [
        Bar(engine, *(of(rates[engine]) / base for of in (median, min, max)), text(unit, runs[engine]))
        for engine in order
    ]


def text(unit: str, values: Sequence[float]) -> str:
    """The median of measurements with its unit."""
    value = median(values)
    number = value * 1000 if unit == "tpot" else value
    return f"{number:,.0f} {UNITS[unit]}" if number >= 100 else f"{number:.3g} {UNITS[unit]}"


def draw(result: dict[str, Any], title: str, colour: str, picture: Path) -> None:
    """Draw a row of bars for each work of a result into a file."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    works = [(work, bars(work, runs)) for work, runs in result["works"].items()]
    rows = sum(len(group) + 1 for _, group in works)
    # Texts stay texts, and nothing in the file changes from run to run.
    settings = {"svg.fonttype": "none", "svg.hashsalt": "pagewire", "font.size": 9, "text.color": colour}
    with pyplot.rc_context(settings):
        figure, axes = pyplot.subplots(figsize=(8, 0.6 + 0.24 * rows), layout="constrained")
        place = 0.0
        for work, group in works:
            axes.text(0, place, work, weight="bold", va="center")
            for bar in group:
                place += 1
                spread = [[max(0.0, bar.speed - bar.slowest)], [max(0.0, bar.fastest - bar.speed)]]
                axes.barh(place, bar.speed, color=COLOURS.get(bar.engine, "#6e7781"), height=0.8)
                axes.errorbar(bar.speed, place, xerr=spread, color=colour, capsize=2, linewidth=1)
                label = f"{NAMES.get(bar.engine, bar.engine)}: {bar.value}"
                axes.text(max(bar.speed, bar.fastest) + 0.03, place, label, va="center")
            place += 1.2
        axes.axvline(1, color=colour, linewidth=0.6, linestyle=":")
        longest = max(bar.fastest for _, group in works for bar in group)
        axes.set(xlim=(0, longest * 1.45), ylim=(place, -0.8), yticks=[], title=title)
        axes.set_xlabel("speed, over the median of pagewire", color=colour)
        axes.tick_params(colors=colour)
        axes.spines[:].set_visible(False)
        figure.savefig(picture, transparent=True, metadata={"Date": None})
        pyplot.close(figure)


def title_of(path: Path, result: dict[str, Any]) -> str:
    """What was measured where."""
    model = path.stem.removeprefix("compare-").rpartition("-20")[0].replace("llama-", "Llama ")
    model = QUANTISED.get(result.get("options", ""), model)
    return f"{model}, {result['machine']}, {result['date']}"


def write(path: Path, out: Path) -> list[Path]:
    """Draw a result for light and dark pages, and return the pictures."""
    result = json.loads(path.read_text("utf-8"))
    stem = path.stem.rpartition("-20")[0]
    pictures = []
    for shade, colour in SHADES.items():
        pictures.append(out / f"{stem}-{shade}.svg")
        draw(result, title_of(path, result), colour, pictures[-1])
    return pictures


def main() -> None:
    """Draw what the command line names, else all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="results of benchmarks.compare")
    parser.add_argument("--out", type=Path, default=PLOTS, metavar="DIR", help="where the pictures go")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for path in options.files or sorted(RESULTS.glob("compare-*.json")):
        print(*write(path, options.out), sep="\n")


if __name__ == "__main__":
    main()
