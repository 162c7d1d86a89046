"""The engine for asyncio: each request is an asynchronous generator of outputs.

    IO thread: deltas applied --> one call_soon_threadsafe per batch --> events of the waiting generators

Nothing queues up behind a slow consumer: its request's state grows, and it takes what is new in one piece.
"""

from __future__ import annotations

import asyncio
import logging
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
from typing import Any, TypeAlias, TypeVar

from pagewire.frontend.answer_budget import LogprobBudget
from pagewire.frontend.calls import AsyncEngineCalls, timed_out
from pagewire.frontend.configs import (
    DecodingConfig,
    ParallelConfig,
    SchedulerConfig,
    parallel_config,
    scheduler_config,
)
from pagewire.frontend.inputs import CheckedParams, Prepared, PromptType, is_embeds_prompt
from pagewire.frontend.loop_mailbox import Listener, LoopMailbox
from pagewire.frontend.lora import LoRARequest
from pagewire.frontend.metrics import Metric, read_metrics
from pagewire.frontend.off_loop import OFF_LOOP_CHARS, num_chars, tokenizing
from pagewire.frontend.outputs import RequestOutput, RequestState
from pagewire.frontend.pooling.batch import complete
from pagewire.frontend.pooling.outputs import PoolingRequestOutput
from pagewire.frontend.prompt_adapters import PromptAdapterRequest
from pagewire.frontend.session import Session, ignore_usage_context
from pagewire.frontend.stat_loggers import StatLoggerBase, checked, status_line
from pagewire.frontend.text.tokenizer import Tokenizer
from pagewire.ipc.calls import CALLS, HealthReport, RemoteCall
from pagewire.ipc.errors import EngineDeadError
from pagewire.ipc.lora import LoRAConfig
from pagewire.ipc.messages import EngineInfo
from pagewire.ipc.options import EngineArgs
from pagewire.ipc.params import SamplingParams
from pagewire.ipc.pooling import PoolingParams
from pagewire.ipc.sockets import CurveKeys

T = TypeVar("T")
# Requests by key: the index of the prompt, the state.
Places: TypeAlias = dict[int, tuple[int, RequestState]]

logger = logging.getLogger("pagewire.frontend")

HEALTH_SECONDS = 8.0  # longer than the core takes to say whether its worker lives
PROMPTS_AT_ONCE = 32  # tokenized before others have their turn


class AsyncLLM(AsyncEngineCalls):
    """An engine core, for asyncio programs.

    Made by `from_engine_args`, which spawns a core, or `attach`. It is bound to no event loop, and may be used
    from several, one after the other or at once. The calls that act on the engine as a whole (`sleep`,
    `reset_prefix_cache`, `collective_rpc`, ...) are those of `AsyncEngineCalls`.
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
        return cls(Session.spawn(engine_args, restarts, checked(stat_loggers)))

    @classmethod
    def attach(
        cls,
        address: str,
        *,
        curve: CurveKeys | None = None,
        tokenizer: str | None = None,
        timeout: float | None = 10.0,
        name: str = "attached",
        otlp_traces_endpoint: str | None = None,
        reattach_timeout: float = 0.0,
        peer_uid: int | None = None,
        trust_remote_code: bool = False,
    ) -> AsyncLLM:
        """Attach to a running core. `timeout`: seconds for an answer. `name`: this frontend's, in the core's
        log and metrics. `otlp_traces_endpoint`: URL of an OpenTelemetry collector that gets a span per request.
        `reattach_timeout`: seconds to wait for another core of the same model at the address, should this one be
        lost; open requests go on with it where they were.
        `peer_uid`: id of the user as whom the core runs, if it is neither this process's user nor root.
        `trust_remote_code`: run the Python code of the core's tokenizer, if it has any.

        Raises:
            PermissionError: the core runs as another user, or does not admit this user or key.
            EngineDeadError: no core answers. ProtocolError: it uses another version. ValueError: a bad address.
            If the core fails while it starts: as `from_engine_args`.
        """
        session = Session.attach(
            address,
            curve=curve,
            tokenizer=tokenizer,
            timeout=timeout,
            name=name,
            traces_endpoint=otlp_traces_endpoint,
            reattach_timeout=reattach_timeout,
            peer_uid=peer_uid,
            trust_remote_code=trust_remote_code,
        )
        return cls(session)

    # -------------------------------------------------------------- requests

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the outputs of a request, in the form that `sampling_params.output_kind` names.

        Leaving the loop, closing the generator or cancelling its task aborts the request. A consumer that is
        slower than the engine gets several tokens at once.

        lora_request: the adapter to use. trace_headers: W3C trace context (`traceparent`), of the span that the
            request's is to be a child of; without effect unless traces are sent.
        prompt_adapter_request: embeddings to put before the prompt.

        Raises:
            ValueError, TypeError: a bad prompt, parameter or adapter, or an id that is in use.
            RequestError: the engine ended the request with an error. EngineBusyError: it does not take more.
            EngineDeadError: the core is lost.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        stream = self.generate_all(
            [prompt],
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
        sampling_params: SamplingParams,
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

        Each item has all new outputs, as (index of the prompt, output). Prompt i of several has the
        request id `request_id`-i. `logprob_budget`: of all these outputs; over it comes a ValueError. `admit` sees
        the requests before they are submitted, and may raise. Otherwise as `generate`; the first error ends all.
        """
        names = request_ids(request_id, len(prompts))
        params = await self._check(sampling_params)
        prepared = []
        for prompt, name in zip(prompts, names, strict=True):
            prepared.append(
                await self._prepare(prompt, params, name, priority, lora_request, prompt_adapter_request)
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
    ) -> Iterator[tuple[Places, Listener]]:
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

    async def _check(self, params: SamplingParams) -> CheckedParams:
        # Bad words are tokenized, and of stop strings a table is made.
        if params is not None and (params.bad_words or sum(map(len, params.stop_strings)) >= OFF_LOOP_CHARS):
            return await asyncio.to_thread(self.session.check, params)
        return self.session.check(params)

    async def _prepare(
        self,
        prompt: PromptType,
        params: CheckedParams,
        request_id: str,
        priority: int,
        lora_request: LoRARequest | None,
        prompt_adapter_request: PromptAdapterRequest | None,
    ) -> Prepared:
        place = (request_id, priority, 0.0, lora_request, prompt_adapter_request)
        size = num_chars(prompt)
        reads_files = prompt_adapter_request is not None or not self.session.adapters.knows(lora_request)
        if reads_files or is_embeds_prompt(prompt):  # embeddings are hashed
            size = max(size, OFF_LOOP_CHARS)
        return await tokenizing(size, self.session.prepare, prompt, params, *place)

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
        params = complete(pooling_params, self.session, None, truncate_prompt_tokens)
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

        params: checked (`pooling.batch.complete`). `admit` sees the requests before they are submitted, and may
        wait or raise. Cancelling the task aborts the requests. Otherwise as `generate_all`.
        """
        names = request_ids(request_id, len(prompts))
        prepared = []
        for start in range(0, len(prompts), PROMPTS_AT_ONCE):
            chunk = slice(start, start + PROMPTS_AT_ONCE)
            size = max(OFF_LOOP_CHARS, *map(num_chars, prompts[chunk]))  # together they take long in any case
            prepared += await tokenizing(
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
            self.session.prepare_pooling(prompt, params, name, priority, 0.0, lora_request)
            for prompt, name in zip(prompts, names, strict=True)
        ]

    # -------------------------------------------------------------- the engine as a whole

    async def reset_mm_cache(self) -> None:
        """Does nothing: there is no multi-modal cache yet."""

    async def get_metrics(self) -> list[Metric]:
        """A snapshot of the core's metrics, over all its frontends."""
        return read_metrics(await asyncio.wrap_future(self.session.call("metrics")))

    async def do_log_stats(self) -> None:
        """Log the core's state in one line, and call the program's own loggers of statistics."""
        logger.info("%s", status_line(await asyncio.wrap_future(self.session.call("status"))))
        await asyncio.to_thread(self.session.stat_loggers.log)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Add an adapter to the engine; see `LLM.add_lora`."""
        adding = await asyncio.to_thread(self.session.add_lora, lora_request)
        return bool(await asyncio.wrap_future(adding))

    async def get_tokenizer(self, lora_request: LoRARequest | None = None) -> Tokenizer | None:
        """The light tokenizer of the frontend, or of an adapter; None with `skip_tokenizer_init`."""
        return await asyncio.to_thread(self.session.tokenizer_for, lora_request)

    async def get_model_config(self) -> EngineInfo:
        """The model, its sizes and the options of the core, as the core reported them."""
        return self.session.info

    async def get_parallel_config(self) -> ParallelConfig:
        """How the model is split."""
        return parallel_config(self.session.info)

    async def get_scheduler_config(self) -> SchedulerConfig:
        """Limits of the scheduler."""
        return scheduler_config(self.session.info)

    async def get_decoding_config(self) -> DecodingConfig:
        """How structured output is made."""
        return DecodingConfig()

    async def get_lora_config(self) -> LoRAConfig | None:
        """The limits of adapters; None if the engine serves none."""
        return self.session.info.lora

    @property
    def info(self) -> EngineInfo:
        """The model, its sizes and the options of the core, as the core reported them."""
        return self.session.info

    async def check_health(self) -> None:
        """Return if the engine is proven to live: every worker took a step or answered a ping within seconds.

        Raises:
            EngineDeadError: it does not; the message gives the cause.
        """
        report = await self.health()
        if not report["alive"]:
            raise EngineDeadError(report["reason"])

    async def health(self) -> HealthReport:
        """The core's answer to `check_health`: "alive" and "ready", truth values, and the "reason" if not both.

        Raises:
            EngineDeadError: the core is lost, does not answer, or answers with something else.
        """
        if self.dead_error is not None:
            raise EngineDeadError(*self.dead_error.args)
        answer = asyncio.wrap_future(self.session.call("check_health"))
        try:
            report: HealthReport = CALLS["check_health"].answer(
                await asyncio.wait_for(answer, HEALTH_SECONDS)
            )
            return report
        except asyncio.TimeoutError:
            text = f"the engine core has not said for {HEALTH_SECONDS:g} s whether it is healthy"
            raise EngineDeadError(text) from None
        except EngineDeadError:
            raise
        except Exception as error:  # of any type: a core that answers so is not proven to live
            raise EngineDeadError(f"the engine core does not say whether it is healthy: {error}") from None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """The error by which the core was lost; None while it runs."""
        return self.session.dead

    @property
    def errored(self) -> bool:
        """True once the core is lost."""
        return self.dead_error is not None

    @property
    def is_running(self) -> bool:
        """True until the core is lost or `shutdown` is called."""
        return self.dead_error is None

    @property
    def is_stopped(self) -> bool:
        """The contrary of `is_running`."""
        return not self.is_running

    def shutdown(self) -> None:
        """Detach; a core that was spawned here is stopped. Open generators raise `EngineDeadError`.

        May be called twice.
        """
        self._close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.to_thread(self.shutdown)

    async def _answer(self, call: RemoteCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        timeout = call.local(args, kwargs).get("timeout")
        answer = asyncio.wrap_future(self.session.call(call.name, *args, **kwargs))
        try:
            return await asyncio.wait_for(answer, timeout)
        except asyncio.TimeoutError:
            if timeout is None:  # the call itself failed with it
                raise
            raise timed_out(call, args, kwargs, timeout) from None


AsyncLLMEngine = AsyncLLM


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
