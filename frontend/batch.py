"""Completes a batch of prompts, and waits for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagewire.frontend.gradual_batch import GradualBatch
from pagewire.frontend.inputs import CheckedParams, PromptType
from pagewire.frontend.lora import LoRARequest
from pagewire.frontend.outputs import BatchError, RequestOutput
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
    batch = GradualBatch(session, tick)
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
                batch.submit(prepared)
                prepared = []
        batch.submit(prepared)
        outputs = batch.outputs()
    finally:
        session.abort(batch.states)
    failed = next((state.error for state in batch.states if state.error is not None), None)
    if failed is not None:
        raise BatchError(failed, outputs)
    return outputs


def final_only(params: SamplingParams) -> SamplingParams:
    """Return a copy of parameters for which there is one output, when the request has ended."""
    params = params.clone()
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return params
