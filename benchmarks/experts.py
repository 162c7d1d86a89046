"""A model with experts beside an older version of ours, for one request and for 32, dense and quantised.

    python -m benchmarks.experts MODEL --before PYTHON [--quantization none int8 int4] [--chosen 2 4]

MODEL is a folder of `benchmarks.make_moe`, PYTHON that of an environment with the older version. Both run in turn.
The floor of one request is the time in which the weights of a token are read at the measured rate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from benchmarks.compare import Engine, Work, measure
from benchmarks.limits import measure_limits, processor
from pagewire.kernels.cpu.library import expected_isa
from pagewire.workers.model.checkpoint_headers import read_headers
from pagewire.workers.model.footprint import footprint

WORKS = (Work("tpot", 1, 128, 128), Work("out/s", 32, 128, 128))


def token_bytes(model: Path, quantization: str | None, chosen: int) -> int:
    """Bytes of weights that a token reads, alone in its step."""
    sizes = footprint(read_headers(model), expected_isa(), "auto", quantization=quantization)
    all_experts = sum(part.packed_bytes for part in sizes.parts if part.part == "experts")
    others = sum(part.read_bytes for part in sizes.parts if part.part != "experts")
    return others + all_experts * chosen // sizes.dimensions.num_experts


def compare(model: Path, before: str, quantization: str | None, chosen: int, runs: int) -> list[str]:
    """The table's row of a form of the model."""
    arguments = {
        "model": str(model),
        "max_model_len": 1024,
        "quantization": quantization,
        "hf_overrides": {"num_experts_per_tok": chosen},
        "weight_cache": False,
    }
    pythons = {"pagewire": sys.executable, "pagewire:before": before}
    engines = [Engine(name, python, json.dumps(arguments)) for name, python in pythons.items()]
    rate = measure_limits().read_bytes_per_s
    values: dict[tuple[Work, str], list[float]] = {}
    for run in range(runs):
        for work in WORKS:
            for engine in engines[:: 1 if run % 2 else -1]:
                value, _ = measure(engine, work, run)
                values.setdefault((work, engine.name), []).append(value)
                print(
                    f"{quantization} {chosen} {work.label} {engine.name} {value:.5g}",
                    file=sys.stderr,
                    flush=True,
                )
    for engine in engines:
        engine.close()
    rate = max(rate, measure_limits().read_bytes_per_s)
    one, many = WORKS
    after_s, before_s = (statistics.median(values[one, name]) for name in pythons)
    after_rate, before_rate = (statistics.median(values[many, name]) for name in pythons)
    share = token_bytes(model, quantization, chosen) / rate / min(values[one, "pagewire"])
    return [
        *(quantization or "bf16", f"{chosen} of 16"),
        *(f"{1 / before_s:.1f}", f"{1 / after_s:.1f}", f"{before_s / after_s:.2f}", f"{share:.0%}"),
        *(f"{before_rate:.0f}", f"{after_rate:.0f}", f"{after_rate / before_rate:.2f}"),
    ]


def main() -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--before", required=True, metavar="PYTHON")
    parser.add_argument("--quantization", nargs="+", default=["none", "int8", "int4"])
    parser.add_argument("--chosen", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    print(processor())
    one = ["tok/s before", "after", "ratio", "of the floor"]
    rows = [["weights", "experts", *one, "32 x 128/128 before", "after", "ratio"]]
    rows.append(["---"] * len(rows[0]))
    for quantization in options.quantization:
        for chosen in options.chosen:
            form = None if quantization == "none" else quantization
            rows.append(compare(options.model.resolve(), options.before, form, chosen, options.runs))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print("\n".join("| " + " | ".join(row) + " |" for row in rows))


if __name__ == "__main__":
    main()
