"""The core's side of blocks that come from other cores: who is asked, how much is on its way, and what ends it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.engine_core.tiers import peer_tier, reads
from pagewire.engine_core.tiers.peer_link import PeerEvent
from pagewire.engine_core.tiers.peer_tier import ASK_SECONDS, PeerTier
from pagewire.ipc.wire.tier_messages import BlocksMoved, TierReport
from tests.engine_core.tiers.simulated import Workers
from tests.engine_core.tiers.test_peer_reads import moved
from tests.engine_core.tiers.test_reads import A

IDENTITY = b"i" * 32


class Links:
    """Other cores that answer when a test says so."""

    def __init__(self) -> None:
        self.reachable = frozenset({0, 1})
        self.finds: list[tuple[int, int]] = []  # core and number
        self.fetches: list[tuple[int, int, int]] = []  # core, number, and how many names
        self.events: list[PeerEvent] = []

    def find(self, peer: int, number: int, first: int, identity: bytes, names: bytes) -> None:
        assert (first, identity) == (0, IDENTITY)
        self.finds.append((peer, number))

    def fetch(self, peer: int, number: int, identity: bytes, names: bytes) -> None:
        self.fetches.append((peer, number, len(names) // 32))

    def take(self) -> list[PeerEvent]:
        events, self.events = self.events, []
        return events


class Bench:
    """A core that has lost A, and may ask two others."""

    def __init__(self) -> None:
        self.simulation = moved()
        self.reads, self.scheduler = self.simulation.reads, self.simulation.scheduler
        self.links, self.workers = Links(), Workers()
        links: Any = self.links
        workers: Any = self.workers
        self.tier = PeerTier(links, self.reads, self.reads._costs, self.scheduler, workers)

    def turn(self) -> None:
        """A turn of the loop."""
        self.tier.check_timers(time.monotonic())
        self.tier.advance()
        self.scheduler.plan(1.0)
        self.reads.take_moves(self.scheduler.kv, 1.0)
        self.tier.planned()

    def asks(self) -> Sequence:
        """It asks for A."""
        self.tier.identify(TierReport(identity=IDENTITY))
        self.turn()
        (sequence,) = self.simulation.submit(A)
        self.turn()
        assert sorted(peer for peer, _ in self.links.finds) == [0, 1] and self.waits(sequence)
        return sequence

    def waits(self, sequence: Sequence) -> bool:
        return sequence in self.scheduler.sequences._held

    def found(self, peer: int) -> None:
        """A core has all of A."""
        self.links.events.append(PeerEvent(self.links.finds[0][1], peer, 0, b"\1" * 4))
        self.turn()

    def fetched(self, content: bytes) -> None:
        """What comes of the last fetch."""
        peer, number, _ = self.links.fetches[-1]
        self.links.events.append(PeerEvent(number, peer, None, content, 0.001))
        self.turn()

    def taken(self, num_missing: int = 0) -> None:
        """The workers have taken what they were sent last."""
        message = self.workers.sent[-1]
        answer = BlocksMoved(message.number, [block.name for block in message.back][:num_missing])
        self.tier.moved(answer)
        for sequence in self.reads.finish(answer, self.scheduler.kv):
            self.scheduler.sequences.release(sequence)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_nothing_is_asked_before_the_model_is_known(bench: Bench) -> None:
    bench.turn()
    (sequence,) = bench.simulation.submit(A)
    bench.turn()
    assert not bench.links.finds and not bench.waits(sequence)


def test_a_prefix_comes_from_the_core_that_answers_first(bench: Bench) -> None:
    sequence = bench.asks()
    bench.found(1)
    assert [(peer, names) for peer, _, names in bench.links.fetches] == [(1, 4)]
    bench.fetched(b"entries")
    assert bytes(bench.workers.sent[0].entries.data) == b"entries" and len(bench.workers.sent[0].back) == 4
    bench.taken()
    bench.turn()
    assert sequence.num_cached_tokens == 16 and bench.reads.num_peer_hits == 4
    assert bench.tier.fetch_seconds > 0


def test_a_core_that_does_not_answer_in_time_is_not_asked_until_it_does(bench: Bench) -> None:
    sequence = bench.asks()
    assert 0 < bench.tier.wait(time.monotonic()) <= ASK_SECONDS
    bench.links.events.append(PeerEvent(bench.links.finds[0][1], 0, 0, b""))
    bench.tier.advance()
    bench.tier.check_timers(time.monotonic() + ASK_SECONDS)
    bench.turn()
    assert not bench.waits(sequence) and bench.tier.num_expired == 1
    assert set(bench.reads.peers.reachable) == {0}
    bench.links.events.append(PeerEvent(bench.links.finds[0][1], 1, 0, b""))
    bench.turn()
    assert set(bench.reads.peers.reachable) == {0, 1}


@pytest.mark.parametrize("content", [b"", b"damaged"])
def test_a_core_that_gives_nothing_is_left_alone(bench: Bench, content: bytes) -> None:
    sequence = bench.asks()
    bench.found(0)
    bench.fetched(content)
    if content:
        bench.taken(num_missing=4)
        bench.turn()
    assert sequence.num_cached_tokens == 0
    assert set(bench.reads.peers.reachable) == {1}


def test_few_parts_are_on_their_way(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "PART_BYTES", 1)
    monkeypatch.setattr(peer_tier, "WINDOW_BYTES", 2)
    monkeypatch.setattr(peer_tier, "MAX_PARTS", 2)
    sequence = bench.asks()
    bench.found(0)
    assert len(bench.links.fetches) == 2
    bench.fetched(b"entries")
    assert len(bench.links.fetches) == 2, "the workers have not taken it yet"
    bench.taken()
    assert len(bench.links.fetches) == 3
    monkeypatch.setattr(peer_tier, "WINDOW_BYTES", 100)
    bench.turn()
    assert len(bench.links.fetches) == 3, "of one core there are two"
    assert bench.waits(sequence)


def test_lost_workers_end_all_and_what_comes_late_is_nothing(bench: Bench) -> None:
    sequence = bench.asks()
    bench.found(0)
    for waiting in bench.reads.lose(bench.scheduler.kv):
        bench.scheduler.sequences.release(waiting)
    bench.tier.worker_lost("killed", was_ready=True)
    bench.fetched(b"entries")
    assert not bench.workers.sent and not bench.waits(sequence)
    assert not bench.reads.peers.reachable, "the new workers have not said what they run"
