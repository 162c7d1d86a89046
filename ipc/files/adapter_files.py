"""Locates the files of LoRA adapters: a local folder, or a source of models (`hub.py`)."""

from __future__ import annotations

import os
from pathlib import Path

from pagewire.ipc.digest import sha256_of
from pagewire.ipc.errors import ModelNotFoundError
from pagewire.ipc.files.hub import TOKENIZER_FILES, download, is_s3
from pagewire.ipc.wire.lora import ADAPTER_FILES

CONFIG = ADAPTER_FILES[0]
# A pickle is not downloaded: if it must be, the program does so and gives the folder.
DOWNLOADED = [name for name in ADAPTER_FILES if not name.endswith(".bin")]


def adapter_folder(name: str, *, token: str | bool | None = None, cache_dir: str | None = None) -> Path:
    """The absolute path of an adapter's folder; downloaded from the hub if necessary.

    Raises:
        ModelNotFoundError: there is no such folder, or it is no adapter's, and the hub has none of this name.
    """
    path = Path(os.path.expanduser(name))  # noqa: PTH111 - Path.expanduser fails for an unknown user
    is_folder = os.path.isdir(path)  # noqa: PTH112 - Path.is_dir fails for a name that is too long
    if not is_folder:
        is_path = name.startswith(("/", "./", "../", "~")) or name.count("/") > 1
        if not name or (is_path and not is_s3(name)):
            raise ModelNotFoundError(f"no adapter folder {name!r}")
        path = download(name, [*DOWNLOADED, *TOKENIZER_FILES], None, token, cache_dir)
    if not (path / CONFIG).is_file():
        raise ModelNotFoundError(f"{path} holds no {CONFIG}: not the folder of an adapter")
    return path.absolute()


def adapter_version(folder: Path) -> str:
    """The version of an adapter, which changes when a file of it is written or replaced.

    It is a digest of inodes, sizes and times.
    """
    parts = []
    for name in ADAPTER_FILES:
        try:
            info = (folder / name).stat()
        except OSError:
            continue
        parts.append(
            f"{name} {info.st_dev} {info.st_ino} {info.st_size} {info.st_mtime_ns} {info.st_ctime_ns}"
        )
    return sha256_of(["\n".join(parts).encode()]).hex()[:32]
