"""Files of weights: what is opened, what is refused, and what a file must hold."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from pagewire.engine_core.weights.files import MAX_FILES, OpenWeights, check_tensors, open_below
from pagewire.engine_core.weights.upload import Upload, header_of
from pagewire.ipc.files.weight_files import state_of
from pagewire.ipc.wire.items import TensorForm

FORMS = [TensorForm("a", "F32", [2, 3]), TensorForm("b", "BF16", [5])]
DATA = bytes(range(34))


def write(path: Path, forms: Sequence[TensorForm] = FORMS, data: bytes = DATA) -> Path:
    """A safetensors file with these tensors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header_of(forms)[0] + data)
    return path


def opened(folder: Path | None, path: str | Path) -> OpenWeights:
    return OpenWeights(open_below(None if folder is None else str(folder), str(path)))


def num_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_file_below_the_folder_by_either_path(tmp_path: Path) -> None:
    path = write(tmp_path / "own" / "step 1" / "new.safetensors")
    for given in (path, "step 1/new.safetensors", "./step 1/new.safetensors", "step 1"):
        weights = opened(tmp_path / "own", given)
        assert list(weights.tensors.values()) == FORMS
        (file,) = weights.files
        assert Path(file.path).read_bytes() == path.read_bytes()
        assert state_of(file.path) == file.state == state_of(str(path))
        weights.close()
    (tmp_path / "link").symlink_to(tmp_path / "own")
    opened(tmp_path / "link", path).close()  # the operator may name the folder by a link


def test_a_folder_of_files(tmp_path: Path) -> None:
    write(tmp_path / "new" / "1.safetensors", FORMS[:1], DATA[:24])
    write(tmp_path / "new" / "2.safetensors", FORMS[1:], DATA[24:])
    (tmp_path / "new" / "config.json").write_text("{}")
    weights = opened(tmp_path, "new")
    assert set(weights.tensors) == {"a", "b"} and len(weights.files) == 2
    weights.close()
    write(tmp_path / "new" / "3.safetensors", FORMS[1:], DATA[24:])
    with pytest.raises(ValueError, match="'b' is there twice"):
        opened(tmp_path, "new")


def test_renamed_or_removed_files_stay_readable_and_written_ones_are_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "new.safetensors")
    weights = opened(tmp_path, path)
    (file,) = weights.files
    content = path.read_bytes()
    os.link(path, tmp_path / "other")
    path.rename(tmp_path / "old")
    write(path, data=DATA[::-1])
    (tmp_path / "old").unlink()
    assert Path(file.path).read_bytes() == content and state_of(file.path) == file.state
    os.utime(tmp_path / "other", ns=(0, 0))
    assert state_of(file.path) != file.state
    weights.close()


def test_nothing_outside_and_no_link(tmp_path: Path) -> None:
    own = tmp_path / "own"
    inside, outside = write(own / "new.safetensors"), write(tmp_path / "outside" / "new.safetensors")
    (own / "file.safetensors").symlink_to(outside)
    (own / "inner.safetensors").symlink_to(inside)
    (own / "folder").symlink_to(tmp_path / "outside")
    (own / "links").mkdir()
    (own / "links" / "new.safetensors").symlink_to(outside)
    before = num_descriptors()
    for given in (outside, "../outside/new.safetensors", "folder/../../outside", "/", "/proc/self/fd"):
        with pytest.raises(PermissionError, match="is not below"):
            opened(own, given)
    for given in ("file.safetensors", "inner.safetensors", "folder", "folder/new.safetensors", "links"):
        with pytest.raises(PermissionError, match="is a link, and none is followed"):
            opened(own, given)
    with pytest.raises(PermissionError, match="--weights-dir FOLDER"):
        opened(None, inside)
    assert num_descriptors() == before


def test_what_is_no_file_of_weights(tmp_path: Path) -> None:
    path = tmp_path / "new.safetensors"
    before = num_descriptors()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    (tmp_path / "many").mkdir()
    for number in range(MAX_FILES + 1):
        (tmp_path / "many" / f"{number}.safetensors").touch()
    for given, text in {
        "pipe": "neither a file nor a folder",
        "none": "No such file",
        "new.safetensors/x": "Not a directory",
        "empty": "must hold 1 to",
        "many": "must hold 1 to",
        "": "must hold 1 to",
    }.items():
        write(tmp_path / "x" / "new.safetensors").rename(path)
        if given == "":
            path.unlink()
        with pytest.raises(ValueError, match=text):
            opened(tmp_path, given)

    def header(**entry: object) -> bytes:
        text = msgspec.json.encode({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | entry})
        return struct.pack("<Q", len(text)) + text + bytes(4)

    for content, text in {
        b"": "no safetensors file",
        bytes(8): "no safetensors file",
        struct.pack("<Q", 1 << 40) + b"{": "no safetensors file",
        struct.pack("<Q", 2) + b"{}": "there are no tensors",
        struct.pack("<Q", 2) + b"[]": "its header cannot be read",
        header(dtype="I64"): "'a' is of dtype 'I64': weights are of F32, F16, BF16",
        header(dtype="F16"): "not those of its shape",
        header(shape=[2]): "not those of its shape",
        header(shape=[1 << 62, 1 << 62]): "less than 2",
        header(data_offsets=[0, 8]): "outside of the file",
    }.items():
        path.write_bytes(content)
        with pytest.raises(ValueError, match=text):
            opened(tmp_path, path)
    assert num_descriptors() == before


def test_names_and_shapes_must_be_the_model_s() -> None:
    own = {form.name: form for form in FORMS}
    check_tensors([TensorForm("a", "BF16", [2, 3])], own)
    with pytest.raises(ValueError, match="no tensor 'c'"):
        check_tensors([FORMS[0], TensorForm("c", "F32", [1])], own)
    with pytest.raises(ValueError, match=r"'b' is of shape \[1, 5\], and the model's \[5\]"):
        check_tensors([TensorForm("b", "F32", [1, 5])], own)


def test_an_upload_is_a_file_once_all_has_come() -> None:
    before = num_descriptors()
    upload = Upload(1, b"owner", FORMS)
    assert upload.add(0, DATA[:10]) == 10
    for offset, data in ((0, DATA), (11, b"x"), (10, DATA)):
        with pytest.raises(ValueError, match="upload 1 has 10 of 34 bytes"):
            upload.add(offset, data)
    with pytest.raises(ValueError, match="upload 1 has only 10 of 34 bytes"):
        upload.take()
    assert upload.add(10, DATA[10:]) == 34
    weights = upload.take()
    assert list(weights.tensors.values()) == FORMS
    assert Path(weights.files[0].path).read_bytes().endswith(DATA)
    weights.close()
    Upload(2, b"owner", FORMS).close()
    assert num_descriptors() == before


@pytest.mark.parametrize(
    ("forms", "text"),
    [
        ([], "at least one tensor"),
        ([FORMS[0], FORMS[0]], "'a' is there twice"),
        ([TensorForm("a", "F8_E4M3", [1])], "is of dtype 'F8_E4M3'"),
        ([TensorForm("a", "F32", [-1])], "none negative"),
    ],
)
def test_uploads_that_cannot_begin(forms: list[TensorForm], text: str) -> None:
    before = num_descriptors()
    with pytest.raises(ValueError, match=text):
        Upload(1, b"owner", forms)
    assert num_descriptors() == before
