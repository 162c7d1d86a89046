"""Several cores as one: placement, deaths, drains, joins. The cores are fake, the sockets and threads real."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from pagewire.frontend.core.mailbox import Inbox
from pagewire.frontend.core.session import Session
from pagewire.frontend.requests.outputs import RequestState
from pagewire.frontend.requests.pooling.inputs import check_pooling_params, prepare_pooling
from pagewire.frontend.route import places
from pagewire.frontend.route.engine import open_router
from pagewire.frontend.route.fleet import Fleet
from pagewire.frontend.route.places import running_place
from pagewire.frontend.route.replica import CorePlace, ReplicaState
from pagewire.ipc.errors import EngineDeadError, RequestCrashedEngineError
from pagewire.ipc.options.engine_args import EngineArgs
from pagewire.ipc.wire.block_names import prompt_names
from pagewire.ipc.wire.calls import CALLS
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.messages import Blocks, Call, CoreDying, EngineInfo, Hello, Request, Submit, TokenDelta
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.pooling import PoolingInfo
from tests.frontend.conftest import HEALTHY, PATIENCE, FakeCore
from tests.frontend.mortal_core import LENGTH, Keeper, MortalCore, output
from tests.frontend.route.conftest import NEVER, Cores, ends, wait_for, wait_until


def submit(
    session: Session, inbox: Inbox, *names: str, length: int = LENGTH, prompt: list[int] | None = None
) -> list[RequestState]:
    """Requests with these names."""
    params = SamplingParams(max_tokens=length, temperature=0.0, detokenize=False)
    tokens = {"prompt_token_ids": prompt or [5, 6]}
    return session.submit([session.intake.prepare(tokens, params, name) for name in names], inbox)  # type: ignore[arg-type]


NAMES = ("a", "b", "c", "d", "e", "f")


def test_requests_are_spread_and_all_answered(cores: Cores) -> None:
    session, inbox = cores.open(*[cores.new() for _ in range(3)]), Inbox()
    states = submit(session, inbox, *NAMES, length=40)
    wait_for(inbox, states)
    assert ends(states) == [(None, output(40))] * 6
    assert [sum(map(len, cores.batches(number))) for number in range(3)] == [2, 2, 2]
    for replica in cores.fleet.members:
        assert (replica.num_waiting, replica.num_running, replica.num_placed) == (0, 0, 2)


@pytest.mark.parametrize("killer", ["a", "d", "f"])
def test_a_request_that_kills_two_cores_is_not_sent_to_a_third(cores: Cores, killer: str) -> None:
    """And ends alone: the others are complete, on whichever core."""

    def kills(request: Request, made: int) -> bool:
        return request.request_id == killer

    session, inbox = cores.open(*[cores.new(kills) for _ in range(3)]), Inbox()
    states = submit(session, inbox, *NAMES, length=60)
    wait_for(inbox, states)
    for state, (error, tokens) in zip(states, ends(states), strict=True):
        if state.request_id == killer:
            assert error is RequestCrashedEngineError
        else:
            assert (error, tokens) == (None, output(60))
    key = NAMES.index(killer)
    assert sum(key in batch for number in range(3) for batch in cores.batches(number)) == 2
    assert [replica.state for replica in cores.fleet.members].count(ReplicaState.UP) == 1


def test_a_core_that_is_killed_by_others_loses_no_token(cores: Cores) -> None:
    """Of those that died, another takes the place of one."""
    died = threading.Event()

    def kills(request: Request, made: int) -> bool:
        if made != 20 or died.is_set():
            return False
        died.set()
        return True

    session, inbox = cores.open(cores.new(kills, kept=True), cores.new(kills, kept=True)), Inbox()
    states = submit(session, inbox, *NAMES, length=60)
    wait_for(inbox, states)
    assert ends(states) == [(None, output(60))] * 6
    first, second = cores.cores
    assert isinstance(first, Keeper)
    assert isinstance(second, Keeper)
    assert len(first.cores) + len(second.cores) >= 3


def test_when_no_core_is_left_requests_wait_for_one(cores: Cores) -> None:
    def kills(request: Request, made: int) -> bool:
        return made == 3 and request.output_token_ids is None

    address = cores.new(kills, kept=True)
    session, inbox = cores.open(address), Inbox()
    states = submit(session, inbox, "a", length=20)
    wait_for(inbox, states)
    assert ends(states) == [(None, output(20))]


def test_when_none_comes_they_end_with_the_cause(cores: Cores) -> None:
    session, inbox = cores.open(cores.new(lambda request, made: made == 3), patience=0.2), Inbox()
    states = submit(session, inbox, "a", length=20)
    wait_for(inbox, states)
    assert ends(states)[0][0] is EngineDeadError
    assert isinstance(session.gone.result(PATIENCE), EngineDeadError)
    with pytest.raises(EngineDeadError):
        submit(session, inbox, "b")


def test_a_drained_core_gets_nothing_more_and_is_left(cores: Cores) -> None:
    session, inbox = cores.open(cores.new(), cores.new()), Inbox()
    before = submit(session, inbox, *NAMES, length=100)
    cores.fleet.drain(0)
    after = submit(session, inbox, "g", "h", length=5)
    wait_for(inbox, [*before, *after])
    assert ends(before) == [(None, output(100))] * 6
    assert not {6, 7} & {key for batch in cores.batches(0) for key in batch}
    wait_until(lambda: [replica.number for replica in cores.fleet.members] == [1])
    with pytest.raises(ValueError, match="core 1 is the only one that is up"):
        cores.fleet.drain(1)
    with pytest.raises(ValueError, match="there is no core 0"):
        cores.fleet.drain(0)


def test_requests_of_a_drained_core_can_be_moved(cores: Cores) -> None:
    session, inbox = cores.open(cores.new(), cores.new()), Inbox()
    for number in (0, 1):
        core = cores.cores[number]
        assert isinstance(core, MortalCore)
        core.calls["status"] = dict
    states = submit(session, inbox, *NAMES, length=400)
    moved = set(cores.fleet.dispatcher.ledger.on(cores.fleet.members.get(0)))
    cores.fleet.drain(0, move=True)
    wait_for(inbox, states)
    assert ends(states) == [(None, output(400))] * 6
    assert len(moved) == 3
    assert moved <= {key for batch in cores.batches(1) for key in batch}


@pytest.fixture
def nowhere(tmp_path: Path) -> CorePlace:
    """The place of a core that is not there, or not yet; it is given up soon."""
    place = running_place(f"ipc://{tmp_path}/late.sock")
    place.source._timeout = 0.1  # type: ignore[attr-defined]
    return place


def test_a_core_can_join(cores: Cores, nowhere: CorePlace) -> None:
    session, inbox = cores.open(cores.new()), Inbox()
    address = cores.new()
    added = cores.fleet.add(address)
    assert (added.number, added.state) == (1, ReplicaState.UP)
    states = submit(session, inbox, *NAMES)
    wait_for(inbox, states)
    assert ends(states) == [(None, output())] * 6
    assert cores.batches(1)
    with pytest.raises(ValueError, match=r"no replica of the others: dtype is 'bfloat16', not 'float32'"):
        cores.fleet.add(cores.new(dtype="bfloat16"))
    with pytest.raises(ValueError, match="core 1 is the core at"):
        cores.fleet.add(address)
    with pytest.raises(ValueError, match="must begin with ipc:// or tcp://"):
        cores.fleet.add("udp://x")
    with pytest.raises(EngineDeadError, match="no engine core answers"):
        cores.fleet.members.add(nowhere)
    assert [replica.number for replica in cores.fleet.members] == [0, 1]


def test_spawned_cores_must_not_be_in_each_others_way() -> None:
    with pytest.raises(ValueError, match="kv_events: cores that are spawned together"):
        places.spawned_place(EngineArgs(kv_events="ipc:///tmp/events"), 0, 2)
    with pytest.raises(ValueError, match="tensor_parallel_size"):
        places.spawned_place(EngineArgs(device="cuda", tensor_parallel_size=2), 0, 1)
    assert [
        places.spawned_place(EngineArgs(device="cuda"), i, 2).source._args.device  # type: ignore[attr-defined]
        for i in (0, 1)
    ] == ["cuda:0", "cuda:1"]


def test_cores_of_different_models_are_refused(cores: Cores) -> None:
    with pytest.raises(ValueError, match=r"model is 'other', not 'fake'|model is 'fake', not 'other'"):
        cores.open(cores.new(), cores.new(model="other"))


def test_a_core_that_is_not_there_yet_is_tried_again(cores: Cores, nowhere: CorePlace) -> None:
    here = cores.new()
    cores.engine = open_router([running_place(here), nowhere])
    session = cores.engine.session
    assert [replica.state for replica in cores.fleet.members] == [ReplicaState.UP, ReplicaState.JOINING]
    late = MortalCore(nowhere.label, cores.info, NEVER)
    cores.cores.append(late)
    wait_until(lambda: len(cores.fleet.members.up()) == 2)
    inbox = Inbox()
    states = submit(session, inbox, *NAMES)
    wait_for(inbox, states)
    assert late.batches


def test_a_core_that_comes_back_as_another_engine_is_left(cores: Cores) -> None:
    session, inbox = cores.open(cores.new(), cores.new()), Inbox()
    cores.cores[0].close()
    wait_until(lambda: cores.fleet.members.get(0).state is ReplicaState.LOST)
    info = msgspec.structs.replace(cores.info, block_size=32)
    cores.cores.append(MortalCore(f"ipc://{cores.folder}/core0.sock", info, NEVER))
    wait_until(lambda: [replica.number for replica in cores.fleet.members] == [1])
    states = submit(session, inbox, *NAMES)
    wait_for(inbox, states)
    assert ends(states) == [(None, output())] * 6


def test_no_core_at_all(nowhere: CorePlace) -> None:
    with pytest.raises(EngineDeadError, match="no engine core answers"):
        open_router([nowhere])


class SilentCores:
    """Two fake cores that answer nothing by themselves, and a session on both."""

    def __init__(self, new_core: Callable[..., FakeCore]) -> None:
        self.cores = [new_core("0"), new_core("1")]
        for core in self.cores:
            core.calls["follow_blocks"] = lambda: True
        self.engine = open_router([running_place(core.address) for core in self.cores])
        self.session = self.engine.session
        fleet = self.session.connection
        assert isinstance(fleet, Fleet)
        self.fleet = fleet
        self.inbox = Inbox()

    def core_of(self, state: RequestState) -> int:
        """The number of the core that has a request."""
        return self.fleet.dispatcher.ledger.placed[state.key].replica.number


@pytest.fixture
def silent(new_core: Callable[..., FakeCore]) -> Iterator[SilentCores]:
    """Two cores that only receive."""
    cores = SilentCores(new_core)
    yield cores
    cores.engine.shutdown()


PROMPT = [7] * 100  # six full blocks


def test_a_request_goes_where_its_prefix_is_reported(silent: SilentCores) -> None:
    names = prompt_names(Prompt(PROMPT), 16)
    silent.cores[1].send(Blocks(0, True, b"".join(names)))
    wait_until(lambda: silent.fleet.dispatcher.num_blocks(silent.fleet.members.get(1)) == 6)
    first = submit(silent.session, silent.inbox, "a", prompt=PROMPT)[0]
    assert silent.core_of(first) == 1
    silent.session.abort([first])
    silent.cores[1].send(Blocks(1, False, removed=b"".join(names)))
    silent.cores[0].send(Blocks(0, True, b"".join(names)))
    wait_until(lambda: silent.fleet.dispatcher.num_blocks(silent.fleet.members.get(1)) == 0)
    wait_until(lambda: silent.fleet.dispatcher.num_blocks(silent.fleet.members.get(0)) == 6)


def test_what_requests_will_leave_counts_as_cached_unless_too_much_waits(silent: SilentCores) -> None:
    """Before the core has reported anything."""
    first, second = (submit(silent.session, silent.inbox, name, prompt=PROMPT)[0] for name in "ab")
    assert silent.core_of(first) != silent.core_of(second)  # the first one's tokens are still to be computed
    silent.cores[silent.core_of(second)].tokens(second.key, [2])
    wait_until(lambda: silent.fleet.dispatcher.ledger.placed[second.key].started)
    third = submit(silent.session, silent.inbox, "c", prompt=[*PROMPT, 8, 8])[0]
    assert silent.core_of(third) == silent.core_of(second)


def test_other_salts_are_other_prefixes(silent: SilentCores) -> None:
    names = prompt_names(Prompt(PROMPT, cache_salt="theirs"), 16)
    silent.cores[1].send(Blocks(0, True, b"".join(names)))
    wait_until(lambda: silent.fleet.dispatcher.num_blocks(silent.fleet.members.get(1)) == 6)
    assert silent.core_of(submit(silent.session, silent.inbox, "a", prompt=PROMPT)[0]) == 0


def test_after_a_gap_all_names_are_asked_for_again(silent: SilentCores) -> None:
    core, replica, calls = silent.cores[0], silent.fleet.members.get(0), []
    assert [core.expect(Call).method for _ in range(2)] == ["fence", "follow_blocks"]  # the first time

    def follow() -> bool:
        calls.append(1)
        if len(calls) == 1:
            core._reply(Blocks(3, False, b"c" * 32))  # on its way before the snapshot
            core.send(Blocks(1, False, b"f" * 32))  # after the answer; the snapshot itself was not sent
        else:
            core._reply(Blocks(0, True, b"d" * 32 + b"e" * 32))
        return True

    core.calls["follow_blocks"] = follow
    core.send(Blocks(0, True, b"a" * 32))
    core.send(Blocks(2, False, b"b" * 32))
    wait_until(lambda: silent.fleet.dispatcher.num_blocks(replica) == 2)
    assert (len(calls), replica.num_gaps) == (2, 2)


def test_a_request_that_a_core_is_too_busy_for_goes_to_another(silent: SilentCores) -> None:
    state = submit(silent.session, silent.inbox, "a")[0]
    first = silent.core_of(state)
    refusal = {"finish_reason": "error", "error": "full", "error_type": "EngineBusyError"}
    silent.cores[first].tokens(state.key, [], **refusal)
    wait_until(lambda: silent.core_of(state) == 1 - first)
    silent.cores[1 - first].tokens(state.key, [2, 3], finish_reason="length")
    wait_for(silent.inbox, [state])
    assert ends([state]) == [(None, [2, 3])]
    last = submit(silent.session, silent.inbox, "b")[0]
    assert silent.core_of(last) == 1 - first  # the busy one is left alone for a moment
    for number in (1 - first, first):
        wait_until(lambda number=number: last.finished or silent.core_of(last) == number)
        silent.cores[number].tokens(last.key, [], **refusal)
    wait_for(silent.inbox, [last])
    assert str(last.exception()) == "full"


def test_what_a_core_sends_of_a_request_that_went_elsewhere_is_dropped(silent: SilentCores) -> None:
    """Such as the refusals of the other sequences, in a later message."""
    params = SamplingParams(n=2, max_tokens=5, detokenize=False)
    (state,) = silent.session.submit(
        [silent.session.intake.prepare({"prompt_token_ids": [5]}, params, "a")], silent.inbox
    )
    first = silent.core_of(state)
    refusal = {"finish_reason": "error", "error": "full", "error_type": "EngineBusyError"}
    silent.cores[first].tokens(state.key, [], index=0, **refusal)
    wait_until(lambda: silent.core_of(state) == 1 - first)
    silent.cores[first].tokens(state.key, [], index=1, **refusal)
    silent.cores[first].calls["status"] = dict
    silent.fleet.members.get(first).client.call("status").result(PATIENCE)  # so they have been read
    for index in (0, 1):
        silent.cores[1 - first].tokens(state.key, [7], index=index, finish_reason="length")
    wait_for(silent.inbox, [state])
    assert (state.error, state.output_token_ids) == (None, [[7], [7]])


def test_a_sequence_that_ends_twice_leaves_the_others_on_the_core(silent: SilentCores) -> None:
    """It is aborted for a stop string while its end is on the way. The request must still go on elsewhere."""
    params = SamplingParams(n=2, max_tokens=5, detokenize=False)
    (state,) = silent.session.submit(
        [silent.session.intake.prepare({"prompt_token_ids": [5]}, params, "a")], silent.inbox
    )
    silent.fleet.abort(sequences=[(state.key, 0)])
    silent.cores[0].tokens(state.key, [3], index=0, finish_reason="length")
    silent.cores[0].tokens(state.key, [4], index=1)
    wait_until(lambda: state.num_output_tokens == 2)
    replica = silent.fleet.members.get(0)
    assert (silent.fleet.dispatcher.num_requests(replica), replica.num_running) == (1, 1)
    silent.cores[0].send(CoreDying("SIGTERM", stopped=True))
    wait_until(lambda: silent.core_of(state) == 1)
    silent.cores[1].tokens(state.key, [6], index=1, finish_reason="length")
    wait_for(silent.inbox, [state])
    assert state.output_token_ids == [[3], [4, 6]]


def test_a_request_to_pool_starts_anew_on_another_core(
    new_core: Callable[..., FakeCore], engine_info: EngineInfo
) -> None:
    """And cores that pool in another way, or not at all, are no replicas."""
    mean = PoolingInfo(["embed"], "MEAN", 2)
    cores = [new_core(name) for name in "0123"]
    for core, pooling in zip(cores, (mean, mean, None, PoolingInfo(["embed"], "LAST", 2)), strict=True):
        core.info = msgspec.structs.replace(engine_info, pooling=pooling)
    engine = open_router([running_place(core.address) for core in cores[:2]])
    session, inbox = engine.session, Inbox()
    try:
        for core in cores[2:]:
            with pytest.raises(ValueError, match="no replica of the others: pooling is"):
                session.connection.add(core.address)  # type: ignore[attr-defined]
        params = check_pooling_params(None, session.info)
        prepared = [
            prepare_pooling(session.intake, {"prompt_token_ids": [5, 6]}, params, name) for name in "ab"
        ]
        states = session.submit(prepared, inbox)
        assert cores[0].expect(Submit).requests == [prepared[0].request]
        cores[0].close()
        (again,) = iter(lambda: cores[1].expect(Submit).requests[0], prepared[0].request)
        assert again == prepared[1].request
        vector = Tensor("float32", (2,), bytes(8))
        cores[1].deltas(
            [TokenDelta(state.key, 0, [], finish_reason="stop", pooled=vector) for state in states]
        )
        wait_for(inbox, states)
        assert [state.take().outputs.data for state in states] == [[0.0, 0.0]] * 2  # type: ignore[union-attr]
    finally:
        engine.shutdown()


def test_a_core_that_is_stopped_makes_nothing_suspect(silent: SilentCores) -> None:
    states = submit(silent.session, silent.inbox, "a", "b")
    first = next(state for state in states if silent.core_of(state) == 0)
    silent.cores[0].tokens(first.key, [9])
    silent.cores[0].send(CoreDying("SIGTERM", stopped=True))
    wait_until(lambda: silent.core_of(first) == 1)
    silent.cores[1].deltas([TokenDelta(state.key, 0, [4], finish_reason="length") for state in states])
    wait_for(silent.inbox, states)
    assert [state.output_token_ids[0] for state in states] == [
        [9, 4] if state is first else [4] for state in states
    ]


# ---------------------------------------------------------------- cores that answer wrongly, or nothing


METRIC = {"name": "m", "type": "gauge", "documentation": "", "labels": {}, "value": 1.0}


def test_an_answer_of_another_type_is_the_failure_of_its_core_alone(
    silent: SilentCores, caplog: pytest.LogCaptureFixture
) -> None:
    wrong, right = silent.cores
    wrong.calls |= {"check_health": lambda: "very", "metrics": lambda: [{"name": "m"}], "status": lambda: [1]}
    right.calls |= {"metrics": lambda: [METRIC], "status": lambda: {"running": 2}}
    for _ in range(2):
        assert silent.session.call("check_health").result(PATIENCE) == HEALTHY
        rows = silent.session.call("metrics").result(PATIENCE)
        assert [row["labels"]["engine"] for row in rows if row["name"] == "m"] == ["1"]
        assert silent.session.call("status").result(PATIENCE) == {"running": 2}
    wait_until(lambda: "answers to check_health" in caplog.text)
    assert caplog.text.count("core 0 is left out of answers to check_health") == 1
    right.calls["check_health"] = lambda: {"alive": True}
    with pytest.raises(EngineDeadError, match="does not say whether it is healthy"):
        asyncio.run(silent.engine.health())


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frontends that wait for answers of cores for a fraction of a second."""
    monkeypatch.setenv("PAGEWIRE_HEARTBEAT_TIMEOUT_S", "0.5")
    monkeypatch.setitem(CALLS, "fence", msgspec.structs.replace(CALLS["fence"], seconds=0.1))
    monkeypatch.setattr("pagewire.frontend.route.fleet.PROBE_SECONDS", 0.05)
    monkeypatch.setattr("pagewire.frontend.route.replica.PROOF_SECONDS", 0.2)
    monkeypatch.setattr("pagewire.frontend.core.core_source.RETRY_SECONDS", 0.02)
    monkeypatch.setattr("pagewire.frontend.route.members.RETRY_SECONDS", 0.02)


@pytest.mark.usefixtures("short_limits")
def test_a_core_that_sends_heartbeats_only_loses_its_requests(new_core: Callable[..., FakeCore]) -> None:
    silent = SilentCores(new_core)
    try:
        states = submit(silent.session, silent.inbox, "a", "b")
        core, replica = silent.cores[0], silent.fleet.members.get(0)
        assert sorted(map(silent.core_of, states)) == [0, 1]
        core.fences = False  # it answers pings, and greets again
        wait_until(lambda: [silent.core_of(state) for state in states] == [1, 1])
        greeted = core.expect(Hello) and core.expect(Hello)
        assert greeted and replica.state is ReplicaState.LOST, "it must answer before it gets requests"
        assert silent.session.call("check_health").result(PATIENCE) == HEALTHY
        core.fences = True
        wait_until(lambda: replica.state is ReplicaState.UP)
        silent.cores[1].deltas([TokenDelta(state.key, 0, [4], finish_reason="length") for state in states])
        wait_for(silent.inbox, states)
        assert ends(states) == [(None, [4])] * 2
    finally:
        silent.engine.shutdown()


@pytest.mark.usefixtures("short_limits")
@pytest.mark.parametrize("greets", [True, False])
def test_a_core_that_answers_nothing_else_does_not_join(
    new_core: Callable[..., FakeCore], greets: bool
) -> None:
    right, wrong = new_core("right"), new_core("wrong")
    wrong.fences, wrong.welcomes, wrong.pongs = False, greets, greets
    engine = open_router([running_place(right.address), running_place(wrong.address)])
    fleet = engine.session.connection
    assert isinstance(fleet, Fleet)
    try:
        states = [replica.state for replica in fleet.members]
        assert sorted(state.value for state in states) == ["joining", "up"]
        wrong.fences = wrong.welcomes = wrong.pongs = True
        wait_until(lambda: len(fleet.members.up()) == 2)
    finally:
        engine.shutdown()
