"""The batches of `LLM`: prompts that are completed, pooled or searched, until all are done.

The core gets as many requests of a batch at a time as keep it busy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from pagewire.frontend import wiring
from pagewire.frontend.api.beam_requests import BeamRequest
from pagewire.frontend.api.progress import Tick
from pagewire.frontend.core.mailbox import Inbox
from pagewire.frontend.core.session import Session
from pagewire.frontend.requests.beam_search import (
    BeamSearchOutput,
    add_text,
    beam_search,
    end_tokens,
    tokens_prompt,
)
from pagewire.frontend.requests.checked_params import CheckedParams
from pagewire.frontend.requests.inputs import Prepared
from pagewire.frontend.requests.lora import LoRARequest
from pagewire.frontend.requests.outputs import RequestOutput, RequestState, batch_error
from pagewire.frontend.requests.pooling.outputs import PoolingRequestOutput
from pagewire.frontend.requests.prompt_adapters import PromptAdapterRequest
from pagewire.frontend.text.prompts import PromptType, TokensPrompt
from pagewire.ipc.wire.messages import Request
from pagewire.ipc.wire.params import BeamSearchParams, RequestOutputKind, SamplingParams
from pagewire.ipc.wire.pooling import PoolingParams

SUBMIT_CHUNK = 64  # prompts tokenized before the core gets them: it computes while the next are tokenized
# Tokens of unfinished requests, in all their sequences. A core bounds the memory of what waits there
# (`ipc.budget.unfinished_bytes`), and a batch may be of any size.
MAX_TOKENS_IN_CORE = 1 << 24


# Generates for prompts with the same parameters and adapter; returns the outputs in their order.
Generate: TypeAlias = Callable[[list[TokensPrompt], SamplingParams, LoRARequest | None], list[RequestOutput]]


class GradualBatch:
    """Requests that are submitted while earlier ones run.

    tick: called with each output.

    Attributes:
        states: the requests that were submitted, in order.
    """

    def __init__(self, session: Session, tick: Callable[[Any], object]) -> None:
        self.states: list[RequestState] = []
        self._session, self._tick = session, tick
        self._inbox = Inbox()
        self._outputs: dict[int, Any] = {}  # by key
        self._num_tokens = 0

    def submit(self, prepared: Sequence[Prepared]) -> None:
        """Submit requests; waits while the core has more than enough of them.

        Raises:
            ValueError: a request id is in use. EngineDeadError: the core is lost.
        """
        self.states += self._session.submit(prepared, self._inbox)
        self._num_tokens += sum(num_core_tokens(item.request) for item in prepared)
        while self._num_tokens > MAX_TOKENS_IN_CORE:
            self._take()

    def outputs(self) -> list[Any]:
        """Wait for the output of every request that was submitted; returns them in order.

        Raises:
            EngineDeadError: the core is lost.
        """
        while len(self._outputs) < len(self.states):
            self._take()
        return [self._outputs[state.key] for state in self.states]

    def _take(self) -> None:
        for state in self._inbox.get():
            if (output := self._session.take(state)) is not None:
                self._outputs[state.key] = output
                self._num_tokens -= num_core_tokens(state.request)
                self._tick(output)


def num_core_tokens(request: Request) -> int:
    """The tokens that the core keeps of a request's prompt: once, and for each sequence."""
    num_sequences = request.task.n if isinstance(request.task, SamplingParams) else 1
    return len(request.prompt.token_ids) * (1 + num_sequences)


def complete_or_search(
    session: Session,
    prompts: Sequence[PromptType],
    params: Sequence[SamplingParams],
    priority: Sequence[int],
    adapters: Sequence[LoRARequest | None],
    next_id: Callable[[], str],
    tick: Tick,
    prompt_adapter: PromptAdapterRequest | None = None,
) -> list[RequestOutput]:
    """As `complete_prompts`, where parameters may have `use_beam_search`; all searches step together."""
    outputs: dict[int, RequestOutput] = {}

    def run(indices: Sequence[int], prompts: list[Any], params: list[SamplingParams], tick: Tick) -> Any:
        order, own = [priority[i] for i in indices], [adapters[i] for i in indices]
        return complete_prompts(session, prompts, params, order, own, next_id, tick, prompt_adapter)

    searches = {
        i: BeamRequest(session, prompts[i], params[i], next_id(), adapters[i])
        for i in range(len(prompts))
        if params[i].use_beam_search
    }
    others = [i for i in range(len(prompts)) if i not in searches]
    done = run(others, [prompts[i] for i in others], [params[i] for i in others], tick)
    outputs.update(zip(others, done, strict=True))
    while searches:
        steps = [(i, prompt) for i, search in searches.items() for prompt in search.prompts]
        step_params = [searches[i].params for i, _ in steps]
        done = iter(run([i for i, _ in steps], [prompt for _, prompt in steps], step_params, ignore_output))
        for i, search in list(searches.items()):
            if (result := search.advance([next(done) for _ in search.prompts])) is not None:
                outputs[i] = result
                del searches[i]
                tick(result)
    return [outputs[i] for i in range(len(prompts))]


def ignore_output(output: Any) -> None:
    """Does nothing with the output of a step."""


def complete_prompts(
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
        BatchError: the engine ended requests with an error; also a ValueError if it refused the first of them.
    """
    batch = GradualBatch(session, tick)
    try:
        prepared = []
        checked: dict[int, CheckedParams] = {}  # by identity, since many prompts may share parameters
        for prompt, sampling, rank, adapter in zip(prompts, params, priority, adapters, strict=True):
            if id(sampling) not in checked:
                checked[id(sampling)] = session.intake.check(final_only(sampling))
            prepared.append(
                session.intake.prepare(
                    prompt, checked[id(sampling)], next_id(), rank, 0.0, adapter, prompt_adapter
                )
            )
            if len(prepared) == SUBMIT_CHUNK:
                batch.submit(prepared)
                prepared = []
        batch.submit(prepared)
        outputs = batch.outputs()
    finally:
        session.abort(batch.states)
    failed = next((state.exception() for state in batch.states if state.error is not None), None)
    if failed is not None:
        raise batch_error(failed, outputs)
    return outputs


def final_only(params: SamplingParams) -> SamplingParams:
    """Return a copy of parameters for which there is one output, when the request has ended."""
    params = params.clone()
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return params


def pool(
    session: Session,
    prompts: Sequence[Any],
    params: Sequence[PoolingParams],
    adapters: Sequence[LoRARequest | None],
    next_id: Callable[[], str],
    tick: Callable[[PoolingRequestOutput[Any]], object],
) -> tuple[list[PoolingRequestOutput[Any]], Exception | None]:
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
                    wiring.prepare_pooling(session.intake, prompt, task, next_id(), lora_request=adapter)
                    for prompt, task, adapter in zip(
                        prompts[chunk], params[chunk], adapters[chunk], strict=True
                    )
                ]
            )
        outputs = batch.outputs()
    finally:
        session.abort(batch.states)
    failed = next((state.exception() for state in batch.states if state.error is not None), None)
    return outputs, failed


def search_beams(
    session: Session,
    prompts: Sequence[PromptType],
    params: BeamSearchParams,
    adapters: Sequence[LoRARequest | None],
    generate: Generate,
    concurrency_limit: int | None,
    on_done: Callable[[], None],
) -> list[BeamSearchOutput]:
    """The best continuations of each prompt, in the order of the prompts.

    adapters: one for each prompt; prompts with the same adapter are searched side by side, at most
    `concurrency_limit` at a time (None: all). on_done: called after each prompt.

    Raises:
        ValueError, TypeError: a prompt or parameter is invalid, or the engine's `max_logprobs` is too small.
    """
    info = session.info
    ends = end_tokens(params, session.intake.eos_token_id, info.generation_config)
    batch = [
        tokens_prompt(prompt, session.intake.token_ids(prompt, lora_request=adapter))
        for prompt, adapter in zip(prompts, adapters, strict=True)
    ]
    indices: dict[LoRARequest | None, list[int]] = {}  # of the prompts of each adapter
    for index, adapter in enumerate(adapters):
        indices.setdefault(adapter, []).append(index)
    outputs: dict[int, BeamSearchOutput] = {}
    for adapter, same in indices.items():

        def extend(
            prompts: list[TokensPrompt], params: SamplingParams, adapter: LoRARequest | None = adapter
        ) -> list[RequestOutput]:
            return generate(prompts, params, adapter)

        size = concurrency_limit or len(same)
        for first in range(0, len(same), size):
            part = same[first : first + size]
            groups = beam_search(
                [batch[i] for i in part],
                params,
                extend,
                ends=ends,
                max_model_len=info.max_model_len,
                max_logprobs=info.max_logprobs,
                on_done=on_done,
            )
            for beam in (beam for group in groups for beam in group):
                add_text(beam, params, session.intake.tokenizer_for(adapter))
            outputs.update(zip(part, map(BeamSearchOutput, groups), strict=True))
    return [outputs[index] for index in range(len(batch))]
