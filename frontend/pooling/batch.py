"""Pools a batch of prompts, and waits for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pagewire.frontend.gradual_batch import GradualBatch
from pagewire.frontend.lora import LoRARequest
from pagewire.frontend.pooling.inputs import completed
from pagewire.frontend.pooling.outputs import PoolingRequestOutput
from pagewire.frontend.session import Session
from pagewire.ipc.pooling import PoolingParams

SUBMIT_CHUNK = 64  # prompts tokenized before the core gets them: it computes while the next are tokenized


def params_of(
    params: PoolingParams | Sequence[PoolingParams] | None,
    num_prompts: int,
    session: Session,
    task: str | None,
    truncate_prompt_tokens: int | None,
) -> list[PoolingParams]:
    """Checked parameters for each prompt, given those for all or a list; prompts may share them.

    truncate_prompt_tokens: of parameters that give none.

    Raises:
        ValueError: a parameter does not fit the model, or the list has another length than the prompts.
        TypeError: something else than parameters.
    """
    if params is None or isinstance(params, PoolingParams):
        return [complete(params, session, task, truncate_prompt_tokens)] * num_prompts
    if not isinstance(params, Sequence):
        raise TypeError(
            f"pooling_params must be PoolingParams or a list of them, got {type(params).__name__}"
        )
    if len(params) != num_prompts:
        raise ValueError(f"{num_prompts} prompts, but {len(params)} pooling parameters")
    return [complete(own, session, task, truncate_prompt_tokens) for own in params]


def complete(
    params: PoolingParams | None, session: Session, task: str | None, truncate_prompt_tokens: int | None
) -> PoolingParams:
    """Checked parameters for one prompt or several; see `params_of`."""
    if truncate_prompt_tokens is not None:
        params = PoolingParams() if params is None else params
        if not isinstance(params, PoolingParams):
            raise TypeError(f"pooling_params must be PoolingParams, got {type(params).__name__}")
        if params.truncate_prompt_tokens is None:
            params = params.clone()
            params.truncate_prompt_tokens = truncate_prompt_tokens
            params.__post_init__()
    return completed(params, session.info, task)


def pool(
    session: Session,
    prompts: Sequence[Any],
    params: Sequence[PoolingParams],
    adapters: Sequence[LoRARequest | None],
    next_id: Callable[[], str],
    tick: Callable[[PoolingRequestOutput[Any]], object],
) -> tuple[list[PoolingRequestOutput[Any]], str | None]:
    """The results of prompts, in order, and the first error; those that failed have no `outputs`.

    params: checked. adapters: of each prompt. tick: called with each result. On any exception, no request is left
    running.

    Raises:
        ValueError, TypeError: a bad prompt. EngineDeadError: the core is lost.
    """
    batch = GradualBatch(session, tick)
    try:
        for start in range(0, len(prompts), SUBMIT_CHUNK):
            chunk = slice(start, start + SUBMIT_CHUNK)
            batch.submit(
                [
                    session.prepare_pooling(prompt, own, next_id(), lora_request=adapter)
                    for prompt, own, adapter in zip(
                        prompts[chunk], params[chunk], adapters[chunk], strict=True
                    )
                ]
            )
        outputs = batch.outputs()
    finally:
        session.abort(batch.states)
    failed = next((state.error for state in batch.states if state.error is not None), None)
    return outputs, failed
