"""Supervisor and open requests over simulated cores, in one thread: whenever one waits, the simulation goes on.

Cores generate the tokens of `mortal_core.output`, and die as a test says. After each step everything is validated.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from pagewire.frontend.core import core_source, supervisor
from pagewire.frontend.core import session as session_module
from pagewire.frontend.core.core_source import Attached, Dial
from pagewire.frontend.core.custody import RequestPlace
from pagewire.frontend.core.session import Session
from pagewire.frontend.core.supervisor import ConnectionStage, Loss, Supervisor
from pagewire.frontend.core.trials import SuspectTrials
from pagewire.frontend.requests.inputs import Intake, Prepared
from pagewire.frontend.requests.outputs import RequestState
from pagewire.ipc.errors import DetachedError, EngineDeadError, EngineStoppedError, RequestCrashedEngineError
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.messages import Deltas, EngineInfo, Request, TokenDelta
from pagewire.ipc.wire.params import SamplingParams
from tests.frontend.mortal_core import FIRST, output

DEATHS = (EngineDeadError, EngineStoppedError, DetachedError)
MAX_STEPS = 500  # of a life's end or a wait, which never take that many


class SimulatedClient:
    """A client and its core. `step` gives a token to each of its requests; `die` ends it."""

    def __init__(self, simulation: Simulation, on_deltas: Any, on_dead: Any) -> None:
        self.info = simulation.info
        self.dead: EngineDeadError | None = None
        self.live: dict[int, tuple[Request, int, int]] = {}  # with its first and its next position
        self.on_dead = on_dead
        self._simulation, self._on_deltas = simulation, on_deltas
        self._calls: list[Future[Any]] = []

    def submit(self, requests: list[Request]) -> list[tuple[Request, ValueError]]:
        self._check()
        for request in requests:
            assert request.key not in self.live, "a request is submitted twice"
            position = len((request.output_token_ids or [[]])[0])
            self.live[request.key] = request, position, position
        return []

    def abort(self, keys: Any = (), sequences: Any = ()) -> None:
        for key in keys:
            self.live.pop(key, None)

    def call(self, method: str) -> Future[Any]:
        self._check()
        self._calls.append(Future())
        return self._calls[-1]

    def close(self) -> None:
        self.dead = self.dead or EngineDeadError("the engine was shut down")

    def die(self, error: EngineDeadError) -> None:
        self.dead = error
        for call in self._calls:
            call.set_exception(error)
        self.on_dead(error)

    def step(self) -> None:
        """A step of the core, in which it may die of a request; it answers calls after it."""
        if self.dead is not None:
            return
        for request, first, position in self.live.values():
            if self._simulation.kills.get(request.key) == position - first:
                self.die(EngineDeadError(f"it died of {request.key}"))
                return
        deltas = []
        for key, (request, first, position) in list(self.live.items()):
            last = position + 1 == request.params.max_tokens
            deltas.append(
                TokenDelta(key, 0, [FIRST + position % 60], finish_reason="length" if last else None)
            )
            self.live[key] = request, first, position + 1
            if last:
                del self.live[key]
        self._on_deltas(Deltas(deltas))
        calls, self._calls = self._calls, []
        for call in calls:
            call.set_result([])

    def _check(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(*self.dead.args)


class NoThread:
    """The supervisor's thread: the simulation does what it would do."""

    def __init__(self, **options: Any) -> None: ...

    def start(self) -> None: ...

    def join(self) -> None: ...


class Simulation:
    """Open requests, their supervisor, and one simulated core after the other.

    chance: draws what happens. info: of the cores. others: how many cores may replace a lost one.

    Attributes:
        kills: by key, after how many tokens on one core a request kills it.
        only_kills: no core was lost of anything else.
    """

    def __init__(
        self, chance: random.Random, info: EngineInfo, patch: pytest.MonkeyPatch, others: int = 1 << 30
    ) -> None:
        self.info, self.kills, self.states = info, {}, {}
        self.kills: dict[int, int]
        self.states: dict[int, RequestState]
        self._chance, self._others = chance, others
        self.only_kills = True
        self._accidents = 0  # what may still happen while the supervisor waits
        self._clients: list[SimulatedClient] = []
        simulation = self

        class Trials(SuspectTrials):
            """Trials in which waiting means that the core goes on."""

            def wait(self, seconds: float | None = None) -> None:
                for _ in range(MAX_STEPS if seconds is None else chance.randint(1, 40)):
                    if self._over.is_set():
                        return
                    simulation.happen()
                assert seconds is not None, "a wait without end"

        patch.setattr(supervisor, "CoreClient", SimpleNamespace(connect=self._connect))
        patch.setattr(supervisor, "threading", SimpleNamespace(Event=threading.Event, Thread=NoThread))
        patch.setattr(session_module, "SuspectTrials", Trials)
        patch.setattr(core_source, "HEALTHY_SECONDS", 0.0)  # no pauses
        self.requests = Session(lambda owner: Supervisor(self, owner), lambda info, call: Intake(info, None))  # type: ignore[arg-type]
        assert isinstance(self.requests.connection, Supervisor)
        self.supervisor = self.requests.connection

    # ---------------------------------------------------------------- as a source of cores

    def connect(self, dial: Dial) -> Attached:
        return Attached(dial("core"), None)

    def again(self, dial: Dial, spawned: Any) -> Attached:
        if self._chance.random() < 0.3:
            raise EngineDeadError("it does not answer")
        return self.connect(dial)

    def replace(self, dial: Dial, error: EngineDeadError, closing: threading.Event) -> Attached:
        if not self._others:
            raise error
        self._others -= 1
        attached = self.connect(dial)
        if self._chance.random() < 0.2:  # it greets, and is lost
            self.only_kills = False
            self._clients[-1].die(EngineDeadError("it died early"))
        return attached

    def _connect(self, address: str, *, on_deltas: Any, on_dead: Any, **options: Any) -> SimulatedClient:
        self._clients.append(SimulatedClient(self, on_deltas, on_dead))
        return self._clients[-1]

    # ---------------------------------------------------------------- what happens

    def happen(self) -> None:
        """A step of the core, or something unexpected."""
        chosen = self._chance.random() if self._accidents else 1.0
        if chosen < 0.05:
            self._accidents -= 1
            self.lose_core()
        elif chosen < 0.1:
            self._accidents -= 1
            self.submit(1)
        elif chosen < 0.15:
            self._accidents -= 1
            self.abort()
        else:
            self._clients[-1].step()

    def submit(self, length: int, kills: int | None = None) -> None:
        """Submit a request. kills: see `kills`. It is refused where there is no core."""
        key = len(self.states)
        params = SamplingParams(max_tokens=length, detokenize=False)
        request = Request(key, f"r{key}", Prompt([2, 3]), params, seed=0)
        try:
            (state,) = self.requests.submit([Prepared(request, None)], Unread())
        except EngineDeadError:  # whether the supervisor knows it yet or not
            assert self._clients[-1].dead is not None
            return
        self.states[key] = state
        if kills is not None:
            self.kills[key] = kills

    def abort(self) -> None:
        """Abort any request."""
        if self.states:
            self.requests.abort([self._chance.choice(list(self.states.values()))])

    def lose_core(self) -> None:
        """The core dies, stops, or detaches this frontend."""
        self.only_kills = False
        if self._clients[-1].dead is None:
            self._clients[-1].die(self._chance.choice(DEATHS)("it was lost"))

    def report_late(self) -> None:
        """A client that was given up reports that its core is lost, too."""
        if len(self._clients) > 1:
            self._clients[0].on_dead(EngineDeadError("it was lost long ago"))

    def supervise(self, accidents: int = 0) -> None:
        """What the supervisor's thread does now. accidents: how much may happen meanwhile."""
        self._accidents = accidents
        losses = self.supervisor._losses
        for _ in range(MAX_STEPS):
            if losses.empty():
                break
            loss = losses.get()
            assert isinstance(loss, Loss)
            self.supervisor.take(loss)
            self.validate()
        self._accidents = 0
        assert losses.empty(), "cores are replaced for ever"
        self.validate()

    def validate(self) -> None:
        """What holds while the supervisor does nothing."""
        self.requests.validate()
        self.supervisor.validate()
        custody, stage = self.requests._custody, self.supervisor.stage
        assert custody.recovering == (
            stage in (ConnectionStage.LOST, ConnectionStage.RESUBMITTING) or stage is ConnectionStage.GONE
        )
        is_open = {key for key, state in self.states.items() if not state.finished}
        assert stage not in (ConnectionStage.GONE, ConnectionStage.CLOSED) or not is_open
        client = self._clients[-1]
        if stage is ConnectionStage.ATTACHED and client.dead is None:
            assert set(client.live) == is_open, "the core has other requests than those that are open"
        for state in self.states.values():
            tokens = state.output_token_ids[0]
            assert tokens == output(len(tokens)), "a token is lost or doubled"
            assert state.finished or custody.place(state) in RequestPlace

    def finish(self) -> None:
        """Let everything come to its end: all requests are complete, or have ended with an error."""
        for _ in range(MAX_STEPS):
            if all(state.finished for state in self.states.values()):
                break
            self._clients[-1].step()
            self.supervise()
        for key, state in self.states.items():
            assert state.finished, "a request waits for ever"
            if state.error is not None:
                if not isinstance(state.exception(), RequestCrashedEngineError):
                    assert self.supervisor.stage is ConnectionStage.GONE
                elif self.only_kills:
                    assert key in self.kills, "an innocent request is blamed"
            elif state.finish_reasons[0] != "abort":
                assert state.output_token_ids[0] == output(state.request.params.max_tokens or 0)
        self.requests.close()
        assert self.supervisor.stage is ConnectionStage.CLOSED


class Unread:
    """A mailbox that nobody reads."""

    def put(self, states: list[RequestState]) -> None: ...
