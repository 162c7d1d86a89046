"""The command: see the package."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from pagewire.kernels.cuda.launch import CudaLauncher, KernelLauncher

from .adapters import lora_cases
from .attention import decode_cases, encoder_cases, prefill_cases
from .cache_writes import write_cases
from .case import Case
from .rows import row_cases
from .sampling import sampling_cases
from .timing import floors, launch_overhead, measure

CASES: dict[str, Callable[[KernelLauncher, str, bool], Iterator[Case]]] = {
    "decode": decode_cases,
    "prefill": prefill_cases,
    "encoder": encoder_cases,
    "write": write_cases,
    "rows": row_cases,
    "lora": lora_cases,
    "sampling": sampling_cases,
}


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> int:
    """Check, measure, print, write. Exit status 1 if a result was wrong."""
    parser = argparse.ArgumentParser(description="Check and measure the CUDA kernels.")
    parser.add_argument("--only", choices=CASES, action="append", help="may be given again")
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--check", action="store_true", help="do not measure (as under compute-sanitizer)")
    parser.add_argument("--out", type=Path, help="folder of a JSON file of all figures")
    options = parser.parse_args()
    launcher, on = CudaLauncher.at(0), "cuda:0"
    bandwidth, rate = (1.0, 1.0) if options.check else floors(on)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cases": {},
    }
    if not options.check:
        report |= {
            "copy_bytes_per_s": bandwidth,
            "product_flops": rate,
            "launch_s": launch_overhead(launcher, on),
        }
        print(f"{report['device']}: copy {bandwidth / 1e12:.2f} TB/s, product {rate / 1e12:.0f} TFLOP/s")
        for name, taken in report["launch_s"].items():
            print(f"launch of {name}: {taken * 1e6:.1f} us of Python")
    wrong = 0
    for group in options.only or CASES:
        for case in CASES[group](launcher, on, options.quick):
            error = case.error()
            good = error <= case.tolerance
            wrong += not good
            row: dict[str, Any] = {"error": error, "good": good}
            if not options.check:
                row |= measure(case, bandwidth, rate)
            report["cases"][case.name] = row
            figures = "  ".join(f"{key} {_short(value)}" for key, value in row.items())
            print(f"{case.name:40} {figures}", flush=True)
            del case
            torch.cuda.empty_cache()
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        file = options.out / f"kernels-{report['device'].replace(' ', '-')}-{datetime.date.today()}.json"
        file.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{wrong} of {len(report['cases'])} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
