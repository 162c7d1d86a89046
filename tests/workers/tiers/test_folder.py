"""Blocks on disk: whatever happens to the files, a block is what was written, or it is not there."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from random import Random

import pytest

from pagewire.workers.tiers.entry import HEADER_BYTES, EntryHeader
from pagewire.workers.tiers.folder import TierFolder
from pagewire.workers.tiers.segment import INDEX, SEGMENT

SIZE = 90
ENTRY = SIZE + 2 * HEADER_BYTES
IDENTITY, OTHER = bytes([1]) * 32, bytes([2]) * 32
MANY = 1 << 30


def content(number: int) -> bytes:
    return Random(number).randbytes(SIZE)


def name(number: int) -> bytes:
    return Random(number).randbytes(32)


def open_folder(path: Path, identity: bytes = IDENTITY, quota: int = MANY, size: int = SIZE) -> TierFolder:
    return TierFolder(path, identity, quota, size)


def fill(folder: TierFolder, numbers: range) -> None:
    for number in numbers:
        data = content(number)
        assert folder.write(name(number), name(number - 1), [data[:7], data[7:]])


def check(folder: TierFolder, numbers: range) -> int:
    """Every block is right or missing; returns how many are there."""
    found = 0
    for number in numbers:
        data = folder.read(name(number))
        assert data is None or data == content(number)
        found += data is not None
    return found


def files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.suffix in (SEGMENT, INDEX))


def test_blocks_come_back(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "tier")
    fill(folder, range(20))
    assert check(folder, range(20)) == 20 and folder.read(name(99)) is None
    came, went = folder.take_changes()
    assert came == [name(number) for number in range(20)] and went == []
    folder.close()
    again = open_folder(tmp_path / "tier")
    assert check(again, range(20)) == 20 and len(again) == 20
    assert again.counts.read == 20 and again.counts.bytes_read == 20 * SIZE and not again.counts.unreadable


def test_headers_say_what_was_written(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    fill(folder, range(3))
    header = folder.places[name(2)].header
    assert (header.identity, header.name, header.parent, header.size) == (IDENTITY, name(2), name(1), SIZE)
    assert EntryHeader.decode(header.encode()) == header


def test_a_block_is_written_once(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    fill(folder, range(2))
    fill(folder, range(2))
    assert folder.counts.written == 2 and files(tmp_path)[-1].stat().st_size == 2 * (SIZE + HEADER_BYTES)


def test_only_this_user_can_read(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "tier")
    fill(folder, range(1))
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "tier").rglob("*") if path.is_file()}
    assert modes == {0o600}
    assert stat.S_IMODE((tmp_path / "tier").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "tier" / IDENTITY.hex()).stat().st_mode) == 0o700


def test_a_folder_that_others_may_change_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match="other users may write"):
        open_folder(tmp_path)


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside = open_folder(tmp_path / "outside")
    fill(outside, range(3))
    outside.close()
    tier = tmp_path / "tier"
    tier.mkdir(0o700)
    (tier / IDENTITY.hex()).symlink_to(tmp_path / "outside" / IDENTITY.hex())
    with pytest.raises(OSError, match=IDENTITY.hex()):
        open_folder(tier)
    (tier / IDENTITY.hex()).unlink()
    open_folder(tier).close()
    for file in files(tmp_path / "outside"):
        (tier / IDENTITY.hex() / file.name).symlink_to(file)
    assert len(open_folder(tier)) == 0


def test_other_models_are_never_found(tmp_path: Path) -> None:
    one = open_folder(tmp_path)
    fill(one, range(5))
    one.close()
    assert check(open_folder(tmp_path, OTHER), range(5)) == 0
    # Not even where their files come into each other's folder, or with blocks of another size.
    (tmp_path / OTHER.hex()).rmdir()
    (tmp_path / IDENTITY.hex()).rename(tmp_path / OTHER.hex())
    assert check(open_folder(tmp_path, OTHER), range(5)) == 0
    (tmp_path / OTHER.hex()).rename(tmp_path / IDENTITY.hex())
    assert check(open_folder(tmp_path, size=SIZE + 1), range(5)) == 0
    assert check(open_folder(tmp_path), range(5)) == 5


def test_the_index_is_made_again(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    fill(folder, range(10))
    folder.close()
    index = next(file for file in files(tmp_path) if file.suffix == INDEX)
    whole = index.read_bytes()
    for length in (0, 1, HEADER_BYTES, HEADER_BYTES * 7 + 5, len(whole)):
        index.write_bytes(whole[:length])
        assert check(open_folder(tmp_path), range(10)) == 10
    index.unlink()
    assert check(open_folder(tmp_path), range(10)) == 10


@pytest.mark.parametrize("ending", [SEGMENT, INDEX, "both"])
def test_cut_off_anywhere(tmp_path: Path, ending: str) -> None:
    """A kill at any byte: what was whole before is there, what was not is a miss, and more can be written."""
    folder = open_folder(tmp_path)
    fill(folder, range(6))
    folder.close()
    written = {file: file.read_bytes() for file in files(tmp_path)}
    random = Random(5)
    for _ in range(150):
        for file, whole in written.items():
            cut = random.randrange(len(whole) + 1) if ending in (file.suffix, "both") else len(whole)
            file.write_bytes(whole[:cut])
            if file.suffix == SEGMENT:
                num_whole = cut // (SIZE + HEADER_BYTES)
        again = open_folder(tmp_path)
        assert check(again, range(6)) == num_whole
        fill(again, range(6))
        assert check(again, range(6)) == 6
        again.close()
        third = open_folder(tmp_path)
        assert check(third, range(6)) == 6
        third.close()
        for file in set(files(tmp_path)) - written.keys():
            file.unlink()


@pytest.mark.parametrize("part", ["segment", "index"])
def test_one_wrong_byte_anywhere(tmp_path: Path, part: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each of a thousand bytes, of all fields of headers and of contents: a miss and a log line, and no more."""
    folder = open_folder(tmp_path)
    fill(folder, range(4))
    folder.close()
    file = next(file for file in files(tmp_path) if file.suffix == (SEGMENT if part == "segment" else INDEX))
    whole = bytearray(file.read_bytes())
    assert part == "index" or len(whole) > 1000
    for place in range(len(whole)):
        caplog.clear()
        damaged = whole.copy()
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        again = open_folder(tmp_path)
        found = check(again, range(4))
        assert found == (4 if part == "index" else 3), place
        if part == "segment":
            assert again.counts.unreadable == 1 and caplog.text.count("cannot be read: its") == 1
        again.close()


def test_one_wrong_byte_without_an_index(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    fill(folder, range(3))
    folder.close()
    segment, index = (next(f for f in files(tmp_path) if f.suffix == suffix) for suffix in (SEGMENT, INDEX))
    index.unlink()
    whole = bytearray(segment.read_bytes())
    for place in range(len(whole)):
        damaged = whole.copy()
        damaged[place] ^= 0xFF
        segment.write_bytes(damaged)
        assert check(open_folder(tmp_path), range(3)) < 3


def test_damage_while_it_is_open(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = open_folder(tmp_path)
    fill(folder, range(3))
    folder.take_changes()
    segment = next(file for file in files(tmp_path) if file.suffix == SEGMENT)
    with segment.open("r+b") as file:
        file.seek(SIZE + 2 * HEADER_BYTES + 50)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 4]))
    assert check(folder, range(3)) == 2
    assert folder.take_changes() == ([], [name(1)]) and folder.counts.unreadable == 1
    assert "cannot be read: its content is damaged" in caplog.text
    fill(folder, range(3))  # it is written again, and the second entry counts
    assert check(folder, range(3)) == 3
    folder.close()
    assert check(open_folder(tmp_path), range(3)) == 3


def test_the_segments_that_were_used_least_recently_go(tmp_path: Path) -> None:
    quota = 40 * ENTRY
    folder = open_folder(tmp_path, quota=quota)
    num_seen = 0
    for number in range(0, 200, 4):
        fill(folder, range(number, number + 4))
        for file in files(tmp_path):  # a second apart, as far as the files say
            os.utime(file, ns=(0, file.stat().st_mtime_ns - 10**9))
        folder._used.clear()
        num_seen += check(folder, range(4))  # the first are always in use
        assert sum(file.stat().st_size for file in files(tmp_path)) <= quota
    assert num_seen == 4 * 50
    assert check(folder, range(196, 200)) == 4 and check(folder, range(40, 80)) == 0
    assert 20 <= len(folder) <= 40
    _, went = folder.take_changes()
    assert name(50) in went


def test_a_quota_holds_all_models(tmp_path: Path) -> None:
    quota = 40 * ENTRY
    one = open_folder(tmp_path, quota=quota)
    fill(one, range(40))
    one.close()
    other = open_folder(tmp_path, OTHER, quota=quota)
    fill(other, range(100, 140))
    assert sum(file.stat().st_size for file in files(tmp_path)) <= quota
    assert check(other, range(135, 140)) == 5
    assert check(open_folder(tmp_path, quota=quota), range(40)) == 0


def test_a_quota_that_holds_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="do not hold two blocks"):
        open_folder(tmp_path, quota=2 * ENTRY - 1)
    with pytest.raises(ValueError, match="for each of 8 workers"):
        TierFolder(tmp_path, IDENTITY, 16 * ENTRY - 1, SIZE, 8)


def test_all_workers_of_a_group_write(tmp_path: Path) -> None:
    quota, ranks = 100 * ENTRY, range(16)
    folders = [TierFolder(tmp_path, bytes([rank]) * 32, quota, SIZE, len(ranks)) for rank in ranks]
    for number in range(30):
        for folder in folders:
            fill(folder, range(number, number + 1))
    assert sum(file.stat().st_size for file in files(tmp_path)) <= quota
    assert [check(folder, range(29, 30)) for folder in folders] == [1] * len(ranks)


def test_two_writers_share_a_folder(tmp_path: Path) -> None:
    one, two = open_folder(tmp_path), open_folder(tmp_path)
    fill(one, range(5))
    assert check(two, range(5)) == 0
    two.refresh()
    assert check(two, range(5)) == 5
    fill(two, range(3, 8))
    one.refresh()
    assert check(one, range(8)) == 8 and two.counts.written == 3
    assert len([file for file in files(tmp_path) if file.suffix == SEGMENT]) == 2


def test_what_others_write_is_not_removed(tmp_path: Path) -> None:
    quota = 16 * ENTRY
    one = open_folder(tmp_path, quota=quota)
    fill(one, range(1))
    two = open_folder(tmp_path, OTHER, quota=quota)
    fill(two, range(100, 140))
    assert check(one, range(1)) == 1
    one.close()
    fill(two, range(140, 180))
    again = open_folder(tmp_path, quota=quota)
    assert check(again, range(1)) == 0


def test_what_another_process_removes_is_a_miss(tmp_path: Path) -> None:
    one = open_folder(tmp_path)
    fill(one, range(3))
    one.close()
    two, three = open_folder(tmp_path), open_folder(tmp_path)
    three.clear()
    assert len(three) == 0 and not files(tmp_path)
    two.take_changes()
    assert check(two, range(3)) == 0
    two.refresh()
    assert sorted(two.take_changes()[1]) == sorted(map(name, range(3)))
    fill(two, range(3))
    assert check(two, range(3)) == 3


def test_a_full_disk_costs_the_block_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = open_folder(tmp_path)
    fill(folder, range(2))
    writev = os.writev

    def full(file: int, pieces: list[memoryview]) -> int:
        if len(pieces) > 1:
            return writev(file, [pieces[0][:50]])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    data = content(2)
    with pytest.raises(OSError, match="No space"):
        folder.write(name(2), name(1), [data])
    monkeypatch.undo()
    assert check(folder, range(3)) == 2
    fill(folder, range(2, 5))
    assert check(folder, range(5)) == 5
    folder.close()
    assert check(open_folder(tmp_path), range(5)) == 5
