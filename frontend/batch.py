"""Completes a batch of prompts, and waits for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagewire.frontend.inputs import CheckedParams, PromptType
from pagewire.frontend.lora import LoRARequest
from pagewire.frontend.mailbox import Inbox
from pagewire.frontend.outputs import BatchError, RequestOutput, RequestState
from pagewire.frontend.progress import Tick
from pagewire.frontend.prompt_adapters import PromptAdapterRequest
from pagewire.frontend.session import Session
from pagewire.ipc.params import RequestOutputKind, SamplingParams

SUBMIT_CHUNK = 64  # prompts tokenized before the core gets them: it computes while the next are tokenized


def complete(
    session: Session,
    prompts: Sequence[PromptType],
    params: Sequence[SamplingParams],
    priority: Sequence[int],
    adapters: Sequence[LoRARequest | None],
    next_id: Callable[[], str],
    tick: Tick,
    prompt_adapter: PromptAdapterRequest | None = None,
) -> list[RequestOutput]:
    """The outputs of prompts, in order. On any error, no request of them is left running.

    params, priority, adapters: one for each prompt. next_id: gives request ids. tick: called with each output.
    prompt_adapter: to put before each prompt.

    Raises:
        ValueError, TypeError: a bad prompt, parameter or adapter. EngineDeadError: the core is lost.
        BatchError: the engine ended requests with an error.
    """
    inbox = Inbox()
    states: list[RequestState] = []
    try:
        prepared = []
        checked: dict[int, CheckedParams] = {}  # by identity, since many prompts may share parameters
        for prompt, own, rank, adapter in zip(prompts, params, priority, adapters, strict=True):
            if id(own) not in checked:
                checked[id(own)] = session.check(final_only(own))
            prepared.append(
                session.prepare(prompt, checked[id(own)], next_id(), rank, 0.0, adapter, prompt_adapter)
            )
            if len(prepared) == SUBMIT_CHUNK:
                states += session.submit(prepared, inbox)
                prepared = []
        states += session.submit(prepared, inbox)
        outputs = _wait(session, states, inbox, tick)
    finally:
        session.abort(states)
    failed = next((state.error for state in states if state.error is not None), None)
    if failed is not None:
        raise BatchError(failed, outputs)
    return outputs


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
