"""The file of API keys: what it may say, and that nobody else may read or change it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from pagewire.frontend.server.http.key_file import MAX_BYTES, KeyEntry, Rights, parse, read_key_file

DIGEST = hashlib.sha256(b"long enough").digest()


def written(folder: Path, text: str | bytes, mode: int = 0o600) -> str:
    path = folder / "keys"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return str(path)


def test_lines(tmp_path: Path) -> None:
    text = f"# a comment\n\nalice sha256:{DIGEST.hex()} max_requests=2 admin # hers\n bob\tlong-enough priority=3\n"
    alice, bob = read_key_file(written(tmp_path, text))
    assert alice == KeyEntry("alice", DIGEST, Rights(max_requests=2, admin=True))
    assert bob == KeyEntry("bob", hashlib.sha256(b"long-enough").digest(), Rights(priority=3))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("alice", "NAME KEY"),
        ("ali:ce long-enough", "tenant's name"),
        (f"{'a' * 65} long-enough", "tenant's name"),
        ("alice short", "8 characters"),
        ("alice sha256:12", "64 lower-case"),
        (f"alice sha256:{DIGEST.hex().upper()}", "64 lower-case"),
        ("alice long-enough boss", "unknown right 'boss'"),
        ("alice long-enough admin=1", "unknown right 'admin'"),
        ("alice long-enough max_requests=0", "max_requests must be an integer from 1"),
        ("alice long-enough max_tokens=many", "max_tokens must be"),
        ("alice long-enough priority=99999999999", "priority must be"),
        ("alice long-enough priority=1 priority=1", "given twice"),
        ("alice long-enough priority=1 best_priority=2", "is better than best_priority=2"),
    ],
)
def test_malformed_lines_are_named_and_keys_are_not_quoted(line: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"line 2: .*{reason}") as raised:
        list(parse("# first\n" + line))
    assert "long-enough" not in str(raised.value)


def test_a_key_has_one_owner_and_an_owner_one_set_of_rights(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="alice and bob have the same key"):
        read_key_file(written(tmp_path, f"alice sha256:{DIGEST.hex()}\nbob sha256:{DIGEST.hex()}"))
    with pytest.raises(ValueError, match="lines of alice give different rights"):
        read_key_file(written(tmp_path, "alice long-enough\nalice another-one admin"))


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o620, 0o666, 0o601])
def test_a_file_that_others_may_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ValueError, match=f"has mode {mode:o}.*chmod 600"):
        read_key_file(written(tmp_path, "alice long-enough", mode))
    assert read_key_file(written(tmp_path, "alice long-enough", 0o640))


def test_what_is_no_file_of_keys(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not UTF-8"):
        read_key_file(written(tmp_path, b"alice \xff\xff\xff\xff\xff\xff\xff\xff"))
    with pytest.raises(ValueError, match=f"larger than {MAX_BYTES}"):
        read_key_file(written(tmp_path, b"#" * (MAX_BYTES + 1)))
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ValueError, match="not a regular file"):  # and does not wait for a writer
        read_key_file(str(tmp_path / "pipe"))
