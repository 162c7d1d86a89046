"""Files with weights. The core opens each once, and workers read what it holds open: no path leads elsewhere then.

So a file may be renamed or removed while it is in use. One that is written to is noticed (`state_of`).
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from pagewire.ipc.files.safetensors import LENGTH_BYTES, parse_header
from pagewire.ipc.files.weight_files import FLOAT_BYTES, state_of
from pagewire.ipc.quoting import quoted
from pagewire.ipc.shapes import num_values
from pagewire.ipc.wire.items import TensorForm, WeightFile

SUFFIX = ".safetensors"
MAX_FILES = 1 << 10  # of one update: each takes a descriptor
MAX_HEADER_BYTES = 4 << 20  # of a file: 40,000 tensors, which take half a second to read
LORA = "; a LoRA adapter is read by add_lora"


class OpenWeights:
    """Files with the tensors of one update, until `close`.

    descriptors: of the files; they are closed if the files cannot be used.

    Raises:
        ValueError: a file is no safetensors file, holds a tensor twice, or none.

    Attributes:
        files: as workers are to read them. tensors: of all files, by name.
    """

    def __init__(self, descriptors: Iterable[int]) -> None:
        self._descriptors = list(descriptors)
        own = f"/proc/{os.getpid()}/fd"
        self.files = [WeightFile(f"{own}/{number}", state_of(number)) for number in self._descriptors]
        self.tensors: dict[str, TensorForm] = {}
        try:
            for descriptor in self._descriptors:
                for tensor in read_header(descriptor):
                    if tensor.name in self.tensors:
                        raise ValueError(f"{quoted(tensor.name)} is there twice")
                    self.tensors[tensor.name] = tensor
            if not self.tensors:
                raise ValueError("there are no tensors")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the files, which no worker will read again."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()


def open_below(folder: str | None, path: str) -> list[int]:
    """Descriptors of a safetensors file below a folder, or of all that lie in a folder there. No link is followed.

    path: absolute, or beginning at `folder`, which is None if no file may be read.

    Raises:
        PermissionError: it does not lie below the folder, or is a link.
        ValueError: there is no such file, or it is neither a file nor a folder with some.
    """
    if folder is None:
        raise PermissionError(
            "update_weights reads no files: start the core with --weights-dir FOLDER, and it reads those below; or "
            "send the tensors"
        )
    with ExitStack() as stack:
        parts = parts_below(folder, path)
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for name in (".", *parts):
            stack.callback(os.close, place)
            place = open_within(place, name, path)
        if stat.S_ISREG(os.fstat(place).st_mode):
            return [place]
        stack.callback(os.close, place)
        names = sorted(entry.name for entry in os.scandir(place) if entry.name.endswith(SUFFIX))
        if not 0 < len(names) <= MAX_FILES:
            raise ValueError(f"{quoted(path)} must hold 1 to {MAX_FILES} files *{SUFFIX}, not {len(names)}")
        with ExitStack() as opened:
            descriptors = []
            for name in names:
                descriptors.append(open_within(place, name, path))
                opened.callback(os.close, descriptors[-1])
                if not stat.S_ISREG(os.fstat(descriptors[-1]).st_mode):
                    raise ValueError(f"{quoted(name)} in {quoted(path)} is no file")
            opened.pop_all()
        return descriptors


def parts_below(folder: str, path: str) -> tuple[str, ...]:
    """The parts of a path after those of a folder.

    Raises:
        PermissionError: it leads out of the folder.
    """
    parts = Path(path)
    if parts.is_absolute():
        root = next(
            (root for root in (Path(folder), Path(folder).resolve()) if parts.is_relative_to(root)), None
        )
        parts = Path("..") if root is None else parts.relative_to(root)
    if ".." in parts.parts:
        raise PermissionError(f"{quoted(path)} is not below {folder}, the core's --weights-dir")
    return parts.parts


def open_within(place: int, name: str, path: str) -> int:
    """A descriptor of what a folder has under a name. place: of the folder. path: for errors.

    Raises:
        PermissionError: it is a link. ValueError: it cannot be opened, or is neither a file nor a folder.
    """
    try:
        # O_NONBLOCK: to open a pipe would else wait for its writer.
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=place)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise PermissionError(
                f"{quoted(name)} in {quoted(path)} is a link, and none is followed"
            ) from None
        raise ValueError(f"{quoted(path)} cannot be opened: {error.strerror}") from None
    mode = os.fstat(opened).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        os.close(opened)
        raise ValueError(f"{quoted(path)} is neither a file nor a folder")
    return opened


def read_header(descriptor: int) -> Iterator[TensorForm]:
    """The tensors of a safetensors file.

    Raises:
        ValueError: it is no such file.
    """
    first = os.pread(descriptor, LENGTH_BYTES, 0)
    size = struct.unpack("<Q", first)[0] if len(first) == LENGTH_BYTES else 0
    if not 0 < size <= MAX_HEADER_BYTES:
        raise ValueError(f"it is no safetensors file, or has a header of over {MAX_HEADER_BYTES} bytes")
    left = os.fstat(descriptor).st_size - LENGTH_BYTES - size
    for name, entry in parse_header(os.pread(descriptor, size, LENGTH_BYTES), left):
        tensor = TensorForm(name, entry.dtype, entry.shape)
        if entry.num_bytes != num_bytes(tensor):
            raise ValueError(f"{quoted(name)} has {entry.num_bytes} bytes, which are not those of its shape")
        yield tensor


def num_bytes(tensor: TensorForm) -> int:
    """The bytes of a tensor.

    Raises:
        ValueError: it is not of a dtype that weights may have, or its shape is none.
    """
    if (size := FLOAT_BYTES.get(tensor.dtype)) is None:
        known = ", ".join(FLOAT_BYTES)
        raise ValueError(f"{quoted(tensor.name)} is of dtype {quoted(tensor.dtype)}: weights are of {known}")
    return num_values(tensor.shape) * size


def check_tensors(tensors: Iterable[TensorForm], own: Mapping[str, TensorForm]) -> None:
    """Check that tensors can take the place of a model's own.

    Raises:
        ValueError: the model has none of this name, or one of another shape.
    """
    for tensor in tensors:
        if (mine := own.get(tensor.name)) is None:
            raise ValueError(
                f"the model's checkpoint has no tensor {quoted(tensor.name)}: names are those of its files{LORA}"
            )
        if tensor.shape != mine.shape:
            shapes = f"{quoted(tensor.shape)}, and the model's {quoted(mine.shape)}"
            raise ValueError(f"{quoted(tensor.name)} is of shape {shapes}")
