"""The key of packed weights: a hash of everything that they were made of. Imports no torch.

A file of packed weights is found by its key only, so it is never stale: what was made of anything else has another
key.

A checkpoint counts as the same if none of its files has another name, size, inode, time of modification or time of
change, or other bytes in samples that are spread over it. Reading gigabytes at every start would cost what the
cache saves. The time of change is what makes this enough: the system sets it whenever content or metadata of a file
change, and no program can choose it (as it can the time of modification). A copied checkpoint is another one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import stat
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from pagewire import kernels, workers
from pagewire.ipc import families
from pagewire.ipc.environment import env_flag
from pagewire.ipc.families.registry import FAMILIES
from pagewire.ipc.files.model_configs import read_configs, read_foreign
from pagewire.ipc.models.registrations import model_path
from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.kernels.cpu import library
from pagewire.kernels.cpu.build import REFERENCE

logger = logging.getLogger("pagewire.worker")

FORMAT = 1
SAMPLES, SAMPLE_BYTES = 32, 4096
READ_BYTES = 1 << 20  # at once
PACKAGES = ("torch", "transformers")
"""Their code makes what is kept beside the weights: tables of angles, the structure of the layers."""
KEY_CHARACTERS = 40
LIMITS = frozenset(
    (
        "model_path",
        "device",
        "weight_cache",
        "num_threads",
        "enforce_eager",
        "batch_invariant",
        "trust_remote_code",
        "allowed_save_path",
        "max_num_seqs",
        "max_num_batched_tokens",
        "block_size",
        "num_blocks",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "speculative",
        "lora",
        "logits_processors",
        "worker_extension",
        "tier",
        "weights",
    )
)
"""The fields of `WorkerConfig` that a loaded model does not depend on. A new field counts until it stands here.

Weights that replace the checkpoint's are never kept, and the names of KV blocks say of which weights these are.
"""
MODULE_FILES = "*_*/*"  # of sentence-transformers' modules, such as 1_Pooling/config.json
SPLIT_FILE = re.compile(r"-\d{5}-of-\d{5}(?=\.\w+$)")


def key_of(config: WorkerConfig, isa: str | None = None) -> str | None:
    """The key of the packed weights of a configuration on this CPU; None if they are not kept, for a logged reason.

    isa: the instruction set of the kernels; None: that of those that are chosen, which may compile them.

    Raises:
        OSError: a file cannot be read. ValueError: `PAGEWIRE_CPU_ISA` names no instruction set of this CPU.
    """
    if (reason := reason_against(config)) is not None:
        logger.debug("packed weights are not kept: %s", reason)
        return None
    isa = isa or chosen_isa()
    if isa == REFERENCE:
        logger.debug("packed weights are not kept: there are no compiled kernels")
        return None
    return fingerprint(config, isa)[:KEY_CHARACTERS]


def chosen_isa() -> str:
    """The instruction set of the kernels that run here, which may compile them; `REFERENCE` if there are none.

    Raises:
        ValueError: `PAGEWIRE_CPU_ISA` names no instruction set of this CPU.
    """
    compiled = library.choose()
    return REFERENCE if compiled is None else compiled.isa.name


def fingerprint(config: WorkerConfig, isa: str, describe: Callable[[Path], list[Any]] | None = None) -> str:
    """A hash of all that a loaded model depends on: files, settings, code, versions and instruction set.

    describe: what says which file one is (`described` on this machine, `contents` on any).

    Raises:
        OSError: a file cannot be read.
    """
    describe = describe or described
    parts = [
        FORMAT,
        platform.machine(),
        isa,
        code_digest(),
        versions(),
        settings(config, describe),
        *(describe(path) for path in checkpoint_files(Path(config.model_path))),
    ]
    return hashlib.sha256(msgspec.msgpack.encode(parts)).hexdigest()


def reason_against(config: WorkerConfig) -> str | None:
    """Why the weights of a configuration are not kept; None if they are."""
    if not config.weight_cache:
        return "the option weight_cache is off"
    if config.weights:
        return "they replace those of the checkpoint"
    return reason_unknown(config)


def reason_unknown(config: WorkerConfig) -> str | None:
    """Why `fingerprint` does not say all that a model depends on; None if it does."""
    if config.load_format == "dummy":
        return "they are random"
    if config.trust_remote_code:
        return "the model may run code that lies elsewhere"
    if runs_own_code(config):
        return "its class or its table is registered from code that lies elsewhere"
    return None


def runs_own_code(config: WorkerConfig) -> bool:
    """True if the model's class, or the table of its family, is one's own."""
    if not config.registrations.models and not config.registrations.families:
        return False
    path = Path(config.model_path)
    foreign = read_foreign(path, config.trust_remote_code)
    if foreign is not None and foreign.family not in FAMILIES:
        return True
    return model_path(read_configs(path, config.trust_remote_code)[0] | config.hf_overrides) is not None


def code_digest() -> str:
    """A hash of our code that packs, loads and proves: all sources of `kernels`, `workers` and `ipc/families`."""
    digest = hashlib.sha256()
    for folder in map(Path, (*kernels.__path__, *workers.__path__, *families.__path__)):
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".cpp", ".h"):
                digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def versions() -> list[str]:
    """The versions of `PACKAGES`; empty for one that is not installed as a package."""
    found = []
    for name in PACKAGES:
        try:
            found.append(version(name))
        except PackageNotFoundError:
            found.append("")
    return found


def settings(config: WorkerConfig, describe: Callable[[Path], list[Any]]) -> list[Any]:
    """All that a configuration says of the model, with the files that it names beside the checkpoint."""
    # Field by field: which ones msgspec omits as defaults depends on whether the message has been sent.
    fields = {name: getattr(config, name) for name in config.__struct_fields__ if name not in LIMITS}
    # How ranks meet says nothing of the model.
    parallel = config.parallel
    fields["parallel"] = [parallel.rank, parallel.size, parallel.stages, *parallel.layers]
    named = [Path(value) for value in fields.values() if isinstance(value, str) and value]
    files = [describe(path) for path in named if path.is_file()]
    if config.merged_adapter and Path(config.merged_adapter).is_dir():
        files += [describe(path) for path in checkpoint_files(Path(config.merged_adapter))]
    longer = env_flag("PAGEWIRE_ALLOW_LONG_MAX_MODEL_LEN")
    return [msgspec.json.encode(fields, order="deterministic"), files, longer]


def checkpoint_files(path: Path) -> Iterator[Path]:
    """The files of a model folder and of its modules; of a model in one file that file, or all its parts."""
    if path.is_dir():
        yield from sorted(child for child in path.iterdir() if child.is_file())
        yield from sorted(child for child in path.glob(MODULE_FILES) if child.is_file())
        return
    whole = SPLIT_FILE.sub("", path.name)
    yield from sorted(child for child in path.parent.iterdir() if SPLIT_FILE.sub("", child.name) == whole)


def described(path: Path) -> list[Any]:
    """What tells a file from any other on this machine, and from itself with other content.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            return [path.name]
        last = max(0, info.st_size - SAMPLE_BYTES)
        samples = hashlib.sha256()
        for index in range(SAMPLES):
            samples.update(os.pread(file.fileno(), SAMPLE_BYTES, last * index // (SAMPLES - 1)))
    times = [info.st_mtime_ns, info.st_ctime_ns]
    return [path.name, info.st_size, info.st_dev, info.st_ino, *times, samples.digest()]


def contents(path: Path) -> list[Any]:
    """A file by its name and all of its bytes, so that a copy is the same one. Reads it.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            return [path.name]
        digest = hashlib.sha256()
        while part := file.read(READ_BYTES):
            digest.update(part)
        return [path.name, info.st_size, digest.digest()]
