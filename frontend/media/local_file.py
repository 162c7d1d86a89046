"""Reading of files that `file:` URLs name, below one folder only."""

from __future__ import annotations

import os
import stat
from contextlib import ExitStack
from pathlib import Path

from pagewire.frontend.media.keys import MediaError

# One text for all reasons: a client does not learn which files exist outside of the folder.
NOT_READABLE = "a file: URL must name a readable file below the server's --allowed-local-media-path"
CHUNK = 1 << 20


def read_local_file(path: str, folder: Path | None, max_bytes: int) -> bytes:
    """The content of a file below a folder.

    Links are resolved first. Then each part of the resolved path is opened within the one before it, and no link is
    followed: a link that is put there meanwhile leads nowhere.

    path: absolute. folder: without links; None: no file may be read.

    Raises:
        MediaError: it is not below the folder, no regular file, not readable or too large.
    """
    if folder is None:
        raise MediaError(
            "file: URLs are not allowed: the server has no --allowed-local-media-path; send the "
            "content as a data: URL"
        )
    try:
        parts = Path(path).resolve(strict=True).relative_to(folder).parts
        with ExitStack() as stack:
            place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, place)
            for index, name in enumerate(parts):
                # O_NONBLOCK: to open a pipe would else wait for its writer.
                kind = os.O_NONBLOCK if index == len(parts) - 1 else os.O_DIRECTORY
                place = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | kind, dir_fd=place)
                stack.callback(os.close, place)
            return _read(place, max_bytes)
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, MediaError):
            raise
        raise MediaError(NOT_READABLE) from None


def _read(file: int, max_bytes: int) -> bytes:
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise MediaError(NOT_READABLE)
    data = bytearray()
    while chunk := os.read(file, CHUNK):
        data += chunk
        if len(data) > max_bytes:
            raise MediaError(f"a file has more than {max_bytes} bytes")
    return bytes(data)
