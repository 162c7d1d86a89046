"""Which adapters are in the workers' memory, and which sequences may be scheduled: under random operations, and the
rules one by one.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagewire.engine_core.adapters.adapter import Adapter, AdapterLimits
from pagewire.engine_core.adapters.queue import PATIENCE_SECONDS
from pagewire.engine_core.adapters.resident import LOAD_SECONDS, TRIAL_SECONDS
from pagewire.engine_core.adapters.table import AdapterTable
from pagewire.engine_core.schedule.sequence import Sequence, State, sequences
from pagewire.engine_core.tenants.accounts import Account
from pagewire.ipc.errors import AdapterCrashedWorkerError
from pagewire.ipc.suspicion import ADAPTER_RULE
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.lora import AdapterLoaded, AdapterSource, DropAdapter, LoadAdapter
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.requests import Request

LIMITS = AdapterLimits(max_active=2, max_resident=3, max_bytes=1000, vocab_size=50)
VOCABULARY = 50


def source(number: int, name: str = "", version: str = "v1") -> AdapterSource:
    return AdapterSource(name or f"a{number}", number, f"/adapters/{number}", version)


class World:
    """An adapter table, and workers that load every adapter that it sends, with the folder's present content."""

    def __init__(self, limits: AdapterLimits = LIMITS) -> None:
        self.adapters = AdapterTable(limits)
        self.now = 100.0
        self.contents: dict[str, bytes] = {}  # by path, if it is not that of the path
        self.num_bytes = 100
        self.steps_in_flight = False
        self.last_message = 0.0  # of the workers
        self.loading: dict[int, LoadAdapter] = {}
        self.memory: dict[int, bytes] = {}  # by index
        self.scheduled: dict[Sequence, None] = {}
        self.waiting: dict[Sequence, None] = {}
        self.errors: dict[Sequence, str] = {}
        self._keys = count()

    def submit(self, wanted: AdapterSource, n: int = 1, prompt: list[int] | None = None) -> list[Sequence]:
        task: Any = SamplingParams(n=n)
        request = Request(next(self._keys), "r", Prompt(prompt or [1, 2]), task, seed=0, adapter=wanted)
        group = sequences(
            request,
            b"c",
            request.key * 10,
            self.now,
            max_model_len=10,
            share_prefixes=True,
            tenant=Account(b"c"),
        )
        adapter = self.adapters.registry.find(wanted, any_path=True)
        for sequence in group:
            sequence.adapter = adapter
            self.adapters.enter(sequence, self.now)
            self.waiting[sequence] = None
        return group

    def obey(self) -> None:
        """Do what the core orders."""
        for command in self.adapters.commands(self.now, idle=not self.steps_in_flight):
            if isinstance(command, DropAdapter):
                assert not any(adapter_of(sequence).index == command.index for sequence in self.scheduled)
                self.memory.pop(command.index, None)
                self.loading.pop(command.index, None)
            else:
                assert command.index not in self.memory and command.index not in self.loading
                self.loading[command.index] = command
        if len(self.adapters.memory.loading) > 1 or self.steps_in_flight:
            assert not any(adapter.suspect for adapter in self.adapters.memory.loading), (
                "it is not read alone"
            )

    def load(self, index: int | None = None, error: str | None = None) -> None:
        """Finish to load an adapter: the first, or this one."""
        order = self.loading.pop(next(iter(self.loading)) if index is None else index)
        self.last_message = self.now
        content = self.contents.get(order.path, order.path.encode())
        if error is None and order.content not in (b"", content):
            error = "replaced"
        if error is None:
            self.memory[order.index] = content
            message = AdapterLoaded(order.index, content, self.num_bytes, 8)
        else:
            message = AdapterLoaded(order.index, error=error, error_type="OSError")
        self.refuse(self.adapters.loaded(message))

    def refuse(self, refused: list[tuple[Sequence, Exception]]) -> None:
        for sequence, problem in refused:
            assert isinstance(problem, (ValueError, TimeoutError, AdapterCrashedWorkerError))
            del self.waiting[sequence]
            self.errors[sequence] = str(problem)
            sequence.state = State.FINISHED
            self.adapters.ended(sequence)

    def admit(self) -> list[Sequence]:
        """The sequences that may be scheduled now; they are."""
        admitted, refused = self.adapters.admit(self.now)
        self.refuse(refused)
        for sequence in admitted:
            del self.waiting[sequence]
            self.scheduled[sequence] = None
            adapter = adapter_of(sequence)
            assert self.memory[adapter.index] == sequence.request.prompt.adapter
        return admitted

    def end(self, sequence: Sequence) -> None:
        """A scheduled sequence ends."""
        del self.scheduled[sequence]
        sequence.state = State.FINISHED
        self.adapters.ended(sequence)

    @property
    def holds_steps(self) -> bool:
        return self.adapters.memory.holds_steps(self.last_message)

    def lose_workers(self) -> None:
        self.memory, self.loading = {}, {}
        self.steps_in_flight = False
        self.refuse(self.adapters.workers_lost(self.now, self.last_message))
        self.adapters.queue.take_back(self.scheduled, self.now)
        self.waiting = self.scheduled | self.waiting
        self.scheduled = {}

    def settle(self) -> list[Sequence]:
        """Load and admit until nothing changes; the sequences that were admitted."""
        admitted: list[Sequence] = []
        self.steps_in_flight = False
        while True:
            self.obey()
            progress = bool(self.loading)
            while self.loading:
                self.load()
            new = self.admit()
            admitted += new
            if not (new or progress):
                return admitted


def adapter_of(sequence: Sequence) -> Adapter:
    assert sequence.adapter is not None
    return sequence.adapter


# ---------------------------------------------------------------- any order of events


class AnyOrder(RuleBasedStateMachine):
    """Submissions, loads, ends, lost workers and calls in any order."""

    @initialize(active=st.integers(1, 3), more=st.integers(0, 2), size=st.sampled_from([100, 400, 900]))
    def begin(self, active: int, more: int, size: int) -> None:
        self.world = World(AdapterLimits(active, active + more, 1000, VOCABULARY))
        self.world.num_bytes = size

    @rule(number=st.integers(1, 5), n=st.integers(1, 2), version=st.sampled_from(["v1", "v2"]))
    def submit(self, number: int, n: int, version: str) -> None:
        self.world.submit(source(number, version=version), n)

    @rule(number=st.integers(1, 5))
    def register(self, number: int) -> None:
        self.world.adapters.register(source(number), self.world.now, lambda error: None)

    @rule(number=st.integers(1, 5))
    def remove(self, number: int) -> None:
        self.world.adapters.remove(number)

    @rule(number=st.integers(1, 5))
    def pin(self, number: int) -> None:
        try:
            self.world.adapters.pin(number, self.world.now, lambda error: None)
        except ValueError:
            pass

    @rule()
    def obey(self) -> None:
        self.world.obey()

    @rule(fails=st.booleans())
    def load(self, fails: bool) -> None:
        if self.world.loading:
            self.world.load(error="broken" if fails else None)

    @rule()
    def admit(self) -> None:
        self.world.obey()
        self.world.admit()

    @rule(which=st.randoms(use_true_random=False))
    def end(self, which: Any) -> None:
        if self.world.scheduled:
            self.world.end(which.choice(list(self.world.scheduled)))

    @rule(which=st.randoms(use_true_random=False))
    def leave(self, which: Any) -> None:
        if self.world.waiting:
            sequence = which.choice(list(self.world.waiting))
            assert self.world.adapters.drop(sequence)
            del self.world.waiting[sequence]
            sequence.state = State.FINISHED
            self.world.adapters.ended(sequence)

    @rule(seconds=st.sampled_from([0.1, 2 * PATIENCE_SECONDS]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds

    @rule(path=st.integers(1, 5))
    def replace(self, path: int) -> None:
        self.world.contents[f"/adapters/{path}"] = f"other {self.world.now}".encode()

    @rule(launches=st.booleans())
    def step(self, launches: bool) -> None:
        self.world.steps_in_flight = launches and not self.world.holds_steps

    @rule()
    def lose_workers(self) -> None:
        self.world.lose_workers()

    @invariant()
    def limits_hold(self) -> None:
        if not hasattr(self, "world"):
            return
        world, adapters = self.world, self.world.adapters
        active = {adapter_of(sequence) for sequence in world.scheduled}
        assert len(active) <= adapters.limits.max_active
        assert all(adapter.resident and adapter.index in world.memory for adapter in active)
        assert len(world.memory) + len(world.loading) <= adapters.limits.max_resident + len(
            adapters.memory._commands
        )
        assert set(adapters.queue) == set(world.waiting)
        assert all(adapter.index for adapter in adapters.memory.resident)
        for adapter in adapters.registry:  # each is settled: nothing is left that no event would take away
            place = adapters.queue.uses(adapter), adapter.residence
            adapters._settle(adapter)
            assert (adapters.queue.uses(adapter), adapter.residence) == place and adapter in adapters.registry

    def teardown(self) -> None:
        """Whatever happened: if the others end, every sequence runs, or ends with an error."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for _ in range(4 * (len(world.waiting) + len(world.scheduled)) + 4):
            world.settle()
            for sequence in list(world.scheduled):
                world.end(sequence)
            world.now += 2 * PATIENCE_SECONDS
        assert not world.waiting and not world.scheduled and not world.holds_steps


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


# ---------------------------------------------------------------- one by one


def test_a_sequence_is_scheduled_once_its_adapter_is_resident() -> None:
    world = World()
    group = world.submit(source(1), n=2)
    assert world.admit() == []
    world.obey()
    assert world.admit() == [] and [order.path for order in world.loading.values()] == ["/adapters/1"]
    world.load()
    assert world.admit() == group and group[0].request.prompt.adapter == b"/adapters/1"
    later = world.submit(source(1, name="another name"))
    assert world.admit() == later and not world.loading  # the same folder is the same adapter


def test_the_least_recently_used_adapter_goes_first_and_none_in_use() -> None:
    world = World()
    (used,) = world.submit(source(1))
    world.settle()
    for number in (2, 3, 2, 4, 5):
        for sequence in [*world.submit(source(number)), *world.settle()][:1]:
            world.end(sequence)
    assert set(world.memory.values()) == {b"/adapters/1", b"/adapters/4", b"/adapters/5"}
    assert used in world.scheduled and world.adapters.memory.num_loads == 5


def test_bytes_bound_what_is_resident() -> None:
    world = World(AdapterLimits(4, 10, 1000, VOCABULARY))
    world.num_bytes = 400
    for number in range(1, 6):
        (sequence,) = world.submit(source(number))
        world.settle()
        world.end(sequence)
    assert world.adapters.memory.num_bytes <= 1000 and len(world.memory) <= 2
    world.num_bytes = 1001
    (large,) = world.submit(source(9))
    world.settle()
    assert "more than all adapters together may take (max_lora_bytes=1,000)" in world.errors[large]
    world.obey()
    assert len(world.memory) <= 2


def test_at_most_max_active_adapters_have_scheduled_sequences_and_none_waits_for_ever() -> None:
    world = World(AdapterLimits(1, 2, 1000, VOCABULARY))
    (first,) = world.submit(source(1))
    world.settle()
    (second,) = world.submit(source(2))
    (third,) = world.submit(source(1))
    assert world.settle() == [third]  # its adapter is active, and the other has not waited for long
    world.now += 2 * PATIENCE_SECONDS
    (fourth,) = world.submit(source(1))
    assert world.settle() == []
    world.end(first)
    world.end(third)
    assert world.settle() == [second]
    world.end(second)
    assert world.settle() == [fourth]


def test_only_the_adapter_that_was_active_longest_makes_room() -> None:
    world = World(AdapterLimits(2, 3, 1000, VOCABULARY))
    (oldest,) = world.submit(source(1))
    world.settle()
    world.submit(source(2))
    world.settle()
    (third,) = world.submit(source(3))
    world.settle()
    world.now += 2 * PATIENCE_SECONDS
    closed, open_ = world.submit(source(1)), world.submit(source(2))
    assert world.settle() == open_
    world.end(oldest)
    assert world.settle() == [third] and set(closed) <= set(world.waiting)


def test_an_error_ends_only_those_who_wait_for_it() -> None:
    world = World()
    (good,), bad = world.submit(source(1)), world.submit(source(2), n=2)
    world.obey()
    world.load()
    world.load(error="no such file")
    assert world.admit() == [good]
    assert all(world.errors[sequence] == "adapter 'a2': no such file" for sequence in bad)
    again = world.submit(source(2))  # and the next request tries again
    assert world.settle() == again


def test_what_is_not_read_in_time_is_waited_for_no_longer() -> None:
    world = World()
    (stuck,) = world.submit(source(1))
    world.obey()
    world.refuse(world.adapters.expire(world.now + LOAD_SECONDS))
    assert stuck in world.waiting
    world.refuse(world.adapters.expire(world.now + LOAD_SECONDS + 1))
    assert world.errors[stuck] == "adapter 'a1' has not been read within 300 s"
    late = AdapterLoaded(next(iter(world.loading)), b"late", 100)
    world.obey()
    assert not world.loading and world.adapters.loaded(late) == [] and not world.adapters.memory.resident


def test_sequences_return_after_a_crash_and_want_the_same_content() -> None:
    world = World()
    (same,), (other,) = world.submit(source(1)), world.submit(source(2))
    world.settle()
    world.contents["/adapters/2"] = b"replaced"
    world.lose_workers()
    (fresh,) = world.submit(source(2, version="v2"))
    assert set(world.settle()) == {same, fresh}
    assert world.errors[other] == "adapter 'a2': replaced"
    assert fresh.request.prompt.adapter == b"replaced"


def test_a_resubmitted_request_wants_the_content_that_it_began_with() -> None:
    world = World()
    (sequence,) = world.submit(source(1))
    sequence.request.prompt.adapter = b"of the core before"
    assert world.settle() == []
    assert "replaced while the request ran" in world.errors[sequence]


def test_tokens_must_be_those_of_the_model_or_of_the_adapter() -> None:
    world = World()
    (sequence,) = world.submit(source(1), prompt=[1, VOCABULARY])
    world.settle()
    assert world.errors[sequence].startswith("the prompt has token id 50, outside the vocabulary of 50")


# ---------------------------------------------------------------- registered adapters


def registered(world: World, wanted: AdapterSource) -> list[Exception | None]:
    """Register an adapter; what becomes known of it."""
    told: list[Exception | None] = []
    world.adapters.register(wanted, world.now, told.append)
    return told


def test_a_registered_adapter_needs_no_path() -> None:
    world = World()
    told = registered(world, source(1))
    assert told == []
    world.settle()
    assert told == [None]
    sequence = world.submit(AdapterSource("a1", 1))
    assert world.settle() == sequence
    with pytest.raises(ValueError, match="no adapter is registered as 'a2'"):
        world.adapters.registry.find(AdapterSource("a2", 2), any_path=True)
    with pytest.raises(PermissionError, match="'a2' is not registered"):
        world.adapters.registry.find(source(2), any_path=False)
    assert world.adapters.registry.find(source(1), any_path=False) is adapter_of(sequence[0])
    with pytest.raises(ValueError, match="the adapter id 1 is that of 'a1'"):
        registered(world, source(1, name="other"))


def test_a_failed_registration_leaves_the_old_one() -> None:
    world = World()
    registered(world, source(1))
    world.settle()
    told = registered(world, AdapterSource("a1", 1, "/elsewhere", "v1"))
    world.obey()
    world.load(error="broken")
    assert [str(error) for error in told] == ["adapter 'a1': broken"]
    assert world.adapters.registry.named["a1"].path == "/adapters/1"


def test_a_replaced_registration_and_a_removed_one_let_their_requests_finish() -> None:
    world = World()
    registered(world, source(1))
    world.settle()
    (old,) = world.submit(AdapterSource("a1", 1))
    world.settle()
    world.contents["/adapters/1"] = b"new"
    registered(world, source(1, version="v2"))
    world.settle()
    (new,) = world.submit(AdapterSource("a1", 1))
    world.settle()
    assert (old.request.prompt.adapter, new.request.prompt.adapter) == (b"/adapters/1", b"new")
    assert world.adapters.remove(1) and not world.adapters.remove(1)
    assert len(world.memory) == 2
    for sequence in (old, new):
        world.end(sequence)
    world.obey()
    assert not world.memory and world.adapters.ids() == []


def test_what_was_removed_while_it_was_read_leaves_memory_when_none_waits_for_it() -> None:
    world = World()
    (sequence,) = world.submit(source(1))
    world.obey()
    assert world.adapters.remove(1)
    assert world.adapters.drop(sequence)
    world.load()
    world.obey()
    assert not world.memory and world.adapters.ids() == []


def test_a_pinned_adapter_stays_and_one_place_is_left_for_others() -> None:
    world = World()
    for number in (1, 2, 3):
        registered(world, source(number))
    world.settle()
    told: list[Exception | None] = []
    world.adapters.pin(1, world.now, told.append)
    world.adapters.pin(2, world.now, told.append)
    assert told == [None, None]
    with pytest.raises(ValueError, match="2 adapters are pinned, and of 3"):
        world.adapters.pin(3, world.now, told.append)
    with pytest.raises(ValueError, match="no adapter has the id 7"):
        world.adapters.pin(7, world.now, told.append)
    for number in (4, 5, 6):
        world.submit(source(number))
        for sequence in world.settle():
            world.end(sequence)
    assert {b"/adapters/1", b"/adapters/2", b"/adapters/6"} == set(world.memory.values())
    world.lose_workers()
    world.settle()
    assert {b"/adapters/1", b"/adapters/2"} <= set(world.memory.values())


def test_an_adapter_that_workers_die_of_is_refused_and_no_other() -> None:
    world = World()
    (running,) = world.submit(source(3))
    world.settle()
    (bad,), (good,) = world.submit(source(1)), world.submit(source(2))
    world.obey()
    world.lose_workers()
    assert not world.errors, "one loss proves nothing"
    world.steps_in_flight = True  # of requests without an adapter
    world.obey()
    assert [order.path for order in world.loading.values()] == ["/adapters/3"], "the next are suspects"
    world.load()
    world.obey()
    assert world.holds_steps and not world.loading
    world.steps_in_flight = False
    world.obey()
    assert world.holds_steps and [order.path for order in world.loading.values()] == ["/adapters/1"]
    world.lose_workers()
    assert world.errors.keys() == {bad} and "2 workers were lost while they read it" in world.errors[bad]
    assert set(world.settle()) == {running, good} and not world.holds_steps

    world.end(good)
    problems: list[Exception | None] = []
    world.adapters.register(source(1), world.now, problems.append)
    (again,) = world.submit(source(1))
    assert world.settle() == [] and again in world.errors
    assert [type(problem) for problem in problems] == [AdapterCrashedWorkerError]
    changed = world.submit(source(1, version="v2"))
    assert world.settle() == changed
    assert world.adapters.remove(1)
    assert (
        world.adapters.registry.find(source(1), any_path=True).refusal == ""
    )  # who removes it wants to try again


def test_a_pinned_adapter_that_workers_die_of_is_not_wanted_by_the_next() -> None:
    world = World()
    problems: list[Exception | None] = []
    world.adapters.preload(source(1), world.now, problems.append)
    world.settle()
    for _ in range(3):
        world.lose_workers()
        world.obey()
    assert problems == [None] and not world.loading
    (named,) = world.submit(AdapterSource("a1", 1))
    assert world.settle() == [] and named in world.errors


def test_steps_do_not_wait_for_a_suspect_on_a_slow_disk() -> None:
    world = World()
    (waiting,) = world.submit(source(1))
    for number in range(1, ADAPTER_RULE.guilty_in_all + 1):
        world.obey()
        world.now += TRIAL_SECONDS
        assert world.holds_steps == (number > 1)
        world.now += 1.0
        world.last_message = world.now  # the answer to a ping
        assert not world.holds_steps
        assert waiting in world.waiting, "workers may have died of a step"
        world.lose_workers()
    assert f"{ADAPTER_RULE.guilty_in_all} workers" in world.errors[waiting]
