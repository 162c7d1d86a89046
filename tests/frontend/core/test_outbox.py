"""Messages for a core: tenants in turn, each within its window, all else in order, and nothing stays for ever."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque

from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.frontend.core.outbox import Outbox
from pagewire.ipc.wire.window import FENCES, WINDOW_BYTES, WINDOW_REQUESTS, Load


class Core:
    """Takes the messages of an outbox. A test says when it answers the oldest fence."""

    def __init__(self) -> None:
        self.outbox = Outbox(self._fence)
        self.fences: list[int] = []
        self._ids = itertools.count()

    def _fence(self) -> tuple[int, list[bytes | bytearray | memoryview]]:
        call_id = next(self._ids)
        return call_id, [b"fence %d" % call_id]

    def add(self, tenant: str, name: str, num_requests: int = 1, size: int = 0) -> None:
        self.outbox.add(tenant, [name.encode(), bytes(size)], range(num_requests))

    def control(self, name: str) -> None:
        self.outbox.add_control([name.encode()])

    def take(self, most: int = 1 << 30) -> list[str]:
        """What comes, fences left out."""
        came = []
        while len(came) < most and (frames := self.outbox.next()) is not None:
            assert self.outbox.next() is frames, "it changes its mind"
            self.outbox.sent()
            name = bytes(frames[0]).decode()
            if name.startswith("fence "):
                self.fences.append(int(name.split()[1]))
            else:
                came.append(name)
        return came

    def answer(self) -> None:
        self.outbox.passed(self.fences.pop(0))


def test_tenants_take_turns_and_the_rest_keeps_its_place() -> None:
    core = Core()
    for number in range(3):
        core.add("many", f"m{number}")
    core.control("call")
    core.add("one", "o")
    core.add("many", "m3")
    core.control("abort")
    assert len(core.outbox) == 7
    assert core.take() == ["m0", "o", "m1", "m2", "call", "m3", "abort"]
    assert not core.outbox and not core.fences


def test_a_tenant_waits_for_the_core_and_others_do_not_wait_for_it() -> None:
    core = Core()
    for number in range(2 * WINDOW_REQUESTS):
        core.add("many", f"m{number}")
    core.control("after")
    assert core.take() == [f"m{number}" for number in range(WINDOW_REQUESTS)]
    assert len(core.fences) == FENCES
    core.add("one", "o")
    assert core.take() == ["o"] and core.take() == []
    core.answer()
    assert len(core.take()) == WINDOW_REQUESTS // FENCES
    rest: list[str] = []
    while core.fences:
        core.answer()
        rest += core.take()
    assert rest[-1] == "after" and not core.outbox


def test_what_is_larger_than_the_window_goes_alone() -> None:
    core = Core()
    core.add("", "small")
    core.add("", "large", size=3 * WINDOW_BYTES)
    core.add("", "many", num_requests=2 * WINDOW_REQUESTS)
    assert core.take() == ["small"] and len(core.fences) == 1, "a fence comes as early as it is needed"
    core.answer()
    assert core.take() == ["large"]
    core.answer()
    assert core.take() == ["many"]
    core.add("", "last")
    assert core.take() == []
    core.answer()
    assert core.take() == ["last"]


def test_what_is_dropped_is_forgotten() -> None:
    core = Core()
    for number in range(2 * WINDOW_REQUESTS):
        core.add("many", f"m{number}")
    core.take()
    core.outbox.clear()
    assert not core.outbox and core.outbox.next() is None
    core.answer()  # of a core that is lost
    core.add("many", "new")
    assert core.take() == ["new"]


def test_requests_that_are_given_up_are_not_sent() -> None:
    core = Core()
    core.outbox.add("a", [b"both"], [1, 2])
    core.outbox.add("a", [b"one"], [1])
    core.outbox.add("b", [b"two"], [2])
    core.control("abort")
    core.outbox.drop({1})
    assert len(core.outbox) == 3
    core.outbox.drop({2})
    assert core.take() == ["both", "abort"] and not core.outbox
    core.outbox.drop({1, 2})
    assert core.take() == []


def test_it_can_begin_again_after_each_answer() -> None:
    """Requests that no fence is behind yet never fill so much of the window that the next does not fit."""
    core = Core()
    for number in range(10 * WINDOW_REQUESTS):
        core.add("", f"m{number}")
        assert core.take() == [f"m{number}"]
        while core.fences:
            core.answer()


MESSAGE = st.tuples(
    st.sampled_from("abc"),
    st.integers(1, 2 * WINDOW_REQUESTS),
    st.sampled_from((0, 1000, WINDOW_BYTES // 3, 1 << 20)),
)


@settings(deadline=None)  # a machine may be busy
@given(st.lists(st.one_of(MESSAGE, st.sampled_from(("control", "send", "answer"))), max_size=80))
def test_any_order_of_events(events: list[tuple[str, int, int] | str]) -> None:
    core, added, came = Core(), [], []
    for number, event in enumerate(events):
        if isinstance(event, tuple):
            tenant, num_requests, size = event
            core.add(tenant, f"{tenant} {number}", num_requests, size)
            added.append(f"{tenant} {number}")
        elif event == "control":
            core.control(f"control {number}")
            added.append(f"control {number}")
        elif event == "send":
            came += core.take(1)
        elif core.fences:
            core.answer()
        assert len(core.outbox) == len(added) - len(came)
    came += core.take()
    while core.outbox:
        assert core.fences, "what waits is never sent"
        core.answer()
        came += core.take()
    assert Counter(came) == Counter(added)
    place = {name: index for index, name in enumerate(came)}
    for first, second in itertools.combinations(added, 2):
        if second.startswith("control") or first.split()[0] == second.split()[0]:
            assert place[first] < place[second], "overtaken"


@settings(deadline=None)  # a machine may be busy
@given(st.lists(MESSAGE, max_size=40), st.integers(0, 1 << 32))
def test_the_core_never_has_more_than_the_window(messages: list[tuple[str, int, int]], seed: int) -> None:
    """It counts by itself what it has not taken, as `Arrivals` does, and admits all that comes."""
    core, loads, rng = Core(), {tenant: Load() for tenant in "abc"}, random.Random(seed)
    arrived: deque[tuple[Load, int, int] | None] = deque()  # None: a fence
    waiting = list(enumerate(messages))
    while waiting or arrived or core.outbox:
        if waiting and rng.random() < 0.4:
            number, (tenant, num_requests, size) = waiting.pop(0)
            core.add(tenant, f"{tenant} {number}", num_requests, size)
        elif rng.random() < 0.5 or not arrived:
            num_fences = len(core.fences)
            for name in core.take(1):
                tenant, num_requests, size = messages[int(name.split()[1])]
                assert loads[tenant].admits(num_requests, size), "it would detach us"
                loads[tenant].add(num_requests, size)
                arrived.append((loads[tenant], num_requests, size))
            arrived.extend([None] * (len(core.fences) - num_fences))
            assert arrived or waiting or not core.outbox, "what waits is never sent"
        elif (taken := arrived.popleft()) is None:
            core.answer()
        else:
            load, num_requests, size = taken
            load.add(-num_requests, -size)
