"""The models that `pagewire serve` loads on demand, by name, and the memory that each of them needs."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagewire.cli.console.options import check_config, engine_args, read_file
from pagewire.cli.console.parser import UsageError
from pagewire.frontend.server.shelf.options import ShelfOptions
from pagewire.ipc.files.names import short_name
from pagewire.ipc.sizes import size_in_bytes

if TYPE_CHECKING:
    from pagewire.frontend.server.shelf.model_shelf import MemoryEstimate
    from pagewire.ipc.options.engine_args import EngineArgs

CORE_BYTES = 96 << 20
"""Of an engine core beside its worker."""
NAMES = frozenset(field.name for field in dataclasses.fields(ShelfOptions))
NO_FIT = (
    "--fit is for CPUs, and for safetensors and GGUF files: leave it out, and give max_model_len or quantization "
    "(`pagewire inspect` says what would fit)"
)
FITTED = ("quantization", "max_model_len", "kv_cache_memory_bytes")
"""Options that `--fit` may choose."""


def take_shelf_options(options: argparse.Namespace, file: dict[str, Any]) -> ShelfOptions:
    """Return the options of loading on demand. The command line overrides the file.

    Raises:
        UsageError: one has a bad value.
    """
    given = {name: value for name, value in {**file, **vars(options)}.items() if name in NAMES}
    try:
        found = ShelfOptions(**given)
        found.check()
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
    return found


def models_on_demand(
    tags: list[str], shelf: ShelfOptions, options: argparse.Namespace
) -> dict[str, EngineArgs]:
    """Return the engine options of each model that is loaded on demand, by name; none if all are loaded at once.

    tags: models of the command line. options: those of the command line that all engines have.

    Raises:
        UsageError: two models have the same name, a file or a folder cannot be read, or an option is bad.
    """
    if len(tags) < 2 and shelf == ShelfOptions():
        return {}
    entries: list[tuple[str, dict[str, Any]]] = [(short_name(tag), {"model": tag}) for tag in tags]
    entries += entries_of_file(shelf.models) + entries_of_folder(shelf.models_dir)
    if not entries and not hasattr(options, "model") and not shelf.pulled:
        raise UsageError("give a MODEL, --models, --models-dir or --pulled")
    if hasattr(options, "model"):
        entries.insert(0, (short_name(options.model), {"model": options.model}))
    if hasattr(options, "served_model_name"):
        raise UsageError(
            "--served-model-name is for one model: name those that are loaded on demand in a file (--models)"
        )
    models: dict[str, EngineArgs] = {}
    for name, values in entries:
        if name in models:
            raise UsageError(f"two models have the name {name!r}: name them in a file (--models)")
        models[name] = options_of(options, values)
    if (unknown := [name for name in shelf.pin if name not in models]) and not shelf.pulled:
        raise UsageError(f"--pin: there is no model {unknown[0]!r}; models: {', '.join(models)}")
    return models


def options_of(options: argparse.Namespace, values: dict[str, Any]) -> EngineArgs:
    """Return the engine options of a model. values: its own, beside those of the command line.

    Raises:
        UsageError: an option is bad.
    """
    return engine_args(argparse.Namespace(**{**vars(options), "config": None, **values}))


def entries_of_file(path: str | None) -> list[tuple[str, dict[str, Any]]]:
    """Return the names and options in a YAML file of models.

    Raises:
        UsageError: it cannot be read, or a model has bad options.
    """
    if path is None:
        return []
    entries = []
    for name, given in read_file(path, dashes=False).items():
        values = {"model": given} if isinstance(given, str) else given
        if not isinstance(values, dict) or not isinstance(values.get("model"), str):
            raise UsageError(f"{path}: {name}: give a model, or a mapping with its name under `model`")
        values = {str(key).replace("-", "_"): value for key, value in values.items()}
        if "served_model_name" in values:
            raise UsageError(f"{path}: {name}: a model has the name under which it stands, and no other")
        check_config(f"{path}: {name}", values)
        entries.append((name, values))
    if not entries:
        raise UsageError(f"{path} names no model")
    return entries


def entries_of_folder(path: str | None) -> list[tuple[str, dict[str, Any]]]:
    """Return the names and options of the models in a folder.

    Raises:
        UsageError: it cannot be read, or has no model.
    """
    if path is None:
        return []
    try:
        inside = sorted(Path(path).expanduser().iterdir())
    except OSError as error:
        raise UsageError(f"--models-dir: {error}") from error
    models = [item for item in inside if item.suffix == ".gguf" or (item / "config.json").is_file()]
    if not models:
        raise UsageError(f"--models-dir: {path} has no GGUF file, and no folder with a config.json")
    named = {short_name(str(item)): {"model": str(item)} for item in reversed(models)}  # a split file once
    return sorted(named.items())


def capacity_of(shelf: ShelfOptions) -> int:
    """Return the bytes of memory for all models together."""
    from pagewire.workers.device.machine import machine_memory

    if shelf.models_memory is not None:
        return size_in_bytes("models_memory", shelf.models_memory)
    return machine_memory()[1]


def estimated(capacity: int, fits: bool, args: EngineArgs) -> MemoryEstimate:
    """Estimate the memory that an engine needs, as `pagewire inspect` does, if it had `capacity` bytes for itself.

    fits: options with which it fits are chosen (`--fit`). On a GPU the estimate is the share of memory that the
    engine takes (`gpu_memory_utilization`), and nothing can be chosen.

    Raises:
        ModelNotFoundError: there is no such model. LoadError: its headers cannot be read.
    """
    from pagewire.engine_core.config.config import EngineConfig
    from pagewire.frontend.server.shelf.model_shelf import MemoryEstimate
    from pagewire.kernels.cpu.library import expected_isa
    from pagewire.workers.checkpoint.headers import WITHOUT_HEADERS, read_headers
    from pagewire.workers.device.machine import runs_on_cpu
    from pagewire.workers.estimate.fit import amount, fit, kept_bytes, largest_stage, sizes_of
    from pagewire.workers.estimate.fitted import fitted

    if not runs_on_cpu(args.device) or args.load_format in WITHOUT_HEADERS:
        if fits:
            return MemoryEstimate(0, NO_FIT)
        return MemoryEstimate(int(min(1.0, args.gpu_memory_utilization) * capacity))
    config = EngineConfig.resolve(args).worker_config()
    isa, num_workers = expected_isa(), config.parallel.size
    headers = read_headers(config.model_path, config.hf_overrides, config.trust_remote_code)
    config = largest_stage(headers, config, isa)
    own = (capacity - CORE_BYTES) // num_workers
    chosen = None
    if fits:
        given = [name for name in FITTED if getattr(args, name) is not None]
        chosen = fitted(
            lambda tried: sizes_of(headers, tried, isa),
            config,
            given,
            own,
            lambda tried: kept_bytes(tried, isa),
        )
        found = chosen.fit
    else:
        found = fit(sizes_of(headers, config, isa), config, own, own, kept_bytes(config, isa))
    if found.problem is not None:
        smaller = ", and --fit finds nothing smaller" if fits else ""
        return MemoryEstimate(0, f"{found.problem}; {amount(capacity)} are there for models{smaller}")
    loading = found.base_bytes + found.weight_bytes + found.table_bytes + found.loading_bytes
    need = max(found.resident_bytes + found.step_bytes, loading)
    total = min(capacity, num_workers * need + CORE_BYTES)
    return (
        MemoryEstimate(total) if chosen is None else MemoryEstimate(total, None, chosen.changes, str(chosen))
    )
