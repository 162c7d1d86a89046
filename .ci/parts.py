"""Which targets of the Makefile a change runs beside lint, `make test` and the siege: a table of paths.

    .ci/parts.py BASE      prints the targets for what has changed between the commit BASE and HEAD, a line each

Each row names what only some changes can break. Paths are those of `git diff`: folders, files, patterns, and
":!pattern" for what does not count.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """Targets of the Makefile, and the paths after whose change they run.

    counts_new: a file that is new counts, too. pins: the packages whose lines of constraints.txt count, as a
    regular expression; None: no package's do, unless the file is among the paths.
    """

    targets: tuple[str, ...]
    paths: tuple[str, ...]
    counts_new: bool = True
    pins: str | None = None

    def is_touched(self, base: str) -> bool:
        """True if one of the paths or of the pins has changed since the commit `base`."""
        new = () if self.counts_new else ("--diff-filter=a",)
        if changed(base, *new, "--", *self.paths):
            return True
        return self.pins is not None and changed(base, f"-G^({self.pins})", "--", PINS)


def changed(base: str, *arguments: str) -> bool:
    """True if `git diff` with these arguments names a file."""
    command = ["git", "diff", "--name-only", base, "HEAD", *arguments]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE)
    if done.returncode:
        raise RuntimeError(f"git diff ended with {done.returncode}")
    return bool(done.stdout)


PINS = "constraints.txt"
CUDA_PACKAGES = "cupy|nvidia"
CUDA_BENCHMARKS = ("benchmarks/gpu", "benchmarks/gpu_all.sh", "benchmarks/kernels")
CUDA_SOURCES = ("kernels/cuda/*.cu*", *(f"kernels/cuda/{name}.py" for name in ("compile", "cubin", "source")))
CUDA_VARIANTS = ("tests/kernels/cuda/variants.txt", "tests/kernels/cuda/test_compile.py")

PARTS = (
    # The CPU kernels on every instruction set of the CPU.
    Part(("test-sets",), ("kernels", "tests/kernels", ":!*/cuda/*")),
    # The CUDA kernels and the workers that run them, emulated.
    Part(
        ("test-cuda",),
        (
            *("kernels", "workers", "ipc/wire", "engine_core/config", "cli/commands/doctor.py"),
            *("tests/kernels", "tests/workers", *CUDA_BENCHMARKS, "pyproject.toml", "constraints.txt"),
        ),
    ),
    # Every variant of the CUDA kernels, by both generations of the compiler. A new source counts once one of its
    # kernels is in the list.
    Part(
        ("test-cuda12", "test-cuda13"), (*CUDA_SOURCES, *CUDA_VARIANTS), counts_new=False, pins=CUDA_PACKAGES
    ),
    # Faults planted in the CUDA kernels.
    Part(
        ("test-cuda-faults",),
        ("kernels/cuda", "tests/kernels/cuda", "workers/device", "workers/sample"),
        pins=f"{CUDA_PACKAGES}|torch==",
    ),
    # Every architecture on the emulated GPU.
    Part(
        ("test-cuda-models",),
        (
            "kernels/cuda",
            *(f"workers/{room}" for room in ("device", "run", "network", "families", "module")),
            "tests/workers/device",
        ),
    ),
    # The script for a machine with a GPU, rehearsed.
    Part(("rehearse-gpu",), CUDA_BENCHMARKS),
    # Workers in a Ray cluster, and the examples for Ray.
    Part(
        ("test-ray",),
        ("engine_core/workers", "ipc/options/ray_cluster.py", "examples", "tests/ray", "constraints.txt"),
    ),
    # Every architecture, divided over ranks and stages.
    Part(
        ("test-ranks",),
        (
            *(f"workers/module/{name}.py" for name in ("parallel_layers", "parallel_plan", "shards")),
            *("workers/network", "workers/families", "workers/ranks", "tests/workers/parallel"),
        ),
    ),
    # Models with the lowest versions of transformers.
    Part(
        ("test-oldest",),
        (
            *(f"workers/{name}" for name in ("module", "network", "families", "versions.py")),
            "tests/workers/versions.py",
            *("pyproject.toml", "constraints.txt"),
        ),
    ),
    # The site, and the code in documents.
    Part(
        ("docs",),
        (
            *("README.md", "ARCHITECTURE.md", "docs", "mkdocs.yml"),
            *("pagewire", "engine_core/metrics/metrics.py"),
        ),
    ),
    Part(
        ("test-documents",),
        ("README.md", "docs", "cli", "pagewire", "tests/documents.py", "tests/end_to_end/test_documents.py"),
    ),
    # What is published: built, installed and run.
    Part(
        ("test-packages",),
        (
            *("pyproject.toml", "setup.py", ".ci/packages.py", ".ci/kernel_wheel.py", "cli/main.py"),
            *("tests/packages", "kernels/native", "kernels/cpu/build.py"),
            *(f"deploy/{name}" for name in ("client", "triton", "bentoml")),
        ),
    ),
    # Clients of the server's APIs.
    Part(("test-clients",), ("frontend", "ipc/wire", "examples/router.py", "tests/clients")),
    # What the page brings along, compared with what npm has.
    Part(("vendored",), ("frontend/server/page/vendor",)),
)


def targets(base: str) -> list[str]:
    """The targets for what has changed since the commit `base`, in the order of the table."""
    return [target for part in PARTS if part.is_touched(base) for target in part.targets]


if __name__ == "__main__":
    print("\n".join(targets(sys.argv[1])))
