"""What becomes of open requests when cores die, one after the other, and which request is to blame."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagewire.frontend.core import core_source, custody
from pagewire.frontend.core.mailbox import Inbox
from pagewire.frontend.core.open_session import attach
from pagewire.frontend.core.session import Session
from pagewire.frontend.core.supervisor import Supervisor
from pagewire.frontend.requests.outputs import RequestState
from pagewire.ipc.errors import EngineDeadError, RequestCrashedEngineError
from pagewire.ipc.wire.messages import CoreDying, Detached, EngineInfo, Hello, Request, Submit
from pagewire.ipc.wire.params import SamplingParams
from tests.frontend.conftest import PATIENCE, FakeCore
from tests.frontend.mortal_core import LENGTH, Keeper, output

Opened = tuple[Session, Keeper]


@pytest.fixture
def open_session(
    tmp_path: Path, engine_info: EngineInfo, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Opened]]:
    """A session, and the cores that it attaches to one after the other."""
    monkeypatch.setattr(core_source, "RETRY_SECONDS", 0.02)
    opened: list[Opened] = []

    def new(*kills: Any, reattach_timeout: float = 60) -> Opened:
        keeper = Keeper(f"ipc://{tmp_path}/core.sock", engine_info, *kills)
        options: dict[str, Any] = {"curve": None, "tokenizer": None, "timeout": 10}
        session = attach(keeper.address, reattach_timeout=reattach_timeout, **options)
        opened.append((session, keeper))
        return opened[-1]

    yield new
    for session, keeper in opened:
        session.validate()
        session.close()
        keeper.close()
        session.validate()
        assert isinstance(session.connection, Supervisor)
        session.connection.validate()


def submit(session: Session, inbox: Inbox, *names: str, length: int = LENGTH) -> list[RequestState]:
    """Requests with these names."""
    params = SamplingParams(max_tokens=length, temperature=0.0, detokenize=False)
    prepared = [session.intake.prepare({"prompt_token_ids": [5, 6]}, params, name) for name in names]
    return session.submit(prepared, inbox)


def wait_for(inbox: Inbox, states: list[RequestState]) -> None:
    """Wait for the end of all."""
    while not all(state.finished for state in states):
        inbox.get()


def end_of(state: RequestState) -> tuple[type[Exception] | None, list[int]]:
    """The exception of a request, and its tokens."""
    return None if state.error is None else type(state.exception()), state.output_token_ids[0]


def outcome(session: Session, *names: str) -> list[tuple[type[Exception] | None, list[int]]]:
    """Submit requests, and wait for the end of each."""
    inbox = Inbox()
    states = submit(session, inbox, *names)
    wait_for(inbox, states)
    return [end_of(state) for state in states]


NAMES = ("a", "b", "c", "d", "e", "f")


@pytest.mark.parametrize("killer", NAMES)
def test_a_request_that_kills_cores_ends_after_two_of_them(
    open_session: Callable[..., Opened], killer: str
) -> None:
    """And alone: the others are complete, and no token of them is lost or doubled."""
    session, keeper = open_session(lambda request, made: request.request_id == killer)
    for name, (error, tokens) in zip(NAMES, outcome(session, *NAMES), strict=True):
        if name == killer:
            assert error is RequestCrashedEngineError
        else:
            assert (error, tokens) == (None, output())
    assert len(keeper.cores) == 3
    key = NAMES.index(killer)
    assert sum(key in batch for batches in keeper.submissions for batch in batches) == 2
    assert keeper.submissions[1][-1] == [key]
    assert outcome(session, "later") == [(None, output())]


@pytest.mark.parametrize(("when", "deaths"), [(1, 2), (3, 2), (40, 3)])
def test_a_request_that_kills_cores_later_is_found_too(
    open_session: Callable[..., Opened], when: int, deaths: int
) -> None:
    """It passes its first trial if it takes longer than that, and is in flight at each death.

    A trial ends when the core has read the abort. On a slow machine that comes late, and the core dies in the
    trial: then fewer deaths tell who is to blame.
    """
    session, keeper = open_session(lambda request, made: request.request_id == "c" and made == when)
    inbox = Inbox()
    states = submit(session, inbox, *NAMES, length=200)
    wait_for(inbox, states)
    for state in states:
        expected = RequestCrashedEngineError if state.request_id == "c" else None
        assert end_of(state)[0] is expected
        assert state.output_token_ids[0] == output(200)[: len(state.output_token_ids[0])]
    assert [len(state.output_token_ids[0]) for state in states if state.error is None] == [200] * 5
    assert 2 < len(keeper.cores) <= deaths + 1


def test_cores_that_are_killed_by_others_end_no_request(open_session: Callable[..., Opened]) -> None:
    deaths: list[str] = []

    def kills(request: Request, made: int) -> bool:
        """Two cores die, whoever has come that far."""
        if made != 40 or len(deaths) == 2:
            return False
        deaths.append(request.request_id)
        return True

    session, keeper = open_session(kills)
    inbox = Inbox()
    states = submit(session, inbox, *NAMES, length=200)
    wait_for(inbox, states)
    assert [end_of(state) for state in states] == [(None, output(200))] * 6
    assert len(keeper.cores) == 3


def test_what_comes_during_trials_waits_for_them(open_session: Callable[..., Opened]) -> None:
    trial, go = threading.Event(), threading.Event()

    def kills(request: Request, made: int) -> bool:
        if request.request_id == "slow" and request.output_token_ids is not None and made == 0:
            trial.set()  # it is resumed
            assert go.wait(PATIENCE)
        return request.request_id == "slow" and request.output_token_ids is None and made == 2

    session, keeper = open_session(kills)
    inbox = Inbox()
    states = submit(session, inbox, "slow", length=60)
    assert trial.wait(PATIENCE)
    states += submit(session, inbox, "new")
    gone = submit(session, inbox, "aborted")
    session.abort(gone)
    go.set()
    wait_for(inbox, states)
    assert [end_of(state) for state in states] == [(None, output(60)), (None, output())]
    assert keeper.submissions == [[[0]], [[0], [0, 1]]]


def test_a_core_that_stops_makes_nothing_suspect(open_session: Callable[..., Opened]) -> None:
    session, keeper = open_session()
    inbox = Inbox()
    states = submit(session, inbox, *NAMES, length=200)
    inbox.get()
    keeper.cores[0].send(CoreDying("it has shut down", stopped=True))
    keeper.cores[0].expect(Hello)
    wait_for(inbox, states)
    assert [end_of(state) for state in states] == [(None, output(200))] * 6
    assert keeper.submissions[-1][-1] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("reattach_timeout", [0, 60])
def test_a_frontend_that_was_detached_attaches_again(
    open_session: Callable[..., Opened], reattach_timeout: float
) -> None:
    """As after it was stopped for long: the core runs, and has forgotten it."""
    session, keeper = open_session(reattach_timeout=reattach_timeout)
    inbox = Inbox()
    states = submit(session, inbox, *NAMES, length=200)
    inbox.get()
    keeper.cores[0].expect(Hello)
    keeper.cores[0].send(Detached("it was silent"))
    keeper.cores[0].expect(Hello)
    wait_for(inbox, states)
    assert [end_of(state) for state in states] == [(None, output(200))] * 6
    assert len(keeper.cores) == 1 and session.dead is None and not session.gone.done()


def test_any_number_of_open_requests_goes_on_in_pieces(
    open_session: Callable[..., Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has become too large for a message: it ends alone."""
    all_open, died = threading.Event(), threading.Event()

    def kills(request: Request, made: int) -> bool:
        if died.is_set() or not all_open.is_set() or request.request_id != "long" or made < 700:
            return False
        died.set()
        return True

    session, keeper = open_session(kills)
    inbox = Inbox()
    [long] = submit(session, inbox, "long", length=4000)
    while long.num_output_tokens < 650:
        inbox.get()
    states = submit(session, inbox, *(f"{number:060}" for number in range(100)), length=200)
    monkeypatch.setattr(EngineInfo, "max_message_bytes", 600)
    monkeypatch.setattr(custody.Blame, "suspects", lambda *_: [])  # to see the sending alone
    all_open.set()
    wait_for(inbox, [long, *states])
    assert end_of(long)[0] is ValueError and "too large" in str(long.error)
    assert [end_of(state) for state in states] == [(None, output(200))] * 100
    batches = keeper.cores[1].batches
    assert [key for batch in batches for key in batch] == list(range(1, 101)) and len(batches) > 10


def test_an_oversize_request_ends_alone(
    open_session: Callable[..., Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, keeper = open_session()
    monkeypatch.setattr(EngineInfo, "max_message_bytes", 1_000)
    params = SamplingParams(max_tokens=LENGTH, detokenize=False)
    prompts: list[Any] = [{"prompt_token_ids": [5, 6]} for _ in range(4)]
    prompts[2]["cache_salt"] = "x" * 1_000
    inbox = Inbox()
    prepared = [session.intake.prepare(prompt, params, f"r{i}") for i, prompt in enumerate(prompts)]
    states = session.submit(prepared, inbox)
    wait_for(inbox, states)
    assert [end_of(state)[0] for state in states] == [None, None, ValueError, None]
    assert "r2" in str(states[2].error) and "1000" in str(states[2].error)
    assert keeper.submissions == [[[0, 1], [3]]]


# ---------------------------------------------------------------- a core lost while another is being lost


def test_cores_that_are_lost_while_they_take_the_place_of_others(
    open_session: Callable[..., Opened], engine_info: EngineInfo
) -> None:
    """Three of them vanish right after their answer to `Hello`."""
    session, keeper = open_session()
    inbox = Inbox()
    states = submit(session, inbox, *NAMES, length=100)
    inbox.get()
    short_lived = [3]
    handshake = FakeCore._handshake

    def die(core: FakeCore, hello: Hello) -> None:
        handshake(core, hello)
        if short_lived[0]:
            short_lived[0] -= 1
            core._stop.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeCore, "_handshake", die)
        keeper.cores[0]._stop.set()
        wait_for(inbox, states)
    assert [end_of(state) for state in states] == [(None, output(100))] * 6
    assert short_lived == [0] and len(keeper.cores) > 2 and session.dead is None
    assert outcome(session, "later") == [(None, output())]


def test_closing_does_not_wait_for_a_core_that_does_not_answer(
    new_core: Callable[..., FakeCore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has accepted the connection of the session that lost another core."""
    monkeypatch.setattr(core_source, "RETRY_SECONDS", 0.02)
    core = new_core()
    session = attach(
        f"ipc://{tmp_path}/core.sock", curve=None, tokenizer=None, timeout=10, reattach_timeout=1000
    )
    inbox = Inbox()
    [state] = submit(session, inbox, "a")
    core.expect(Submit)
    core.close()
    silent = new_core()
    silent.welcomes = silent.pongs = False
    silent.expect(Hello)
    closing = threading.Thread(target=session.close)
    closing.start()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    wait_for(inbox, [state])
    with pytest.raises(EngineDeadError):
        session.take(state)
    assert session.gone.cancelled()


def test_a_core_that_is_gone_for_good_is_told(open_session: Callable[..., Opened]) -> None:
    session, keeper = open_session(reattach_timeout=0)
    keeper._stop.set()
    keeper.cores[0].close()
    assert "closed the connection" in str(session.gone.result(PATIENCE))
    assert str(session.dead) == str(session.gone.result())
