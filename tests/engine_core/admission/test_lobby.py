"""What waits in front of the scheduler, and when it leaves."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagewire.engine_core.adapters.adapter import Adapter, AdapterLimits
from pagewire.engine_core.adapters.table import AdapterTable
from pagewire.engine_core.admission.lobby import MAX_REPLAYED, Lobby
from pagewire.engine_core.grammar.matcher import Grammar
from pagewire.engine_core.schedule.attachments import GrammarError
from pagewire.engine_core.schedule.sequence import Sequence, State, sequences
from pagewire.engine_core.tenants.accounts import Account
from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.shares import Name
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.lora import AdapterLoaded, AdapterSource
from pagewire.ipc.wire.params import SamplingParams, StructuredOutputsParams
from pagewire.ipc.wire.pooling import PoolingParams
from pagewire.ipc.wire.requests import Request
from tests.engine_core.schedule.simulation import grammar

REGEX = "[a-e]*"


class Pending:
    """A grammar whose compilation ends when a test says so."""

    outcome: Grammar | Exception | None = None

    def poll(self, now: float) -> Grammar | None:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class Compiler:
    """Hands out `Pending`; one for each regular expression."""

    def __init__(self) -> None:
        self.pending: dict[str, Pending] = {}
        self.full = False

    def submit(self, structure: StructuredOutputsParams, tenant: Name, now: float) -> Pending:
        assert tenant == b"c"
        if self.full:
            raise EngineBusyError("too many grammars")
        return self.pending.setdefault(structure.regex or "", Pending())


class Waiting:
    """A lobby with its compiler, and the seconds that requests waited for grammars."""

    def __init__(self, max_waiting: int = 100) -> None:
        self.compiler, self.compiled = Compiler(), list[float]()
        self.lobby = Lobby(self.compiler, max_waiting, self.compiled.append)
        self.num_added = 0

    def add(
        self, regex: str | None = None, n: int = 1, num_queued: int = 0, optional: bool = False
    ) -> list[Sequence]:
        structure = None if regex is None else StructuredOutputsParams(regex=regex, optional=optional)
        task = SamplingParams(n=n, structured_outputs=structure)
        group = self.group(task)
        self.lobby.add(group, num_queued, 1.0)
        return group

    def group(self, task: SamplingParams | PoolingParams) -> list[Sequence]:
        self.num_added += 1
        request = Request(self.num_added, "r", Prompt([1, 2]), task, seed=0)
        place: Any = (b"c", self.num_added, 1.0)
        return sequences(request, *place, max_model_len=10, share_prefixes=True, tenant=Account(b"c"))

    def ready(self) -> list[Sequence]:
        ready, refusals = self.lobby.ready(3.0)
        assert not refusals
        return ready


def test_what_waits_for_nothing_leaves_at_once_and_in_order() -> None:
    waiting = Waiting()
    first, second = waiting.add(n=2), waiting.add()
    assert waiting.ready() == [*first, *second] and len(waiting.lobby) == 0
    assert waiting.ready() == []


def test_a_pooled_request_has_no_grammar_to_wait_for() -> None:
    waiting = Waiting()
    group = waiting.group(PoolingParams())
    waiting.lobby.add(group, 0, 1.0)
    assert waiting.ready() == group


def test_a_sequence_leaves_with_its_matcher_when_its_grammar_is_compiled() -> None:
    waiting = Waiting()
    group, other = waiting.add(REGEX, n=2), waiting.add()
    assert waiting.ready() == other and waiting.lobby.num_compiling == 2
    waiting.compiler.pending[REGEX].outcome = grammar(REGEX)
    assert waiting.ready() == group and all(sequence.matcher for sequence in group)
    assert group[0].matcher is not group[1].matcher
    assert waiting.compiled == [2.0]  # once for the request


def test_a_sequence_leaves_without_an_optional_grammar_that_is_refused() -> None:
    waiting = Waiting()
    group = waiting.add(REGEX, optional=True)
    waiting.compiler.pending[REGEX].outcome = GrammarError("bad")
    assert waiting.ready() == group and group[0].matcher is None


@pytest.mark.parametrize(
    ("error", "kind"), [(GrammarError("bad"), "ValueError"), (EngineBusyError("slow"), "EngineBusyError")]
)
def test_a_refused_grammar_ends_all_sequences_of_its_request(error: Exception, kind: str) -> None:
    waiting = Waiting()
    group, other = waiting.add(REGEX, n=2), waiting.add()
    waiting.compiler.pending[REGEX].outcome = error
    ready, refusals = waiting.lobby.ready(3.0)
    assert ready == other and [sequence for sequence, _ in refusals] == group
    for sequence, delta in refusals:
        assert sequence.finished
        assert (delta.finish_reason, delta.error, delta.error_type) == ("error", str(error), kind)
    assert len(waiting.lobby) == 0


def test_a_sequence_waits_for_its_grammar_and_then_for_its_adapter() -> None:
    waiting = Waiting()
    adapters = AdapterTable(AdapterLimits(max_active=1, max_resident=2, max_bytes=100, vocab_size=10))
    waiting.lobby = Lobby(waiting.compiler, 100, waiting.compiled.append, adapters)
    source = AdapterSource("a", 1, "/a")
    group = waiting.group(SamplingParams(n=2, structured_outputs=StructuredOutputsParams(regex=REGEX)))
    for sequence in group:
        sequence.adapter = Adapter(source)
    waiting.lobby.add(group, 0, 1.0)
    plain = waiting.add()
    waiting.compiler.pending[REGEX].outcome = grammar(REGEX)
    assert waiting.ready() == plain
    assert waiting.lobby.num_loading == len(waiting.lobby) == 2 and list(waiting.lobby) == group
    (order,) = adapters.commands(3.0)
    assert adapters.loaded(AdapterLoaded(order.index, b"content", 10)) == []
    waiting.lobby.hold()
    assert waiting.ready() == []
    assert waiting.lobby.drop(group[1]) and not waiting.lobby.drop(group[1])
    waiting.lobby.release()
    assert waiting.ready() == group[:1] and group[0].matcher is not None
    assert group[0].request.prompt.adapter == b"content" and len(waiting.lobby) == 0


def test_nothing_leaves_while_it_is_held_but_refusals_do() -> None:
    waiting = Waiting()
    waiting.lobby.hold()
    plain, compiled, refused = waiting.add(), waiting.add(REGEX), waiting.add("[")
    waiting.compiler.pending[REGEX].outcome = grammar(REGEX)
    waiting.compiler.pending["["].outcome = GrammarError("bad")
    ready, refusals = waiting.lobby.ready(3.0)
    assert ready == [] and [sequence for sequence, _ in refusals] == refused
    waiting.lobby.release()
    assert waiting.ready() == [*plain, *compiled]


def test_a_full_lobby_takes_in_nothing() -> None:
    waiting = Waiting(max_waiting=4)
    waiting.add(REGEX, n=2)
    for n, num_queued in ((3, 0), (1, 2)):
        with pytest.raises(EngineBusyError, match="already waiting"):
            waiting.add(n=n, num_queued=num_queued)
    waiting.compiler.full = True
    with pytest.raises(EngineBusyError, match="too many grammars"):
        waiting.add(REGEX)
    assert len(waiting.lobby) == 2


def test_many_sequences_of_one_grammar_leave_a_few_at_a_time() -> None:
    waiting = Waiting(max_waiting=100_000)
    for _ in range(30):
        waiting.add(REGEX, n=64)
    polled = []
    pending = waiting.compiler.pending[REGEX]
    pending.poll = lambda now: polled.append(now)  # type: ignore[method-assign]
    assert waiting.ready() == [] and len(polled) == 1  # one look for all of them
    del pending.poll
    pending.outcome = grammar(REGEX)
    left, calls = 0, 0
    while len(waiting.lobby):
        ready = waiting.ready()
        assert 0 < len(ready) <= MAX_REPLAYED
        left, calls = left + len(ready), calls + 1
        assert waiting.lobby.has_work == (left < 30 * 64)
    assert left == 30 * 64 and calls == -(-left // MAX_REPLAYED)


class LobbyLife(RuleBasedStateMachine):
    """Every sequence is in the lobby, has left it, or has ended; never two of these."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = Waiting(max_waiting=12)
        self.inside: list[Sequence] = []
        self.left: list[Sequence] = []

    @rule(regex=st.sampled_from([None, REGEX, "a", "b"]), n=st.integers(1, 3))
    def add(self, regex: str | None, n: int) -> None:
        try:
            self.inside += self.waiting.add(regex, n)
        except EngineBusyError:
            assert len(self.inside) + n > 12

    @rule(regex=st.sampled_from([REGEX, "a", "b"]), good=st.booleans())
    def compiled(self, regex: str, good: bool) -> None:
        pending = self.waiting.compiler.pending.get(regex)
        if pending is not None and pending.outcome is None:
            pending.outcome = grammar(regex) if good else GrammarError("bad")

    @rule(held=st.booleans())
    def pause(self, held: bool) -> None:
        (self.waiting.lobby.hold if held else self.waiting.lobby.release)()

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.inside))
        assert self.waiting.lobby.drop(sequence) and sequence.finished
        self.inside.remove(sequence)
        assert not self.waiting.lobby.drop(sequence)

    @rule()
    def ready(self) -> None:
        ready, refusals = self.waiting.lobby.ready(3.0)
        assert not (ready and self.waiting.lobby.held)
        for sequence in [*ready, *(sequence for sequence, _ in refusals)]:
            self.inside.remove(sequence)
        assert all(sequence.state is State.WAITING for sequence in ready)
        self.left += ready

    @invariant()
    def nothing_is_lost(self) -> None:
        assert set(self.waiting.lobby) == set(self.inside) and len(self.waiting.lobby) == len(self.inside)
        assert not set(self.left) & set(self.inside)


TestLobbyLife = LobbyLife.TestCase
TestLobbyLife.settings = settings(max_examples=100, deadline=None)
