"""The engine for asyncio: each request is an asynchronous generator of outputs.

    IO thread: deltas applied --> one call_soon_threadsafe per batch --> events of the waiting generators

Nothing queues up behind a slow consumer: its request's state grows, and it takes what is new in one piece.
"""

from __future__ import annotations

import asyncio
import uuid
import weakref
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from pagewire.frontend import wiring
from pagewire.frontend.api.async_engine import AsyncEngine
from pagewire.frontend.api.beam_requests import BeamRequest, search
from pagewire.frontend.api.loop_mailbox import LoopMailbox, OutputListener
from pagewire.frontend.api.off_loop import OFF_LOOP_CHARS, media_threads, num_chars, tokenize_off_loop
from pagewire.frontend.core import open_session
from pagewire.frontend.core.session import Session
from pagewire.frontend.core.stat_loggers import StatLoggerBase, check_loggers, ignore_usage_context
from pagewire.frontend.media.keys import has_media
from pagewire.frontend.requests.answer_budget import LogprobBudget
from pagewire.frontend.requests.checked_params import CheckedParams, params_for
from pagewire.frontend.requests.inputs import Prepared, is_embeds_prompt
from pagewire.frontend.requests.lora import LoRARequest
from pagewire.frontend.requests.outputs import RequestOutput, RequestState
from pagewire.frontend.requests.pooling.outputs import PoolingRequestOutput
from pagewire.frontend.requests.prompt_adapters import PromptAdapterRequest
from pagewire.frontend.text.prompts import PromptType
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.pooling import PoolingParams

if TYPE_CHECKING:
    from typing_extensions import Self

    from pagewire.ipc.options.engine_args import EngineArgs

T = TypeVar("T")
# Requests by key: the index of the prompt, the state.
Places: TypeAlias = dict[int, tuple[int, RequestState]]

PROMPTS_AT_ONCE = 32  # tokenized before others have their turn


class AsyncLLM(AsyncEngine):
    """An engine core, for asyncio programs.

    Made by `from_engine_args`, which spawns a core, or `attach`. It is bound to no event loop, and may be used
    from several, one after the other or at once. The calls that act on the engine as a whole (`sleep`,
    `reset_prefix_cache`, `collective_rpc`, ...) are those of `AsyncEngine`.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopMailbox]
        self._mailboxes = weakref.WeakKeyDictionary()
        self._close = weakref.finalize(self, session.close)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: Mapping[str, StatLoggerBase] | None = None,
        *,
        restarts: int = 0,
    ) -> AsyncLLM:
        """Spawn a core and wait until it is ready.

        start_engine_loop: must be True: the core runs by itself.
        usage_context, stat_loggers, restarts: see `LLMEngine.from_engine_args`.

        Raises:
            ValueError, TypeError: bad options, or a model that cannot be loaded. ModelNotFoundError: no such model.
            EngineDeadError: the core failed while it started; the text is the cause.
        """
        if start_engine_loop is not True:
            raise ValueError(
                f"start_engine_loop={start_engine_loop!r} is not supported: the core runs by itself; "
                "pause_generation holds requests back"
            )
        ignore_usage_context(usage_context)
        return cls(open_session.spawn(engine_args, restarts, check_loggers(stat_loggers)))

    @classmethod
    def _over(cls, session: Session) -> Self:
        return cls(session)

    # -------------------------------------------------------------- requests

    async def generate(
        self,
        prompt: PromptType | None = None,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        prompt_token_ids: list[int] | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the outputs of a request, in the form that `sampling_params.output_kind` names.

        Leaving the loop, closing the generator or cancelling its task aborts the request. A consumer that is
        slower than the engine gets several tokens at once.

        prompt_token_ids: older spelling of token ids as `prompt`.
        lora_request: the adapter to use. trace_headers: W3C trace context (`traceparent`), of the span that the
            request's is to be a child of; without effect unless traces are sent.
        prompt_adapter_request: embeddings to put before the prompt.

        Raises:
            ValueError, TypeError: a bad prompt, parameter, grammar or adapter, or an id that is in use.
            RequestError: the engine ended the request with an error. EngineBusyError: it does not take more.
            EngineDeadError: the core is lost.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        given = prompt_token_ids if prompt is None else prompt
        if given is None or (prompt is not None and prompt_token_ids is not None):
            raise ValueError("give a prompt")
        if params.use_beam_search:
            options: dict[str, Any] = {"priority": priority, "prompt_adapter_request": prompt_adapter_request}
            name = request_ids(request_id, 1)[0]
            request = await tokenize_off_loop(
                num_chars(given), BeamRequest, self.session, given, params, name, lora_request
            )
            yield await search(self.generate_all, request, lora_request=lora_request, **options)
            return
        stream = self.generate_all(
            [given],
            params,
            request_id,
            priority=priority,
            trace_headers=trace_headers,
            lora_request=lora_request,
            prompt_adapter_request=prompt_adapter_request,
        )
        async with aclosing(stream):
            async for outputs in stream:
                for _, output in outputs:
                    yield output

    async def generate_all(
        self,
        prompts: Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        request_id: str | None = None,
        *,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
        logprob_budget: LogprobBudget | None = None,
        admit: Callable[[Sequence[Prepared]], None] | None = None,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
    ) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
        """Stream the outputs of several prompts, which are submitted together or not at all.

        sampling_params: for all, or one for each.
        Each item has all new outputs, as (index of the prompt, output). Prompt i of several has the
        request id `request_id`-i. `logprob_budget`: of all these outputs; over it comes a ValueError. `admit` sees
        the requests before they are submitted, and may raise. Otherwise as `generate`; the first error ends all.
        """
        names = request_ids(request_id, len(prompts))
        params = await checked_params(self.session, sampling_params, len(prompts))
        prepared = []
        for prompt, name, own in zip(prompts, names, params, strict=True):
            prepared.append(
                await self._prepare(prompt, own, name, priority, lora_request, prompt_adapter_request)
            )
            if logprob_budget is not None:
                logprob_budget.expect(prepared[-1].request)
            if len(prepared) % PROMPTS_AT_ONCE == 0:
                await asyncio.sleep(0)
        if admit is not None:
            admit(prepared)
        with self._submitted(prepared, trace_headers, logprob_budget) as (places, listener):
            while places:
                if outputs := self._take(places, await listener.wait()):
                    yield outputs

    @contextmanager
    def _submitted(
        self,
        prepared: Sequence[Prepared],
        trace_headers: Mapping[str, str] | None,
        logprob_budget: LogprobBudget | None = None,
    ) -> Iterator[tuple[Places, OutputListener]]:
        """Submit requests; those that have not ended with the block are aborted."""
        keys = [item.request.key for item in prepared]
        mailbox = self._mailbox()
        listener = mailbox.open(keys)
        states: list[RequestState] = []
        try:
            states = self.session.submit(prepared, mailbox, trace_headers, logprob_budget)
            yield {state.key: (index, state) for index, state in enumerate(states)}, listener
        finally:
            mailbox.close(keys)
            self.session.abort(states)  # does nothing to those that have ended

    def _take(self, places: Places, keys: Iterable[int]) -> list[tuple[int, RequestOutput]]:
        """The new outputs of these requests; finished requests are taken out of `places`.

        Raises:
            RequestError, EngineBusyError, ValueError: the engine ended one with an error. EngineDeadError.
        """
        outputs = []
        for key in keys:
            if key not in places:  # an earlier output finished it
                continue
            index, state = places[key]
            output = self.session.take(state)
            if state.error is not None:
                raise state.exception()
            if output is not None:
                outputs.append((index, output))
                if output.finished:
                    del places[key]
        return outputs

    async def _prepare(
        self,
        prompt: PromptType,
        params: CheckedParams,
        request_id: str,
        priority: int,
        lora_request: LoRARequest | None,
        prompt_adapter_request: PromptAdapterRequest | None,
    ) -> Prepared:
        prepare = partial(
            self.session.intake.prepare,
            prompt,
            params,
            request_id,
            priority,
            0.0,
            lora_request,
            prompt_adapter_request,
        )
        if has_media(prompt):
            return await media_threads.run(prepare)
        size = num_chars(prompt)
        reads_files = prompt_adapter_request is not None or not self.session.intake.knows_adapter(
            lora_request
        )
        if reads_files or is_embeds_prompt(prompt):  # embeddings are hashed
            size = max(size, OFF_LOOP_CHARS)
        return await tokenize_off_loop(size, prepare)

    def _mailbox(self) -> LoopMailbox:
        loop = asyncio.get_running_loop()
        if (mailbox := self._mailboxes.get(loop)) is None:
            mailbox = self._mailboxes[loop] = LoopMailbox(loop)
        return mailbox

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End one or several requests; their generators end with the finish reason "abort"."""
        self.session.abort(self.session.find([request_id] if isinstance(request_id, str) else request_id))

    async def encode(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[Any], None]:
        """Pool a prompt; gives one output. Leaving the loop before aborts the request. Otherwise as `generate`."""
        params = wiring.complete_pooling_params(pooling_params, self.info, None, truncate_prompt_tokens)
        outputs = await self.pool_all(
            [prompt],
            params,
            request_id,
            priority=priority,
            trace_headers=trace_headers,
            lora_request=lora_request,
        )
        yield outputs[0]

    async def pool_all(
        self,
        prompts: Sequence[Any],
        params: PoolingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
        admit: Callable[[Sequence[Prepared]], Awaitable[None]] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[PoolingRequestOutput[Any]]:
        """The results of several prompts, which are submitted together or not at all.

        params: checked (`pooling.inputs.complete`). `admit` sees the requests before they are submitted, and may
        wait or raise. Cancelling the task aborts the requests. Otherwise as `generate_all`.
        """
        names = request_ids(request_id, len(prompts))
        prepared = []
        for start in range(0, len(prompts), PROMPTS_AT_ONCE):
            chunk = slice(start, start + PROMPTS_AT_ONCE)
            size = max(OFF_LOOP_CHARS, *map(num_chars, prompts[chunk]))  # together they take long in any case
            prepared += await tokenize_off_loop(
                size, self._prepare_pooling, prompts[chunk], params, names[chunk], priority, lora_request
            )
        if admit is not None:
            await admit(prepared)
        results: dict[int, Any] = {}
        with self._submitted(prepared, trace_headers) as (places, listener):
            while places:
                results.update(self._take(places, await listener.wait()))
        return [results[index] for index in range(len(prepared))]

    def _prepare_pooling(
        self,
        prompts: Sequence[Any],
        params: PoolingParams,
        names: Sequence[str],
        priority: int,
        lora_request: LoRARequest | None,
    ) -> list[Prepared]:
        return [
            wiring.prepare_pooling(self.session.intake, prompt, params, name, priority, 0.0, lora_request)
            for prompt, name in zip(prompts, names, strict=True)
        ]

    def shutdown(self) -> None:
        """Detach; a core that was spawned here is stopped. Open generators raise `EngineDeadError`.

        May be called twice.
        """
        self._close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.to_thread(self.shutdown)


AsyncLLMEngine = AsyncLLM


async def checked_params(
    session: Session, given: SamplingParams | Sequence[SamplingParams], num_prompts: int
) -> list[CheckedParams]:
    """Checked parameters for each prompt, given one for all or a list. Raises as `Intake.check`, `params_for`."""
    if isinstance(given, Sequence):
        return [(await checked_params(session, each, 1))[0] for each in params_for(given, num_prompts)]
    # Bad words are tokenized, and of stop strings a table is made.
    if given is not None and (given.bad_words or sum(map(len, given.stop_strings)) >= OFF_LOOP_CHARS):
        return [await asyncio.to_thread(session.intake.check, given)] * num_prompts
    return [session.intake.check(given)] * num_prompts


def request_ids(request_id: str | None, num_prompts: int) -> list[str]:
    """The ids of the requests for several prompts: `request_id`-i, or for one prompt itself. None: a random one."""
    name = request_id or uuid.uuid4().hex
    return [name] if num_prompts == 1 else [f"{name}-{i}" for i in range(num_prompts)]


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, on uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)  # type: ignore[no-any-return]
