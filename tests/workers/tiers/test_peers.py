"""Blocks that one worker gives and another takes: as they were, or not at all."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest

from pagewire.ipc.wire.block_names import ROOT
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.tier_messages import (
    NOT_IN_MEMORY,
    BlockBack,
    BlockOut,
    LentBlocks,
    MoveBlocks,
    state_name,
)
from pagewire.workers.tiers.entry import HEADER_BYTES, decoded_entries
from pagewire.workers.weight_cache.key import contents
from tests.workers.tiers.test_mover import NAMES, Bench

IDENTITY = bytes(range(32))
STATE = state_name(NAMES[3])
LENT = [
    BlockOut(2, NAMES[2], NAMES[1]),
    BlockOut(NOT_IN_MEMORY, NAMES[0], ROOT),  # on disk
    BlockOut(NOT_IN_MEMORY, NAMES[7], ROOT),  # was there
    BlockOut(3, STATE, ROOT, True),
]
TAKEN = [BlockBack(5, NAMES[2]), BlockBack(6, NAMES[0]), BlockBack(7, NAMES[7]), BlockBack(1, STATE, True)]


def lent(bench: Bench, blocks: list[BlockOut]) -> LentBlocks:
    """What a worker gives of these blocks."""
    bench.tier.move(MoveBlocks(99, lend=blocks))
    while True:
        assert bench.told.wait(60)
        bench.told.clear()
        for report in bench.tier.take_reports():
            bench.last = report
            if report.lent:
                return report.lent[0]


def identified(path: Path, identity: bytes = IDENTITY) -> Bench:
    bench = Bench(path)
    bench.tier._mover.identify(identity)
    return bench


def taken(bench: Bench, number: int, entries: bytes, blocks: list[BlockBack]) -> list[bytes]:
    """The names that are missing after a worker has taken what another core has sent."""
    tensor = Tensor("uint8", (len(entries),), entries)
    bench.tier.move(MoveBlocks(number, back=blocks, entries=tensor))
    while number not in bench.moved:
        assert bench.told.wait(60)
        bench.told.clear()
        bench.hear()
    return bench.moved[number].missing


def test_blocks_go_from_one_worker_to_another(tmp_path: Path) -> None:
    one, other = identified(tmp_path / "one"), identified(tmp_path / "other")
    one.move(1, [0])
    before = [tensor.clone() for tensor in [*one.memory, *one.states]]
    given = lent(one, LENT)
    assert given.num_blocks == 3 and one.last.identity == IDENTITY
    for tensor in [*other.memory, *other.states]:
        tensor.zero_()
    assert taken(other, 1, bytes(given.entries.data), TAKEN) == [NAMES[7]]
    caches, num = other.memory, len(other.memory)
    for tensor, old in zip(caches, before[:num], strict=True):
        assert (tensor[5] == old[2]).all() and (tensor[6] == old[0]).all() and not tensor[7].any()
    for tensor, old in zip(other.states, before[num:], strict=True):
        assert (tensor[1] == old[3]).all()
    assert (other.last.num_fetched, other.last.num_damaged) == (3, 0)
    assert other.last.bytes_fetched == len(given.entries.data) - 3 * HEADER_BYTES
    assert not other.names, "what was fetched is not on disk"


def test_what_is_lent_is_what_was_there(tmp_path: Path) -> None:
    """A step behind the message overwrites the block."""
    one = identified(tmp_path / "one")
    other = identified(tmp_path / "other")
    before = [tensor[2].clone() for tensor in one.memory]
    one.tier.move(MoveBlocks(99, lend=LENT[:1]))
    for tensor in one.memory:
        tensor.zero_()
    while not (reports := [report for report in one.tier.take_reports() if report.lent]):
        assert one.told.wait(60)
        one.told.clear()
    assert taken(other, 1, bytes(reports[0].lent[0].entries.data), TAKEN[:1]) == []
    for tensor, old in zip(other.memory, before, strict=True):
        assert (tensor[5] == old).all()


def test_every_wrong_byte_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of each field of the headers, and in the content; what is whole before it is taken."""
    one, other = identified(tmp_path / "one"), identified(tmp_path / "other")
    blocks = [BlockOut(number, NAMES[number], NAMES[number - 1]) for number in (1, 2)]
    backs = [BlockBack(4, NAMES[1]), BlockBack(5, NAMES[2])]
    entries = bytes(lent(one, blocks).entries.data)
    size = len(entries) // 2
    places = [*range(HEADER_BYTES), *range(HEADER_BYTES, size, 97), size - 1]
    before = [tensor.clone() for tensor in other.memory]
    with caplog.at_level(logging.WARNING, "pagewire.worker"):
        for number, at in enumerate(places, 1):
            damaged = bytearray(entries)
            damaged[at] ^= 1 << at % 8
            missing = taken(other, number, bytes(damaged), backs)
            assert missing == (NAMES[1:3] if at < HEADER_BYTES else NAMES[1:2]), at
        for tensor, old in zip(other.memory, before, strict=True):
            assert (tensor[4] == old[4]).all()
        for cut in (1, HEADER_BYTES - 1, HEADER_BYTES, size - 1):
            assert taken(other, 1000 + cut, entries[:cut], backs) == NAMES[1:3]
            assert taken(other, 9000 + cut, entries[: size + cut], backs) == NAMES[2:3]
    lines = [line for line in caplog.messages if "not as they were sent" in line]
    assert len(lines) == len(places) + 8
    assert other.last.num_damaged > len(places)


def test_what_was_not_asked_for_is_not_taken(tmp_path: Path) -> None:
    one = identified(tmp_path / "one")
    entries = memoryview(bytes(lent(one, LENT[:1]).entries.data))
    size = len(entries) - HEADER_BYTES
    good = {NAMES[2]: size}
    assert decoded_entries(entries, IDENTITY, good) == ({NAMES[2]: entries[HEADER_BYTES:]}, None)
    twice = memoryview(bytes(entries) * 2)
    for data, identity, sizes, problem in (
        (entries, bytes(32), good, "another model"),
        (entries, IDENTITY, {NAMES[1]: size}, "not asked for"),
        (entries, IDENTITY, {NAMES[2]: size - 1}, "not asked for"),
        (twice, IDENTITY, good, "not asked for"),
    ):
        found, why = decoded_entries(data, identity, sizes)
        assert len(found) == (data is twice) and why is not None and problem in why


def test_a_worker_that_does_not_know_its_model_yet_takes_nothing(tmp_path: Path) -> None:
    one, other = identified(tmp_path / "one"), Bench(tmp_path / "other")
    entries = bytes(lent(one, LENT[:1]).entries.data)
    assert taken(other, 1, entries, TAKEN[:1]) == [NAMES[2]]


def test_a_copied_file_is_the_same_one(tmp_path: Path) -> None:
    file, copy = tmp_path / "a" / "model", tmp_path / "b" / "model"
    for path in (file, copy):
        path.parent.mkdir()
    file.write_bytes(os.urandom(3 << 20))
    shutil.copy(file, copy)
    assert contents(file) == contents(copy)
    with copy.open("r+b") as changed:
        changed.seek(1234567)
        byte = changed.read(1)
        changed.seek(1234567)
        changed.write(bytes([byte[0] ^ 1]))
    assert contents(file) != contents(copy)
