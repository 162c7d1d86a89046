"""Writes a quantised copy of a model folder: one matrix after the other, so that memory holds one at a time."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pagewire.cli.quantise.integers import GROUPS, CompressedIntegers
from pagewire.cli.quantise.linears import find_linears
from pagewire.cli.quantise.shards import PlannedTensor, Shard, index, shards
from pagewire.ipc.counts import check_counts
from pagewire.ipc.files.hub import TOKENIZER_FILES, read_json
from pagewire.workers.checkpoint.headers import INDEX
from pagewire.workers.checkpoint.source import Checkpoint

LICENSES = ["LICENSE*", "NOTICE*"]
ROWS = 128
"""Outputs that are quantised at a time."""


@dataclass
class Written:
    """What a quantised checkpoint holds."""

    num_matrices: int = 0
    num_bytes: int = 0
    squares: float = 0.0
    errors: float = 0.0

    @property
    def error(self) -> float:
        """How far the quantised matrices are from the dense ones, as a share of their norm."""
        return float((self.errors / max(self.squares, 1e-30)) ** 0.5)


def quantise_checkpoint(
    folder: Path, out: Path, scheme: CompressedIntegers, progress: Callable[[int], object]
) -> Written:
    """Write the folder `out`, which appears when it is complete.

    progress: called with the numbers of parameters done since the last call.

    Raises:
        ValueError: the model is quantised already, it is not served, or a group does not fit.
        OSError: `out` exists, the disk has too little room, or a file cannot be read or written.
    """
    if out.exists():
        raise FileExistsError(f"{out} exists: it is not overwritten")
    config = read_json(folder / "config.json")
    check_counts(config)
    if "quantization_config" in config:
        raise ValueError(f"{folder} is quantised already, as its config.json says; take the original")
    checkpoint = Checkpoint(folder)
    linears = find_linears(folder, checkpoint)
    if scheme.group:
        _check_group(checkpoint, linears.chosen, scheme.group)
    plan = {name: _entries(checkpoint, name, scheme, name in linears.chosen) for name in checkpoint.names}
    _check_room(out, sum(entry.num_bytes for entries in plan.values() for entry in entries))
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        written = _write(partial, checkpoint, plan, scheme, linears.chosen, progress)
        config["quantization_config"] = scheme.quantization_config(linears.ignored)
        _copy_others(folder, partial)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        partial.chmod(0o777 & ~_umask())
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return written


def _entries(
    checkpoint: Checkpoint, name: str, scheme: CompressedIntegers, chosen: bool
) -> list[PlannedTensor]:
    """The tensors that a tensor of the checkpoint becomes."""
    tensor = checkpoint.on_meta(name)
    if not chosen:
        return [PlannedTensor(name, tensor.dtype, tuple(tensor.shape))]
    rows, columns = tensor.shape
    return scheme.entries(name.removesuffix(".weight"), (rows, columns), tensor.dtype)


def _check_group(checkpoint: Checkpoint, chosen: Iterable[str], group: int) -> None:
    """Raise ValueError if the columns of a matrix are no multiple of a group, and say which group fits all."""
    columns = {name: checkpoint.on_meta(name).shape[1] for name in sorted(chosen)}
    for name, count in columns.items():
        if count % group:
            fitting = [str(size) for size in GROUPS if math.gcd(*columns.values()) % size == 0]
            other = f"--group {' or '.join(fitting)}" if fitting else "--scheme int8 without groups"
            raise ValueError(
                f"the {count} inputs of {name} are no multiple of --group {group}; {other} fits the model"
            )


def _write(
    folder: Path,
    checkpoint: Checkpoint,
    plan: dict[str, list[PlannedTensor]],
    scheme: CompressedIntegers,
    chosen: frozenset[str],
    progress: Callable[[int], object],
) -> Written:
    """Write all tensors, and the index if they are in several files."""
    files = shards(plan.values())
    if len(files) > 1:
        (folder / INDEX).write_text(json.dumps(index(files), indent=2) + "\n")
    opened = {name: Shard(folder / name, entries) for name, entries in files}
    places = {entry.name: opened[name] for name, entries in files for entry in entries}
    written = Written()
    for name in plan:
        tensor = checkpoint.read(name)
        made = _quantised(name, tensor, scheme, written) if name in chosen else {name: tensor}
        for entry, part in made.items():
            places[entry].write(entry, part)
            written.num_bytes += part.nbytes
        progress(tensor.numel())
        del tensor, made
        checkpoint.let_go()
    for shard in opened.values():
        shard.close()
    return written


def _quantised(name: str, matrix: Tensor, scheme: CompressedIntegers, written: Written) -> dict[str, Tensor]:
    """The tensors of a matrix, with their names; its error is added to `written`.

    Raises:
        ValueError: a number is not finite.
    """
    module = name.removesuffix(".weight")
    blocks: list[dict[str, Tensor]] = []
    for start in range(0, len(matrix), ROWS):
        rows = matrix[start : start + ROWS]
        if not rows.isfinite().all():
            raise ValueError(f"{name} holds numbers that are not finite")
        parts, restored = scheme.quantised(rows)
        blocks.append(parts)
        written.errors += float((restored - rows.float()).square().sum())
        written.squares += float(rows.float().square().sum())
    made = {f"{module}.{suffix}": torch.cat([block[suffix] for block in blocks]) for suffix in blocks[0]}
    if scheme.group:
        made[f"{module}.weight_shape"] = torch.tensor(matrix.shape)
    written.num_matrices += 1
    return made


def _copy_others(folder: Path, out: Path) -> None:
    """Copy the files of the tokenizer, of generation, and licenses."""
    for path in _others(folder):
        target = out / path.relative_to(folder)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)


def _others(folder: Path) -> Iterator[Path]:
    for pattern in TOKENIZER_FILES + LICENSES:
        yield from (path for path in folder.glob(pattern) if path.is_file())


def _check_room(out: Path, needed: int) -> None:
    """Raise OSError if the disk has less room than `needed` bytes."""
    place = next(parent for parent in out.absolute().parents if parent.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise OSError(f"{out} needs {needed / 1e9:.1f} GB; the disk of {place} has {free / 1e9:.1f} GB free")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
