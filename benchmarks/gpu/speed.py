"""Parts that show how fast kernels and models are on a device. A wrong result is a failure here, too."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any


def kernels(is_gpu: bool, group: str) -> dict[str, Any]:
    """A group of cases of `benchmarks.kernels`, checked and measured."""
    from benchmarks.gpu.place import Gpu, Rehearsal
    from benchmarks.kernels.__main__ import run_cases, wrong_cases

    place = Gpu() if is_gpu else Rehearsal()
    report = run_cases([group], place.kernels().launcher, str(place.device), place.extent)
    if wrong := wrong_cases(report):
        raise RuntimeError(f"wrong results: {', '.join(wrong)}")
    return report


def model(is_gpu: bool, name: str, *, adapters: bool = False, **options: Any) -> dict[str, Any]:
    """A model end to end with random weights. options: of the engine."""
    from benchmarks.gpu import models
    from benchmarks.kernels.timing import floors
    from benchmarks.limits import Limits

    limits = Limits(*floors("cuda:0" if is_gpu else "cpu"))
    scale = models.QUICK if is_gpu else models.SMALL
    return models.run_model(models.sizes_of(name, is_gpu), scale, limits, adapters=adapters, **options)


def peer(is_gpu: bool, name: str) -> dict[str, Any]:
    """A model beside transformers' continuous batching."""
    from benchmarks.gpu import models
    from benchmarks.gpu.peer import compare

    works, device = (models.FEW, "cuda") if is_gpu else (models.SMALL.works, "cpu")
    return compare(models.sizes_of(name, is_gpu), works[-1], device)


def encoder(is_gpu: bool, name: str) -> dict[str, Any]:
    """An encoder, compared with transformers; the one that is measured in every dtype."""
    from benchmarks.gpu import encoders

    with tempfile.TemporaryDirectory() as folder:
        figures = encoders.run_model(Path(folder), name, "cuda" if is_gpu else "cpu", quick=not is_gpu)
    if wrong := [dtype for dtype, row in figures.items() if not row["good"]]:
        raise RuntimeError(f"{name} differs from transformers in {', '.join(wrong)}")
    return figures
