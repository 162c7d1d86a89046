"""The short name of a model: what clients call one that was given no name."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from pagewire.ipc.files.hub import EMBEDDED, is_s3
from pagewire.ipc.files.hub_names import hub_name
from pagewire.ipc.gguf.file import SPLIT, is_gguf

SNAPSHOTS = "snapshots"  # of the hub's cache: models--owner--repository/snapshots/commit


def short_name(model: str) -> str:
    """The name of a model's folder or of its GGUF file, without the ending; of the hub's models: owner/repository.

    model: as a user gives it (see `hub.model_folder`); one with a quantisation, hf:owner/repository:Q4_K_M, is
    its own name. Of a split file the number of the part is left out.
    """
    if model in EMBEDDED:
        return model
    if (given := hub_name(model)) is not None:
        return str(given)
    if is_gguf(model):
        name = PurePosixPath(model).name
        split = SPLIT.fullmatch(name)
        return split.group(1) if split is not None else name.removesuffix(".gguf") or model
    path = os.path.expanduser(model)  # noqa: PTH111 - Path.expanduser fails for an unknown user
    if os.path.isdir(path):  # noqa: PTH112 - Path.is_dir fails for a name that is too long
        return of_folder(Path(path).resolve()) or model
    return PurePosixPath(model).name if is_s3(model) else model


def of_folder(folder: Path) -> str:
    """The name of a folder; in the hub's cache the name of the repository, for the folder's own is a commit."""
    repository = folder.parent.parent.name
    if folder.parent.name == SNAPSHOTS and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1)
    return folder.name
