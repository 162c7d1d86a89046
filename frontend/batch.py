"""Completes a batch of prompts, and waits for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pagewire.frontend.inputs import CheckedParams
from pagewire.frontend.mailbox import Inbox
from pagewire.frontend.outputs import RequestOutput, RequestState
from pagewire.frontend.progress import Tick
from pagewire.frontend.prompt_adapters import PromptAdapterRequest
from pagewire.frontend.session import Session
from pagewire.ipc.params import RequestOutputKind, SamplingParams

SUBMIT_CHUNK = 64  # prompts tokenized before the core gets them: it computes while we tokenize the next


def complete(
    session: Session,
    prompts: Sequence[Any],
    params: Sequence[SamplingParams],
    priority: Sequence[int],
    next_id: Callable[[], str],
    tick: Tick,
    adapter: PromptAdapterRequest | None = None,
) -> tuple[list[RequestOutput], str | None]:
    """The outputs of prompts, in order, and the first error. On any exception, no request is left running.

    tick: called with each output. adapter: to put before each prompt.

    Raises:
        ValueError, TypeError: a bad prompt, parameter or adapter. EngineDeadError: the core is lost.
    """
    inbox = Inbox()
    states: list[RequestState] = []
    try:
        prepared = []
        checked: dict[int, CheckedParams] = {}  # by identity, since many prompts may share parameters
        for prompt, own, rank in zip(prompts, params, priority, strict=True):
            if id(own) not in checked:
                checked[id(own)] = session.check(final_only(own))
            prepared.append(session.prepare(prompt, checked[id(own)], next_id(), rank, 0.0, adapter))
            if len(prepared) == SUBMIT_CHUNK:
                states += session.submit(prepared, inbox)
                prepared = []
        states += session.submit(prepared, inbox)
        outputs = _wait(session, states, inbox, tick)
    finally:
        session.abort(states)
    return outputs, next((state.error for state in states if state.error is not None), None)


def _wait(session: Session, states: list[RequestState], inbox: Inbox, tick: Tick) -> list[RequestOutput]:
    done: dict[int, RequestOutput] = {}
    while len(done) < len(states):
        for state in inbox.get():
            output = session.take(state)
            if output is not None:
                done[state.key] = output
                tick(output)
    return [done[state.key] for state in states]


def final_only(params: SamplingParams) -> SamplingParams:
    """Return a copy of parameters for which there is one output, when the request has ended."""
    params = params.clone()
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return params
