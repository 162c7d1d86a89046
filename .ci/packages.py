"""Builds what is published: the sdist and wheel of `pagewire`, and the wheel of `pagewire-client`.

    python .ci/packages.py [dist] [--kernels all [--glibc 2.28]]

With `--kernels`, a fourth file is a wheel with compiled CPU kernels for these instruction sets, such as
`avx2,avx512_bf16`, or `all`: for machines with this version of the C library, or a newer one.

They are built from a copy of the tree, so nothing that lies around gets in, and the wheel of `pagewire` from its
sdist, so that both hold the same. setuptools is the only tool; nothing is fetched.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from kernel_wheel import kernel_wheel  # beside this file

ROOT = Path(__file__).resolve().parents[1]
# Of the repository; `pagewire` and the folders beside it, and what their build needs.
PARTS = ("cli", "deploy/client", "engine_core", "frontend", "ipc", "kernels", "pagewire", "workers")
FILES = ("LICENSE", "README.md", "pyproject.toml", "setup.py")


def copy_sources(target: Path) -> None:
    """Copy the parts that are built, without what Python and tools leave there."""
    for part in PARTS:
        shutil.copytree(
            ROOT / part, target / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
        )
    for name in FILES:
        shutil.copy(ROOT / name, target / name)


def built(folder: Path, kind: str, out: Path) -> Path:
    """Build a "sdist" or a "wheel" of the project in a folder, by setuptools, and return its path.

    Raises:
        subprocess.CalledProcessError: the build failed; its output is in the error.
    """
    program = f"from setuptools.build_meta import build_{kind} as build; print(build({str(out)!r}))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return out / done.stdout.split()[-1]


def build(out: Path) -> list[Path]:
    """Build the three files into a folder, and return their paths: sdist, wheel, client's wheel."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        tree, unpacked = Path(name) / "tree", Path(name) / "unpacked"
        copy_sources(tree)
        sdist = built(tree, "sdist", out)
        with tarfile.open(sdist) as archive:
            archive.extractall(unpacked)
        [source] = unpacked.iterdir()
        return [sdist, built(source, "wheel", out), built(tree / "deploy" / "client", "wheel", out)]


def main() -> None:
    """Build into the folder of the command line, and print the sizes."""
    parser = argparse.ArgumentParser(description="Build what is published.")
    parser.add_argument("out", nargs="?", type=Path, default=Path("dist"), help="folder (default: dist)")
    parser.add_argument(
        "--kernels",
        metavar="SETS",
        help="build a wheel with CPU kernels for these instruction sets, too, such as avx2,avx512_bf16 (or all)",
    )
    parser.add_argument(
        "--glibc",
        metavar="VERSION",
        default="",
        help="the C library that they may need, such as 2.28 (default: that of this machine); needs ziglang",
    )
    options = parser.parse_args()
    out = options.out.resolve()
    paths = build(out)
    if options.kernels:
        paths.append(kernel_wheel(paths[1], options.kernels.split(","), out, options.glibc))
    for path in paths:
        print(f"{path.stat().st_size / 1e6:5.1f} MB  {path}")


if __name__ == "__main__":
    main()
