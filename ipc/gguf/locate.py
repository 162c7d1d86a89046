"""Finds GGUF files by the names that users give models."""

from __future__ import annotations

import glob
from pathlib import Path, PurePosixPath

from pagewire.ipc.errors import ModelNotFoundError
from pagewire.ipc.gguf.file import is_gguf, parts_of

FORMATS = ("auto", "gguf", "dummy")
"""The load formats that a GGUF file can be read with."""


def check_format(name: str, load_format: str) -> None:
    """Raise ValueError if a GGUF file is named together with a load format of other files."""
    if load_format not in FORMATS:
        raise ValueError(f"load_format={load_format!r} reads no GGUF files, but {name} is one; leave it out")


def models_in(folder: Path) -> list[Path]:
    """The first files of the GGUF models in a folder; projectors of pictures ("mmproj") are no models."""
    files = sorted(path for path in folder.iterdir() if is_gguf(path) and path.is_file())
    return sorted({parts_of(path)[0] for path in files if not path.name.startswith("mmproj")})


def model_in(folder: Path, load_format: str) -> Path | None:
    """The GGUF model of a folder, where it is that what `load_format` takes; None if other files are.

    Raises:
        ModelNotFoundError: there are several, or none although the load format is "gguf".
    """
    if load_format not in FORMATS:
        return None
    found = models_in(folder)
    others = (folder / "config.json").is_file() and (
        any(folder.glob("*.safetensors")) or load_format == "dummy"
    )
    if load_format != "gguf" and (others or not found):
        return None
    if len(found) != 1:
        names = ", ".join(path.name for path in found[:10]) or "none"
        raise ModelNotFoundError(f"{folder} does not hold one GGUF model, but {names}; name the file itself")
    return found[0]


def in_repository(name: str) -> tuple[str, str, list[str]] | None:
    """The repository, the file, and patterns of all its parts, of a name `owner/repository/file.gguf`.

    None if the name is of another form.
    """
    owner, _, rest = name.partition("/")
    repository, _, file = rest.partition("/")
    if not (is_gguf(name) and owner.strip("~.") and repository and file) or ".." in PurePosixPath(file).parts:
        return None
    first, *others = parts_of(Path(file))
    return f"{owner}/{repository}", str(first), [glob.escape(str(path)) for path in (first, *others)]
