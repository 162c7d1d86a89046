"""Where each open request is while cores come and go. Pure: no threads, no clock, no sockets.

    submitted --> SENT --core_lost--> HELD --resumed--> SENT
                                       ^ |
                 taken_back, core_lost | | tried
                                       | v
                                      TRIED          ended: from anywhere, and it is open no longer

The table is `MOVES`. A request is with one core at most, and what a core had is held until another one takes it: so
no token is lost or doubled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum

import msgspec

from pagewire.frontend.core.blame import Blame
from pagewire.frontend.requests.outputs import RequestState
from pagewire.ipc.wire.messages import Request


class RequestPlace(Enum):
    """Where an open request is."""

    SENT = "sent"
    """With the core, like most."""
    HELD = "held"
    """Here, until suspects were tried."""
    TRIED = "tried"
    """With the core as the suspect that is tried, until the core has answered a call after that."""


class RequestEvent(Enum):
    """An event of an open request; see `MOVES`."""

    CORE_LOST = "core_lost"
    TRIED = "tried"
    TAKEN_BACK = "taken_back"
    RESUMED = "resumed"


MOVES: dict[tuple[RequestPlace, RequestEvent], RequestPlace] = {
    (RequestPlace.SENT, RequestEvent.CORE_LOST): RequestPlace.HELD,
    (RequestPlace.TRIED, RequestEvent.CORE_LOST): RequestPlace.HELD,
    (RequestPlace.HELD, RequestEvent.TRIED): RequestPlace.TRIED,
    (RequestPlace.TRIED, RequestEvent.TAKEN_BACK): RequestPlace.HELD,
    (RequestPlace.HELD, RequestEvent.RESUMED): RequestPlace.SENT,
}


class Custody:
    """The places of open requests, and what makes some of them suspect. Not thread-safe.

    Attributes:
        recovering: a core was lost, and what it had was not resumed yet.
        holds_new: while recovering, new requests are held too, for no other core serves.
        held: requests by key. tried: the suspect that is tried; None: none is.
    """

    def __init__(self) -> None:
        self.recovering = self.holds_new = False
        self.held: dict[int, RequestState] = {}
        self.tried: RequestState | None = None
        self._blame = Blame()

    def place(self, state: RequestState) -> RequestPlace:
        """Where an open request is."""
        if state is self.tried:
            return RequestPlace.TRIED
        return RequestPlace.HELD if state.key in self.held else RequestPlace.SENT

    def hold(self, states: Iterable[RequestState]) -> bool:
        """Hold new requests if they must wait for trials. Returns False if they are to be sent."""
        if not (self.recovering and self.holds_new):
            return False
        self.held.update((state.key, state) for state in states)
        return True

    def core_lost(
        self, states: Collection[RequestState], keys: Collection[int] | None, *, by_accident: bool
    ) -> RequestState | None:
        """Hold what a core had that is lost. Returns the request that has killed it, if that is certain.

        states: all open requests. keys: of those that it had; None: all that were sent, and no other core serves.
        by_accident: it was not stopped, and has not dropped this frontend: what it had is suspect.
        """
        lost = [
            state
            for state in states
            if self.place(state) is not RequestPlace.HELD and (keys is None or state.key in keys)
        ]
        guilty = None
        if by_accident:
            in_flight = {state.key for state in lost}
            others = [state for state in states if state.key not in in_flight]
            guilty = self._blame.core_died(lost, others, self.tried)
        for state in lost:
            self._move(state, RequestEvent.CORE_LOST)
        self.recovering, self.holds_new = True, keys is None
        return guilty

    def suspects(self, tried: Collection[int]) -> list[RequestState]:
        """The held requests to try next, in this order. tried: keys of those that were tried already."""
        return self._blame.suspects(state for state in self.held.values() if state.key not in tried)

    def goal(self, state: RequestState) -> int:
        """The number of output tokens at which the trial of a suspect is over."""
        return state.num_output_tokens + self._blame.tokens_to_bring(state)

    def begin_trial(self, state: RequestState) -> None:
        """A held request was sent to the core, alone."""
        self._move(state, RequestEvent.TRIED)

    def end_trial(self, state: RequestState, *, passed: bool) -> None:
        """The core has answered a call after a trial: the suspect is held again, unless it has ended."""
        if self.tried is state:
            self._move(state, RequestEvent.TAKEN_BACK)
        if passed:
            self._blame.passed(state)

    def to_resume(self) -> list[RequestState]:
        """The held requests, in the order in which they came."""
        return sorted(self.held.values(), key=lambda state: state.key)

    def resumed(self) -> None:
        """All that was held is with a core."""
        for state in self.to_resume():
            self._move(state, RequestEvent.RESUMED)
        self.recovering = False

    def drop(self, state: RequestState) -> None:
        """A request has ended."""
        self.held.pop(state.key, None)
        if state is self.tried:
            self.tried = None

    def validate(self, states: Collection[RequestState]) -> None:
        """Check what holds after each event; tests call it. states: all open requests.

        Raises:
            AssertionError: it does not hold.
        """
        is_open = {state.key: state for state in states}
        assert all(is_open.get(key) is state for key, state in self.held.items()), "what has ended is held"
        assert self.recovering or not self.held, "requests wait for nothing"
        if self.tried is not None:
            # Where other cores serve, all may be resumed before the core of the trial is known to be lost.
            assert self.recovering or not self.holds_new, "nothing is tried unless a core was lost"
            assert is_open.get(self.tried.key) is self.tried, "what has ended is tried"
            assert self.tried.key not in self.held, "a request is with a core and held"

    def _move(self, state: RequestState, event: RequestEvent) -> None:
        place = MOVES[self.place(state), event]
        self.held.pop(state.key, None)
        if self.tried is state:
            self.tried = None
        if place is RequestPlace.HELD:
            self.held[state.key] = state
        elif place is RequestPlace.TRIED:
            self.tried = state


def request_to_resume(state: RequestState) -> Request:
    """The request as a new core gets it, to go on where the lost one was.

    What was delivered is not delivered again: tokens, and log probabilities of the prompt. A sequence that has
    ended is sent without tokens, so that the core takes it, and is aborted then. What pools starts anew.
    """
    if not state.output_token_ids:
        return state.request
    done = state.request.output_token_ids or [[] for _ in state.finish_reasons]
    token_ids = [
        [*before, *tokens] if reason is None else []
        for before, tokens, reason in zip(done, state.output_token_ids, state.finish_reasons, strict=True)
    ]
    return msgspec.structs.replace(
        state.request,
        prompt=msgspec.structs.replace(state.request.prompt, adapter=state.adapter_content),
        output_token_ids=token_ids,
        num_prompt_logprobs=state.num_prompt_logprobs,
    )


def ended_sequences(state: RequestState) -> list[tuple[int, int]]:
    """(key, index) of each sequence of the request that has ended."""
    return [(state.key, index) for index, reason in enumerate(state.finish_reasons) if reason is not None]
