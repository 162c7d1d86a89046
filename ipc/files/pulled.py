"""The folder of models that `pagewire pull` has brought: what is in it, and what is removed from it.

    pulled/owner--repository--Q4_K_M.json     what was pulled; there once it is complete
    pulled/owner--repository--Q4_K_M/CONTENT/ its files, or those that are there yet
    pulled/owner--repository--Q4_K_M.lock     held while it is pulled or removed

Nothing else is put there, and nothing else is ever removed. CONTENT is a digest of the files' names and digests: a
newer commit with the same files is not downloaded again, and one with others never mixes with them.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from pagewire.ipc.environment import cache_root
from pagewire.ipc.errors import ModelNotFoundError
from pagewire.ipc.files.hub_names import HubName, hub_name, is_safe, position
from pagewire.ipc.gguf.file import is_gguf

logger = logging.getLogger("pagewire")

MAX_RECORD_BYTES = 4 << 20


class PulledFile(msgspec.Struct, frozen=True):
    """A file of a pulled model. digest: as the hub says it (`RepositoryFile`)."""

    name: str
    num_bytes: int
    digest: str


class PulledModel(msgspec.Struct, frozen=True):
    """A model that was pulled, or is to be.

    tag: its quantisation, or its file; "": a repository of safetensors. pulled_at: in seconds since the epoch.
    """

    repository: str
    tag: str
    commit: str
    content: str
    files: list[PulledFile]
    pulled_at: int

    @property
    def given(self) -> HubName:
        """Its name in parts."""
        return HubName(self.repository, self.tag or None)

    @property
    def name(self) -> str:
        """Its name as it is listed."""
        return str(self.given)

    @property
    def num_bytes(self) -> int:
        """The size of all files."""
        return sum(file.num_bytes for file in self.files)


def pulled_root() -> Path:
    """The folder, which may not exist yet."""
    given = os.environ.get("PAGEWIRE_PULLED_DIR")
    return Path(given).expanduser() if given else cache_root() / "pulled"


def stem(given: HubName) -> str:
    """The beginning of the names of a model's files in the folder. A repository has no "--" in its name."""
    return "--".join([*given.repository.split("/"), *([given.tag] if given.tag else [])])


def changed_at() -> int:
    """A number that is another one once a model was pulled or removed; 0: there is no folder yet."""
    try:
        return pulled_root().stat().st_mtime_ns
    except OSError:
        return 0


def pulled_models() -> list[PulledModel]:
    """All complete models, by name."""
    records = (read_record(path) for path in sorted(pulled_root().glob("*.json")))
    return [record for record in records if record is not None]


def read_record(path: Path) -> PulledModel | None:
    """The record of a model in a file; None if it is none of ours, or damaged, which the log says."""
    try:
        with path.open("rb") as file:
            record = msgspec.json.decode(file.read(MAX_RECORD_BYTES), type=PulledModel)
        is_ours = hub_name(record.name) == record.given and f"{stem(record.given)}.json" == path.name
        if not is_ours or not all(
            is_safe(name) for name in [record.content, *(file.name for file in record.files)]
        ):
            raise ValueError("it names another model, or files outside")
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        logger.warning("ignored %s: %s", path, error)
        return None
    return record


def find(given: HubName) -> PulledModel | None:
    """The complete model that a name means; None: it was not pulled."""
    return among(pulled_models(), given)


def among(models: Iterable[PulledModel], given: HubName) -> PulledModel | None:
    """Which of some models a name means; without a quantisation, the one that is taken by default."""
    there = [model for model in models if model.repository == given.repository]
    index = position([model.tag for model in there], given.tag) if there else None
    return None if index is None else there[index]


def folder_of(model: PulledModel) -> Path:
    """The folder of a model's files."""
    return pulled_root() / stem(model.given) / model.content


def weights_path(model: PulledModel) -> Path:
    """Its GGUF file, the first of a split one, or its folder."""
    folder = folder_of(model)
    return folder / model.files[0].name if model.tag and is_gguf(model.files[0].name) else folder


def write_record(model: PulledModel) -> None:
    """Make a model complete: its files are there."""
    path = pulled_root() / f"{stem(model.given)}.json"
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(model))
    part.replace(path)


def remove(given: HubName) -> str:
    """Remove a model that was pulled, or what there is of one; return its name.

    Raises:
        ModelNotFoundError: nothing of that name was pulled. BlockingIOError: it is being pulled.
    """
    if (model := find(given)) is not None:
        given = model.given
    with lock_model(given):
        root, name = pulled_root(), stem(given)
        if model is None and not (root / name).is_dir():
            raise ModelNotFoundError(f"{given} was not pulled; only models that were pulled are removed")
        (root / f"{name}.json").unlink(missing_ok=True)
        shutil.rmtree(root / name, ignore_errors=True)
    return str(given)


@contextmanager
def lock_model(given: HubName) -> Iterator[None]:
    """Be the only process that changes a model's files.

    Raises:
        BlockingIOError: another one does. OSError: the folder cannot be written.
    """
    root = pulled_root()
    root.mkdir(parents=True, exist_ok=True)
    with (root / f"{stem(given)}.lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"{given} is being pulled or removed; wait until that is done") from None
        yield
