"""All that a GPU has to show, in at most 8 minutes and without a network.

    benchmarks/gpu_all.sh [--wheels .wheels] [--seconds 480] [--out FILE] [--only PART] [--skip PART] [--dry-run]

The parts come in the order of what they tell: machine and driver, the compiler, what the kernels rely on, each
kernel beside its reference, one model token for token, graphs and streams, and then speed. Each has a process, a
time limit and a line of its own. Everything is written to one file, after each part. `make wheels` collects what
such a machine lacks. --dry-run rehearses all on an emulated device, without a GPU. Exit status 1: a part failed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu import checks, speed
from benchmarks.gpu.parts import OK, Outcome, Part, run_part, summary, write_results

ROOT = Path(__file__).parents[2]
TRIED = {
    "norms": ("rms_norm", "add_rms_norm"),
    "gates": ("activate_and_mul",),
    "cache writes": ("store_kv", "rotate_and_store"),
    "attention": ("paged_attention", "warpgroup_attention"),
    "latents": ("latents", "index_scores"),
    "states": ("states",),
    "products": ("pack", "fewest_rows", "unpacked_weights", "linear"),
    "rows in 8 bits": ("integer_rows", "float_rows"),
    "experts": ("experts",),
    "adapters": ("adapt",),
}
"""The methods of the kernels that are tried together: all that trials have."""
WORKER_TESTS = "gpu and not test_gpu and not emulated and not test_every_architecture"
REHEARSAL = 5
"""How many times as long everything may take in a rehearsal."""
GROUPS = ("decode", "prefill", "latents", "write", "rows", "sampling", "linear", "experts", "lora", "encoder")


def parts(is_gpu: bool) -> list[Part]:
    """All parts, in their order. A limit is several times what the part should take; all are more than there is."""
    right = [
        Part("doctor", 60, partial(checks.doctor, is_gpu)),
        Part("compiler", 90, partial(checks.compiled, is_gpu)),
        Part("probes", 30, partial(checks.probes, is_gpu)),
        *(
            Part(f"trial {name}", 60, partial(checks.tried, is_gpu, methods))
            for name, methods in TRIED.items()
        ),
        Part("trial sampling", 30, partial(checks.sampling, is_gpu)),
        Part("first run", 60, partial(checks.first_run, is_gpu)),
        Part(
            "token for token",
            60,
            partial(checks.tests, is_gpu, "gpu and transformers"),
        ),
        Part("graphs", 30, partial(checks.graphs, is_gpu)),
        Part("streams", 30, partial(checks.streams, is_gpu)),
        Part("nccl", 45, partial(checks.nccl, is_gpu)),
        Part("worker", 240, partial(checks.tests, is_gpu, WORKER_TESTS)),
    ]
    fast = [Part(f"speed {group}", 30, partial(speed.kernels, is_gpu, group)) for group in GROUPS]
    engines = [
        Part("model 1b", 75, partial(speed.model, is_gpu, "llama-3.2-1b")),
        Part("memcheck", 60, partial(checks.sanitized, "memcheck")),
        Part("racecheck", 60, partial(checks.sanitized, "racecheck")),
        Part("model 8b", 90, partial(speed.model, is_gpu, "llama-3-8b")),
        Part("beside generate_batch", 180, partial(speed.peer, is_gpu, "llama-3-8b")),
        Part("model 8b int4", 120, partial(speed.model, is_gpu, "llama-3-8b", quantization="int4")),
        Part("model 8b in any batch", 90, partial(speed.model, is_gpu, "llama-3-8b", batch_invariant=True)),
        Part("model experts", 120, partial(speed.model, is_gpu, "qwen3-moe")),
        Part("model adapters", 90, partial(speed.model, is_gpu, "llama-3.2-1b", adapters=True)),
        Part("encoder", 90, partial(speed.encoder, is_gpu, "all-mpnet-base-v2")),
        Part("encoder speed", 90, partial(speed.encoder, is_gpu, "all-MiniLM-L6-v2")),
        Part("architectures", 240, partial(checks.tests, is_gpu, "gpu and test_every_architecture")),
    ]
    return [*right, *fast, *engines]


def install(wheels: Path, target: Path) -> dict[str, Any]:
    """Install the wheels of packages that Python lacks. Those that are there stay as they are.

    Raises:
        CalledProcessError: pip failed.
    """
    missing = [file for file in sorted(wheels.glob("*.whl")) if not is_installed(file.name.split("-")[0])]
    if missing:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*pip, "--target", str(target), *map(str, missing)], check=True)
    return {
        "installed": [file.name for file in missing],
        "bytes": sum(file.stat().st_size for file in missing),
    }


def is_installed(name: str) -> bool:
    """True if a distribution is there."""
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


class Run:
    """A run over parts: outcomes as they come, and the file that has them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._begin = options, time.monotonic()
        self._facts = {"date": str(datetime.date.today()), "rehearsal": options.dry_run, "root": ROOT.name}
        self.outcomes: list[Outcome] = []

    def is_wanted(self, part: Part) -> bool:
        """True if the options do not leave the part out."""
        only, skip = self._options.only, self._options.skip
        return part.name not in skip and (not only or part.name in only)

    def take(self, part: Part) -> Outcome:
        """Run a part, and write what is known."""
        left = self._options.seconds - (time.monotonic() - self._begin)
        if self._options.dry_run:  # on a processor that others use, too: its times say nothing
            part, left = replace(part, limit=REHEARSAL * part.limit), REHEARSAL * left
        outcome = run_part(part, left)
        self.outcomes.append(outcome)
        print(outcome.line, flush=True)
        if outcome.is_bad:
            print(outcome.output[-1500:])
        write_results(self._options.out, self._facts, self.outcomes)
        return outcome


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheels", type=Path, default=ROOT / ".wheels", help="default: %(default)s")
    parser.add_argument(
        "--site", type=Path, required=True, help="folder to install them in; the script has one"
    )
    parser.add_argument("--seconds", type=float, default=480, help="for all parts (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, help="file of results (default: benchmarks/results/gpu-DATE.json)"
    )
    parser.add_argument("--only", action="append", default=[], metavar="PART", help="may be repeated")
    parser.add_argument("--skip", action="append", default=[], metavar="PART", help="may be repeated")
    parser.add_argument("--dry-run", action="store_true", help="rehearse on an emulated device")
    options = parser.parse_args(arguments)
    options.out = options.out or ROOT / "benchmarks" / "results" / f"gpu-{datetime.date.today()}.json"
    known = {part.name for part in parts(True)}
    if unknown := {*options.only, *options.skip} - known:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the parts and print their table. Returns the exit status."""
    options = parse(arguments)
    is_gpu = not options.dry_run
    run = Run(options)
    run.take(Part("machine", 30, partial(checks.machine, is_gpu)))
    run.take(Part("wheels", 60, partial(install, options.wheels, options.site)))
    importlib.invalidate_caches()
    if run.take(Part("packages", 90, partial(checks.packages, is_gpu))).verdict == OK:
        # Parts begin with what is imported here, which starts no CUDA. They report what does not import.
        with suppress(Exception):
            importlib.import_module("benchmarks.gpu.place")
    for part in filter(run.is_wanted, parts(is_gpu)):
        run.take(part)
    print("\n" + summary(run.outcomes))
    print(f"results: {options.out}")
    return int(any(outcome.is_bad for outcome in run.outcomes))


if __name__ == "__main__":
    sys.exit(main())
