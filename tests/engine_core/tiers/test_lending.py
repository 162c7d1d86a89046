"""What a core gives to others that ask for blocks: as much as they read, and one part at a time."""

from __future__ import annotations

from typing import Any

import pytest

from pagewire.engine_core.schedule.kv_cache import KVCache
from pagewire.engine_core.tiers import lending as module
from pagewire.engine_core.tiers.lending import BlockLending
from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.wire.block_names import ROOT
from pagewire.ipc.wire.calls import TICKET_BYTES
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.tier_messages import MAX_PARTS, NOT_IN_MEMORY, BlockOut, LentBlocks
from tests.engine_core.tiers.simulated import Workers

IDENTITY = b"i" * 32
NAMES = [bytes([number]) * 32 for number in range(8)]


class Caller:
    """A connection that has asked for blocks."""

    def __init__(self, identity: bytes = b"one") -> None:
        self.identity = identity
        self.answers: list[bytes] = []

    def reply(self, result: bytes) -> None:
        self.answers.append(result)


class Lender:
    """A core with blocks 0 to 3 in memory, and block 5 on disk."""

    def __init__(self) -> None:
        kv = KVCache(8, 4)
        for block, name in zip(kv.pool.allocate(4), NAMES, strict=False):
            kv.pool.register(block, name, ROOT)
        self.workers, self.attached = Workers(), {b"one", b"two", b"three"}
        workers: Any = self.workers
        self.lending = BlockLending(kv, {NAMES[5]}, workers, self.attached, 10, 0)
        self.lending.identity = IDENTITY

    def fetch(self, caller: Caller, *numbers: int, ticket: bytes = b"", identity: bytes = IDENTITY) -> None:
        self.lending.fetch(caller, identity, b"".join(NAMES[number] for number in numbers), ticket)

    def give(self, data: bytes = b"entries") -> None:
        """The workers have made what they were asked for last."""
        message = self.workers.sent[-1]
        tensor = Tensor("uint8", (len(data),), data)
        self.lending.lent(LentBlocks(message.number, tensor, len(message.lend)))


@pytest.fixture
def lender() -> Lender:
    return Lender()


def test_what_is_there_is_said_to_those_of_the_same_model(lender: Lender) -> None:
    names = b"".join(NAMES)
    assert lender.lending.find(IDENTITY, names) == bytes([1, 1, 1, 1, 0, 1, 0, 0])
    assert lender.lending.find(b"j" * 32, names) == bytes(8) == lender.lending.find(b"", names)
    lender.lending.identity = b""
    assert lender.lending.find(b"", names) == bytes(8), "it does not know its own model yet"
    with pytest.raises(ValueError, match="33 bytes are no names"):
        lender.lending.find(IDENTITY, bytes(33))


def test_a_block_is_given_by_its_whole_name_alone(lender: Lender) -> None:
    """As a tenant's salt is part of it: names that differ in one bit find nothing."""
    for at in range(256):
        name = bytearray(NAMES[1])
        name[at // 8] ^= 1 << at % 8
        assert lender.lending.find(IDENTITY, bytes(name)) == b"\0"


def test_blocks_are_given_from_memory_and_disk(lender: Lender) -> None:
    caller = Caller()
    lender.fetch(caller, 1, 4, 5)
    assert [block.block_id for block in lender.workers.sent[0].lend] == [1, NOT_IN_MEMORY]
    assert lender.workers.sent[0].lend[0] == BlockOut(1, NAMES[1], ROOT)
    assert caller.answers == []
    lender.give()
    assert len(caller.answers[0]) == TICKET_BYTES + len(b"entries") and caller.answers[0].endswith(b"entries")
    assert (lender.lending.num_lent, lender.lending.bytes_lent) == (2, 7)


def test_nothing_is_given_of_another_model_or_of_nothing(lender: Lender) -> None:
    caller = Caller()
    lender.fetch(caller, 1, identity=b"j" * 32)
    assert caller.answers == [b""]
    lender.fetch(caller, 4, 6)
    assert len(caller.answers[1]) == TICKET_BYTES and not lender.workers.sent
    with pytest.raises(ValueError, match="are no names"):
        lender.lending.fetch(caller, IDENTITY, bytes(31), b"")


def test_an_answer_has_a_bounded_size(lender: Lender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_BYTES", 25)
    lender.fetch(Caller(), 0, 1, 2, 3)
    assert len(lender.workers.sent[0].lend) == 2
    monkeypatch.setattr(module, "PART_BYTES", 1)
    lender.give()
    lender.fetch(Caller(b"two"), 0, 1)
    assert len(lender.workers.sent[1].lend) == 1


def test_the_workers_make_one_answer_at_a_time(lender: Lender) -> None:
    one, two = Caller(), Caller(b"two")
    lender.fetch(one, 0)
    lender.fetch(two, 1)
    lender.fetch(one, 2)
    assert len(lender.workers.sent) == 1
    lender.give()
    assert len(lender.workers.sent) == 2 and len(one.answers) == 1 and not two.answers
    lender.give()
    lender.give()
    assert len(one.answers) == 2 and len(two.answers) == 1 and len(lender.workers.sent) == 3


def test_who_does_not_read_gets_no_more(lender: Lender) -> None:
    caller = Caller()
    for number in range(MAX_PARTS):
        lender.fetch(caller, number)
        lender.give()
    tickets = [answer[:TICKET_BYTES] for answer in caller.answers]
    for ticket in (b"", b"guessed!", bytes(TICKET_BYTES)):
        with pytest.raises(EngineBusyError, match=f"{MAX_PARTS} answers with blocks are not read yet"):
            lender.fetch(caller, 2, ticket=ticket)
    lender.fetch(caller, 2, ticket=tickets[0])  # one is read
    with pytest.raises(EngineBusyError):
        lender.fetch(caller, 3, ticket=tickets[0])
    lender.give()
    lender.fetch(caller, 3, ticket=caller.answers[-1][:TICKET_BYTES])
    lender.give()
    assert len(caller.answers) == MAX_PARTS + 2


def test_blocks_go_to_few_others_and_those_that_left_do_not_count(
    lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CALLERS", 2)
    lender.fetch(Caller(b"one"), 0)
    lender.fetch(Caller(b"two"), 0)
    with pytest.raises(EngineBusyError, match="blocks go to 2 other cores"):
        lender.fetch(Caller(b"three"), 0)
    lender.attached.discard(b"one")
    lender.fetch(Caller(b"three"), 0)


def test_lost_workers_end_what_others_wait_for(lender: Lender) -> None:
    one, two = Caller(), Caller(b"two")
    lender.fetch(one, 0)
    lender.fetch(two, 1)
    lender.lending.worker_lost()
    assert len(one.answers[0]) == len(two.answers[0]) == TICKET_BYTES
    lender.give()  # a late answer is nobody's
    assert len(one.answers) == 1
    assert lender.lending.find(IDENTITY, NAMES[0]) == b"\0"
