"""The command: see the package."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from pagewire.kernels.cuda.launch import CudaLauncher, KernelLauncher

from .adapters import lora_cases
from .attention import decode_cases, encoder_cases, prefill_cases
from .cache_writes import write_cases
from .case import Case, Extent
from .experts import expert_cases
from .latents import latent_cases
from .linear import linear_cases
from .rows import row_cases
from .sampling import sampling_cases
from .timing import floors, launch_overhead, measure

CASES: dict[str, Callable[[KernelLauncher, str, Extent], Iterator[Case]]] = {
    "decode": decode_cases,
    "prefill": prefill_cases,
    "encoder": encoder_cases,
    "latents": latent_cases,
    "write": write_cases,
    "rows": row_cases,
    "linear": linear_cases,
    "experts": expert_cases,
    "lora": lora_cases,
    "sampling": sampling_cases,
}


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def run_cases(
    groups: Iterable[str], launcher: KernelLauncher, on: str, extent: Extent, *, checks_only: bool = False
) -> dict[str, Any]:
    """The report of some groups of cases, each of which is printed. checks_only: nothing is measured."""
    bandwidth, rate = (1.0, 1.0) if checks_only else floors(on)
    report: dict[str, Any] = {"torch": torch.__version__, "cases": {}}
    if not checks_only:
        taken = launch_overhead(launcher, on)
        report |= {"copy_bytes_per_s": bandwidth, "product_flops": rate, "launch_s": taken}
        print(f"copy {bandwidth / 1e12:.2f} TB/s, product {rate / 1e12:.0f} TFLOP/s")
        for name, of_launch in taken.items():
            print(f"launch of {name}: {of_launch * 1e6:.1f} us of Python")
    for group in groups:
        for case in CASES[group](launcher, on, extent):
            error = case.error()
            row: dict[str, Any] = {"error": error, "good": error <= case.tolerance}
            if not checks_only:
                row |= measure(case, bandwidth, rate)
            report["cases"][case.name] = row
            print(f"{case.name:40} {'  '.join(f'{key} {_short(row[key])}' for key in row)}", flush=True)
            del case
            torch.cuda.empty_cache()
    return report


def wrong_cases(report: dict[str, Any]) -> list[str]:
    """The names of the cases whose results were wrong."""
    return [name for name, row in report["cases"].items() if not row["good"]]


def main() -> int:
    """Check, measure, print, write. Exit status 1 if a result was wrong."""
    parser = argparse.ArgumentParser(description="Check and measure the CUDA kernels.")
    parser.add_argument("--only", choices=CASES, action="append", help="may be given again")
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--check", action="store_true", help="do not measure (as under compute-sanitizer)")
    parser.add_argument("--out", type=Path, help="folder of a JSON file of all figures")
    options = parser.parse_args()
    extent = Extent.QUICK if options.quick else Extent.FULL
    report = run_cases(options.only or CASES, CudaLauncher.at(0), "cuda:0", extent, checks_only=options.check)
    report["device"] = torch.cuda.get_device_name(0)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        file = options.out / f"kernels-{report['device'].replace(' ', '-')}-{datetime.date.today()}.json"
        file.write_text(json.dumps(report, indent=1) + "\n")
    wrong = wrong_cases(report)
    print(f"{len(wrong)} of {len(report['cases'])} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
