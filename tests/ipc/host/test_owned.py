"""Files and folders that others could change are refused; as root, with real other users."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pagewire.ipc.host import owned
from pagewire.ipc.host.owned import check_folder, is_private_group, open_owned, read_owned, weakness

STRANGER = 65533


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    path.chmod(0o600)
    return path


def test_a_file_of_ones_own_is_read(file: Path) -> None:
    assert read_owned(file, 7) == b"content"
    with pytest.raises(ValueError, match="has over 6 bytes"):
        read_owned(file, 6)


@pytest.mark.parametrize("mode", [0o602, 0o666])
def test_a_file_that_everyone_may_write_to(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(PermissionError, match="every user may write to it; remove it or change its mode"):
        open_owned(file)


def test_a_group_may_write_only_if_it_is_the_users_own(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.chmod(0o660)
    members: list[str] = []
    monkeypatch.setattr(owned.pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name="me"))
    monkeypatch.setattr(owned.grp, "getgrgid", lambda gid: SimpleNamespace(gr_name="me", gr_mem=members))
    assert read_owned(file, 7) == b"content"
    members.append("somebody")
    with pytest.raises(PermissionError, match=r"group \d+ may write to it"):
        open_owned(file)


def test_an_unknown_group_is_not_private() -> None:
    assert not is_private_group(0, 4_000_000_000) and not is_private_group(4_000_000_000, 0)


def info(uid: int, mode: int) -> Any:
    return SimpleNamespace(st_uid=uid, st_gid=uid, st_mode=mode)


def test_owners() -> None:
    """This user and root; to root, nobody else."""
    for uid in (os.geteuid(), 0):
        assert weakness(info(uid, stat.S_IFREG | 0o644)) is None
    assert weakness(info(STRANGER, stat.S_IFREG | 0o600)) == f"it belongs to user {STRANGER}"


def test_links_pipes_folders_and_sockets_are_no_files(tmp_path: Path, file: Path) -> None:
    (tmp_path / "link").symlink_to(file)
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "folder").mkdir()
    for name in ("link", "pipe", "folder"):
        with pytest.raises(PermissionError, match="not a regular file"):
            open_owned(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        open_owned(tmp_path / "none")


def test_a_folder_that_others_may_write_to_is_safe_only_if_it_is_sticky(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    folder.chmod(0o777)
    for path in (folder, tmp_path / "link"):
        with pytest.raises(PermissionError, match="every user may write to it"):
            check_folder(path)
    folder.chmod(0o1777)
    check_folder(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_the_folder_of_another_user(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o1777)
    os.chown(folder, STRANGER, STRANGER)
    with pytest.raises(PermissionError, match=f"it belongs to user {STRANGER}.; use a folder that only you"):
        check_folder(folder)
