"""Facts that core and workers share about files with weights that take the place of a model's own."""

from __future__ import annotations

import os
from pathlib import Path

FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a number in each dtype that such weights may have, as safetensors files name them."""


def state_of(file: int | str) -> list[int]:
    """A value that tells a file from any other, and from itself with other content.

    Whoever writes to a file sets its time of modification. To rename or remove it changes nothing here.

    file: a descriptor, or a path whose links are followed.

    Raises:
        OSError: there is no such file.
    """
    info = os.fstat(file) if isinstance(file, int) else Path(file).stat()
    return [info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns]
