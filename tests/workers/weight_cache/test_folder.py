"""The folder of packed weights: its size, its locks, whose files it holds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagewire.workers.weight_cache import folder
from pagewire.workers.weight_cache.folder import new_file, open_file, weight_folder


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGEWIRE_CACHE_ROOT", str(tmp_path))
    return tmp_path


def write(key: str, content: bytes = b"content") -> None:
    with new_file(key, len(content)) as to:
        assert to is not None
        to.write(content)


def content(key: str) -> bytes | None:
    descriptor = open_file(key)
    if descriptor is None:
        return None
    with os.fdopen(descriptor, "rb") as opened:
        return opened.read()


def names() -> list[str]:
    return sorted(path.name for path in weight_folder().iterdir())


def test_a_file_is_found_by_its_key() -> None:
    assert content("k") is None
    write("k")
    assert content("k") == b"content" and content("other") is None
    write("k", b"more")
    assert content("k") == b"more" and names() == ["k.weights"]


def test_nothing_is_found_before_it_is_whole() -> None:
    with new_file("k", 1) as to:
        assert to is not None
        to.write(b"part")
        to.flush()
        assert content("k") is None and names() == ["k.part"]
    assert content("k") == b"part"


def test_a_writer_that_fails_leaves_nothing() -> None:
    with pytest.raises(RuntimeError), new_file("k", 1) as to:
        assert to is not None
        to.write(b"part")
        raise RuntimeError
    assert names() == []


def test_of_two_writers_one_writes() -> None:
    with new_file("k", 1) as first, new_file("k", 1) as second:
        assert first is not None and second is None
        first.write(b"first")
    assert content("k") == b"first"


def test_what_a_dead_writer_left_is_removed() -> None:
    write("k")
    (weight_folder() / "dead.part").write_bytes(b"half a file")
    with new_file("other", 1) as to:
        assert to is not None and names() == ["k.weights", "other.part"]


def test_a_dead_writers_file_is_written_anew() -> None:
    write("other")
    (weight_folder() / "k.part").write_bytes(b"longer than what is written now")
    write("k")
    assert content("k") == b"content"


def test_the_least_recently_used_files_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_WEIGHT_CACHE_SPACE", str(300 / folder.GIB))
    for age, key in enumerate(("a", "b", "c")):
        write(key, bytes(100))
        os.utime(weight_folder() / f"{key}.weights", (age, age))
    assert content("a") is not None  # it is used, so it is the newest now
    write("d", bytes(150))
    assert names() == ["a.weights", "d.weights"]


def test_a_file_larger_than_the_cache_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    write("a", bytes(100))
    monkeypatch.setenv("PAGEWIRE_WEIGHT_CACHE_SPACE", str(300 / folder.GIB))
    with new_file("k", 301) as to:
        assert to is None
    assert names() == ["a.weights"]


def test_the_cache_takes_half_of_a_disk_at_most() -> None:
    disk = os.statvfs(weight_folder().parent)
    free = disk.f_bavail * disk.f_frsize
    write("a", b"")
    with new_file("k", free) as to:
        assert to is None


def test_a_file_that_others_can_change_is_removed(caplog: pytest.LogCaptureFixture) -> None:
    write("k")
    (weight_folder() / "k.weights").chmod(0o666)
    assert content("k") is None and names() == []
    assert "other users may write to" in caplog.text


def test_a_file_of_another_user_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    write("k")
    refused = PermissionError("belongs to user 4711")

    def check(info: os.stat_result, kind: int, place: Path) -> None:
        raise refused

    monkeypatch.setattr(folder, "check_owner", check)
    assert content("k") is None and names() == []


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    write("k")
    (tmp_path / "elsewhere").write_bytes(b"elsewhere")
    (weight_folder() / "k.weights").unlink()
    (weight_folder() / "k.weights").symlink_to(tmp_path / "elsewhere")
    assert content("k") is None and names() == []


def test_nothing_is_read_from_a_folder_that_others_can_change(caplog: pytest.LogCaptureFixture) -> None:
    write("k")
    weight_folder().chmod(0o777)
    assert content("k") is None and "other users may write to" in caplog.text
    with pytest.raises(PermissionError), new_file("k", 1):
        pass
