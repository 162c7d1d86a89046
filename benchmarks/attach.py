"""What it takes to attach a frontend to a running core: seconds, memory, and what is imported.

    python -m benchmarks.attach [--model demo]

Starts a core of its own. Each run is a new interpreter, timed from before its first import to the first token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

from benchmarks.daemon import running_core

FRONTEND = """
import time; begin = time.perf_counter()
import sys
from pagewire import LLM, SamplingParams
llm = LLM.attach(sys.argv[1])
attached = time.perf_counter() - begin
llm.generate("The", SamplingParams(max_tokens=1), use_tqdm=False)
first = time.perf_counter() - begin
import json, psutil, resource
heavy = sorted({name.split(".")[0] for name in sys.modules} & {"torch", "transformers", "numpy"})
print(json.dumps({
    "attach_s": attached, "first_token_s": first, "rss_mb": psutil.Process().memory_info().rss / 2**20,
    "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10, "heavy_imports": heavy,
}))
llm.shutdown()
"""


def main() -> None:
    """Start a core, attach a few times, print the medians and the slowest imports."""
    parser = argparse.ArgumentParser(description="Measure attaching a frontend to a running core.")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--num-runs", type=int, default=5)
    options = parser.parse_args()
    with running_core("--model", options.model) as address:
        measure(address, options.num_runs)


def measure(address: str, num_runs: int) -> None:
    """Attach from new interpreters, then once more under `-X importtime`."""
    frontend = [sys.executable, "-c", FRONTEND, address]
    runs = [json.loads(subprocess.check_output(frontend)) for _ in range(num_runs)]
    for name in ("attach_s", "first_token_s", "rss_mb", "peak_rss_mb"):
        values = [run[name] for run in runs]
        print(f"{name:14} median {statistics.median(values):8.3f}   max {max(values):8.3f}")
    print(f"heavy imports: {runs[0]['heavy_imports'] or 'none'}")
    traced = subprocess.run(
        [sys.executable, "-X", "importtime", *frontend[1:]], capture_output=True, text=True, check=True
    )
    rows = [line.split("|") for line in traced.stderr.splitlines() if line.startswith("import time:")][1:]
    print("slowest imports, cumulative ms:")
    for row in sorted(rows, key=lambda row: -int(row[1]))[:8]:
        print(f"  {int(row[1]) / 1000:7.1f}  {row[2].strip()}")


if __name__ == "__main__":
    main()
