"""Threads work for the tenant next that has used least of their time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pagewire.ipc import fair_queue
from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.fair_queue import FairQueue

PATIENCE = 20.0


class Clock:
    """The time that work takes, as a test says."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(fair_queue, "time", clock)
    return clock


def done(queue: FairQueue[str], clock: Clock, number: int, **seconds: float) -> list[str]:
    """Do some work, of which that of each tenant takes these seconds. Its names begin with the tenant's."""
    order = []
    for _ in range(number):
        with queue.turn(bool) as work:
            clock.now += seconds.get(work[0], 1.0)
        order.append(work)
    return order


def test_a_tenant_waits_for_one_piece_of_work_of_each_other(clock: Clock) -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(5):
        queue.put(f"a{number}", "a")
    assert done(queue, clock, 1) == ["a0"]
    queue.put("b0", "b")
    queue.put("b1", "b")
    queue.put("c0", "c")
    assert set(done(queue, clock, 3)) == {"a1", "b0", "c0"}
    assert done(queue, clock, 4) == ["a2", "b1", "a3", "a4"]


def test_who_has_used_less_time_goes_first(clock: Clock) -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(20):
        queue.put(f"a{number}", "a")
        queue.put(f"b{number}", "b")
    order = done(queue, clock, 22, a=10.0, b=1.0)
    assert [work[0] for work in order].count("a") == 2


def test_nobody_saves_time_up(clock: Clock) -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(10):
        queue.put(f"a{number}", "a")
    done(queue, clock, 8)
    for number in range(10):
        queue.put(f"b{number}", "b")
    assert [work[0] for work in done(queue, clock, 4)] in (["a", "b"] * 2, ["b", "a"] * 2)


def test_the_smallest_of_a_tenant_goes_first(clock: Clock) -> None:
    queue: FairQueue[str] = FairQueue()
    for work, size in (("large", 5000), ("small", 40), ("as small", 50)):
        queue.put(work, "a", size)
    assert done(queue, clock, 3) == ["small", "as small", "large"]


def test_what_several_tenants_wait_for_is_done_once_in_the_first_turn(clock: Clock) -> None:
    queue: FairQueue[str] = FairQueue()
    for work in ("a0", "a1", "both", "a2"):
        queue.put(work, "a")
    queue.put("both", "b")
    assert done(queue, clock, 4) == ["a0", "both", "a1", "a2"]
    assert queue.num_before("a") == queue.num_before("b") == 0


def test_removed_or_unwanted_work_is_not_done(clock: Clock) -> None:
    queue: FairQueue[str] = FairQueue()
    for work in ("a0", "", "a1"):
        queue.put(work, "a")
    queue.remove("a0")
    queue.remove("never put")
    assert done(queue, clock, 1) == ["a1"] and queue.num_before("a") == 0


def test_a_full_queue_has_room_for_others(clock: Clock) -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(100):
        queue.put(f"a{number}", "a")
    assert (queue.num_before("a"), queue.num_before("b")) == (100, 0)
    queue.put("b0", "b")
    assert (queue.num_before("a"), queue.num_before("b")) == (101, 2)
    with queue.turn(bool):
        assert queue.num_before("a") == 101, "what is being done counts"


@contextmanager
def working(queue: FairQueue[str]) -> Iterator[list[str]]:
    """The piece of work that a thread takes and holds until the block ends."""
    taken, changed, release = list[str](), threading.Event(), threading.Event()

    def work() -> None:
        with queue.turn(bool) as piece:
            taken.append(piece)
            changed.set()
            assert release.wait(PATIENCE)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert changed.wait(PATIENCE)
        yield taken
    finally:
        release.set()
        thread.join(PATIENCE)


def test_threads_wait_for_work_that_they_may_do() -> None:
    queue: FairQueue[str] = FairQueue(num_per_tenant=1)
    queue.put("a0", "a")
    queue.put("a1", "a")
    with working(queue) as first:
        assert first == ["a0"]
        taken = threading.Event()

        def work() -> None:
            with queue.turn(bool) as piece:
                assert piece == "b0"
                taken.set()

        thread = threading.Thread(target=work)
        thread.start()
        queue.put("b0", "b")
        assert taken.wait(PATIENCE), "it waits for the other tenant's"
        thread.join(PATIENCE)
    with working(queue) as last:
        assert last == ["a1"]


def test_a_frontend_gains_nothing_by_the_number_of_its_tenants(clock: Clock) -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(50):
        queue.put(f"a{number}", f"invented {number}", frontend="a")
    assert done(queue, clock, 1) == ["a0"]
    assert queue.num_before("invented 1", "a") == 49
    for number in range(3):
        queue.put(f"b{number}", "invented 1", frontend="b")
    assert queue.num_before("another", "c") == 0
    assert [work[0] for work in done(queue, clock, 6)].count("b") == 3


def test_the_last_place_is_left_to_a_tenant_that_has_none() -> None:
    queue: FairQueue[str] = FairQueue(num_places=3, num_reserved=1)
    for number in range(3):
        queue.put(f"a{number}", "a")
    with working(queue) as first, working(queue) as second:
        assert first + second == ["a0", "a1"]
        taken = threading.Event()

        def work() -> None:
            with queue.turn(bool) as piece:
                assert piece == "b0"
                taken.set()

        thread = threading.Thread(target=work)
        thread.start()
        queue.put("b0", "b")
        assert taken.wait(PATIENCE), "it waits for the other tenant's"
        thread.join(PATIENCE)
    with working(queue) as last:
        assert last == ["a2"]


def test_threads_wait_for_a_place_in_the_turn_of_their_tenant() -> None:
    queue: FairQueue[object] = FairQueue(num_places=1)
    order, begun = list[str](), threading.Event()

    def work(tenant: str, go: threading.Event) -> None:
        with queue.place(tenant, PATIENCE):
            order.append(tenant)
            begun.set()
            assert go.wait(PATIENCE)

    stop, free = threading.Event(), threading.Event()
    free.set()
    threads = [threading.Thread(target=work, args=("a", stop))]
    threads[0].start()
    assert begun.wait(PATIENCE)
    for number, tenant in enumerate("aab", 1):
        threads.append(threading.Thread(target=work, args=(tenant, free)))
        threads[-1].start()
        while queue.num_before("a") + queue.num_before("b") < number:
            pass
    with pytest.raises(EngineBusyError, match="waited 0 s"), queue.place("c", 0.0):
        pytest.fail("there is no place")
    stop.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert order == ["a", "b", "a", "a"]
    assert queue.num_before("a") == queue.num_before("b") == queue.num_before("c") == 0
