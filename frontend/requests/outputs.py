"""The public outputs of requests, and the state from which they are built.

    TokenDelta -> Outputs.process -> RequestState.apply ... RequestState.take -> RequestOutput

Deltas are added to the state on arrival; an output is created when it is taken. A slow reader therefore gets
several deltas merged into one output.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from pagewire.frontend.requests.answer_budget import AnswerTooLargeError, LogprobBudget, num_logprobs
from pagewire.frontend.requests.lora import LoRARequest, UsedAdapter
from pagewire.frontend.requests.sources import SourceText
from pagewire.frontend.text.logprobs import (
    FlatLogprobs,
    PromptLogprobs,
    SampleLogprobs,
    TokenTexts,
    add_rows,
)
from pagewire.frontend.text.stop import open_detokenizer
from pagewire.frontend.text.tokenizer import Tokenizer
from pagewire.ipc.errors import (
    AdapterCrashedWorkerError,
    EngineAsleepError,
    EngineBusyError,
    EngineDeadError,
    EngineStalledError,
    RequestCrashedEngineError,
    RequestError,
    WeightsChangedError,
    error_place,
    error_text,
    error_type,
    received_error,
)
from pagewire.ipc.wire.items import RetainedPrefix
from pagewire.ipc.wire.messages import Abort, Deltas, Request, RequestTiming, TokenDelta
from pagewire.ipc.wire.params import RequestOutputKind
from pagewire.ipc.wire.thinking import finish_of

logger = logging.getLogger("pagewire.frontend")

# Exceptions with these names are raised to the caller as such, others as RequestError.
REFUSALS = {
    kind.__name__
    for kind in (
        ValueError,
        TypeError,
        PermissionError,
        EngineBusyError,
        EngineStalledError,
        EngineAsleepError,
        EngineDeadError,
        RequestCrashedEngineError,
        AdapterCrashedWorkerError,
        WeightsChangedError,
    )
}


class RequestMetrics(msgspec.Struct):
    """Times of a request, in seconds since the epoch; None: not reached yet. And counts of draft tokens.

    Attributes:
        arrival_time: the request was submitted to the frontend, or arrived before that at the caller.
        received_time: the core had it; the same as `arrival_time` if the core is on another machine.
        first_scheduled_time: it was first part of a step.
        first_token_time: its first token was generated. last_token_time: its last token arrived at the frontend.
        finished_time: its end arrived at the frontend.
        time_in_queue: duration in seconds from when the core had it to the first step.
        num_draft_tokens: proposed tokens that were verified (speculative decoding).
        num_accepted_tokens: its tokens that had been proposed.
    """

    arrival_time: float
    received_time: float | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    time_in_queue: float | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass
class CompletionOutput:
    """One of the n outputs of a request; with DELTA, its increment since the last one.

    Attributes:
        index: position among the n outputs, from 0.
        text: text of the tokens; empty without `detokenize`.
        token_ids: generated tokens, including a stop token.
        cumulative_logprob: sum of the log probabilities of all tokens so far; None without `logprobs`.
        logprobs: log probabilities per token; None without `logprobs`.
        finish_reason: "stop", "length", "abort" or "error"; None while it runs.
        stop_reason: the stop string, or the token of `stop_token_ids`, that ended the output.
        lora_request: the adapter used.
        thinking_finish_reason: with `thinking_token_budget`, at the end of the output: "budget" if the reasoning
            ended because its budget was spent, "stop" if the model ended it; None if it never ended.
        weights_versions: which weights gave its tokens, if the engine's were changed (`LLM.update_weights`): the
            index of an output token, and the version from that one on. Before the first, and if it is empty, the
            weights are those that the engine has started with.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None
    thinking_finish_reason: str | None = None
    weights_versions: Sequence[tuple[int, str]] = ()

    @property
    def weights_version(self) -> str:
        """The version of the weights that gave its last token; empty: those that the engine has started with."""
        return self.weights_versions[-1][1] if self.weights_versions else ""

    def finished(self) -> bool:
        """Return True once the output has ended."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """The results of a request so far; with DELTA, the increment since the last one.

    Attributes:
        request_id: the caller's id of the request.
        prompt: text of the prompt, if known. prompt_token_ids: its tokens.
        prompt_logprobs: log probabilities per prompt token, None for the first; None if not requested.
        outputs: the outputs by index; with DELTA, only those with an increment.
        finished: all outputs have ended.
        metrics: times of the request.
        num_cached_tokens: prompt tokens whose KV was in the prefix cache.
        retained: what became of each `cache_retention` of the prompt, in order.
        lora_request: the adapter used.
        encoder_prompt, encoder_prompt_token_ids: what the encoder of an encoder-decoder reads; None of other
            models. prompt and prompt_token_ids are then the decoder's.
        kv_transfer_params: not used yet.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    lora_request: LoRARequest | None = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    retained: Sequence[RetainedPrefix] = ()

    def best(self, num: int) -> list[CompletionOutput]:
        """Return the `num` outputs with the highest log probability per token, best first."""
        return best_outputs(self.outputs, num)


class BatchError(RequestError):
    """Some requests of a batch ended with an error; the message is that of the first.

    Attributes:
        outputs: of all requests, in order; those that failed have the finish reason "error", or (of requests to
            pool) None for `outputs`.
    """

    def __init__(self, message: str, outputs: Sequence[Any]) -> None:
        super().__init__(message)
        self.outputs = list(outputs)


class RefusedBatchError(BatchError, ValueError):
    """A `BatchError` whose first request was refused for what it asks, such as a malformed grammar."""


def batch_error(error: Exception, outputs: Sequence[Any]) -> BatchError:
    """The error of a batch whose first failed request ended with `error`."""
    return (RefusedBatchError if isinstance(error, ValueError) else BatchError)(str(error), outputs)


def best_outputs(outputs: Sequence[CompletionOutput], num: int) -> list[CompletionOutput]:
    """Return the `num` outputs with the highest log probability per token, best first; all if there are no more."""
    if len(outputs) <= num:
        return list(outputs)

    def per_token(output: CompletionOutput) -> float:
        return (output.cumulative_logprob or 0.0) / max(1, len(output.token_ids))

    best = sorted(outputs, key=per_token, reverse=True)[:num]
    return [replace(output, index=index) for index, output in enumerate(best)]


class OutputState:
    """State of one of the n outputs of a request."""

    def __init__(
        self,
        index: int,
        request: Request,
        tokenizer: Tokenizer | None,
        lora_request: LoRARequest | None = None,
    ) -> None:
        params = request.params
        self.index = index
        self._lora_request = lora_request
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.weights_versions: tuple[tuple[int, str], ...] = ()
        self.changed = False
        self._delta = params.output_kind is RequestOutputKind.DELTA
        self._flat = params.flat_logprobs
        self._request = request
        self._num_taken = 0
        self._text = ""
        self._detokenizer = open_detokenizer(tokenizer, params) if tokenizer and params.detokenize else None
        # Special tokens that are left out of the text if they end the output. With `skip_special_tokens` the
        # decoder drops them itself.
        keep_stop = params.skip_special_tokens or params.include_stop_str_in_output
        self._hidden_stop_ids: frozenset[int] = (
            frozenset() if tokenizer is None or keep_stop else tokenizer.special_ids
        )
        self._logprobs = None if params.logprobs is None else no_logprobs(self._flat)
        self._cumulative_logprob = 0.0

    def append(self, token_id: int) -> bool:
        """Add a token with which nothing else came. Returns True if a stop string ends the output."""
        self.changed = True
        if self._detokenizer is not None:
            self._detokenizer.feed([token_id])
        self.token_ids.append(token_id)
        if self._detokenizer is None or self._detokenizer.stop is None:
            return False
        self.end("stop", self._detokenizer.stop)
        return True

    def apply(self, delta: TokenDelta, texts: TokenTexts) -> bool:
        """Add a delta. Returns True if a stop string ends the output, which the core does not know."""
        self.changed = True
        if delta.weights:
            self._note_versions(delta.weights)
        token_ids, stop = delta.token_ids, None
        if self._detokenizer is not None:
            hidden = delta.finish_reason == "stop" and self._ends_hidden(token_ids)
            count = self._detokenizer.feed(token_ids[:-1] if hidden else token_ids)
            stop = self._detokenizer.stop
            if stop is not None:
                token_ids = token_ids[:count]
        self.token_ids += token_ids
        if delta.logprobs is not None and self._logprobs is not None:
            self._cumulative_logprob += add_rows(self._logprobs, delta.logprobs, texts, len(token_ids))
        if stop is not None:
            self.end("stop", stop)
        elif delta.finish_reason is not None or delta.error is not None:
            self.end(delta.finish_reason or "error", delta.stop_reason)
        return stop is not None and delta.finish_reason is None

    def _note_versions(self, versions: Sequence[tuple[int, str]]) -> None:
        """Add which weights gave the tokens; a core that took the request over does not know of those before."""
        first = versions[0][0]
        earlier = (span for span in self.weights_versions if span[0] < first)
        known = (*earlier, *versions)
        self.weights_versions = known if any(name for _, name in known) else ()

    def _ends_hidden(self, token_ids: Sequence[int]) -> bool:
        """Return True if the last token, which ended the output, is a special one that is not part of the text."""
        return bool(token_ids) and token_ids[-1] in self._hidden_stop_ids

    def end(self, finish_reason: str, stop_reason: int | str | None = None) -> None:
        """End the output with a reason."""
        self.changed = True
        self.finish_reason, self.stop_reason = finish_reason, stop_reason
        if self._detokenizer is not None:
            self._detokenizer.end()

    def fail(self) -> None:
        """End the output with the reason "error". Never raises: a broken detokenizer keeps what it holds back."""
        with suppress(Exception):
            self.end("error")

    def take(self) -> CompletionOutput:
        """Return the output so far or, with DELTA, its increment since the last call."""
        self.changed = False
        text = "" if self._detokenizer is None else self._detokenizer.read()
        first, self._num_taken = self._num_taken, len(self.token_ids)
        logprobs = self._logprobs
        if self._delta:
            self._logprobs = None if logprobs is None else no_logprobs(self._flat)
        else:
            self._text += text
            text, first = self._text, 0
            logprobs = None if logprobs is None else logprobs[:]
        return CompletionOutput(
            self.index,
            text,
            self.token_ids[first:],
            None if logprobs is None else self._cumulative_logprob,
            logprobs,
            self.finish_reason,
            self.stop_reason,
            self._lora_request,
            None if self.finish_reason is None else self._thinking_finish_reason(),
            self.weights_versions,
        )

    def _thinking_finish_reason(self) -> str | None:
        params = self._request.params
        if params.thinking_token_budget is None or params.thinking is None:
            return None
        prompt_ids = self._request.prompt.token_ids
        return finish_of(params.thinking_token_budget, params.thinking, prompt_ids, self.token_ids)


class RequestState:
    """State of an unfinished request: `apply` adds deltas, `take` returns outputs.

    Attributes:
        request: the request as sent to the core. key: its number in the frontend. request_id: the caller's id.
        error: message of the failure of an output; None if none failed.
        error_type: name of the exception with which the request was refused or ended; else None.
        error_place: the field that the error is about; else None.
        num_prompt_logprobs: prompt positions, from position 1 on, whose log probabilities have arrived.
        adapter_content: sha256 of its adapter's content; empty until it is known.

    num_virtual_tokens: tokens of a prompt adapter or a source before the prompt. Outputs show the prompt without
        them. source: what the encoder of an encoder-decoder reads.
    """

    def __init__(
        self,
        request: Request,
        prompt_text: str | None,
        tokenizer: Tokenizer | None,
        logprob_budget: LogprobBudget | None = None,
        adapter: UsedAdapter | None = None,
        num_virtual_tokens: int = 0,
        source: SourceText | None = None,
    ) -> None:
        params = request.params
        self._start(request)
        self._lora_request = None if adapter is None else adapter.lora_request
        self._num_virtual_tokens, self._source = num_virtual_tokens, source
        token_ids = request.prompt.token_ids
        self._prompt_token_ids = token_ids[num_virtual_tokens:] if num_virtual_tokens else token_ids
        self._prompt_text = prompt_text
        self._budget, self._num_logprobs_kept = logprob_budget, 0
        self._delta = params.output_kind is RequestOutputKind.DELTA
        self._final_only = params.output_kind is RequestOutputKind.FINAL_ONLY
        self._outputs = [
            OutputState(index, request, tokenizer, self._lora_request) for index in range(params.n)
        ]
        self._num_returned = None if params.best_of is None else params.num_returned
        self._num_live = params.n
        self._texts = TokenTexts(tokenizer if params.detokenize else None)
        self._prompt_logprobs: PromptLogprobs | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = no_logprobs(params.flat_logprobs)
            self._prompt_logprobs.append(None)

    def _start(self, request: Request) -> None:
        """Set what a request of any kind has."""
        self.request = request
        self.key, self.request_id = request.key, request.request_id
        self.error: str | None = None
        self.error_type: str | None = None
        self.error_place: str | None = None
        self.num_prompt_logprobs = 0
        self.adapter_content = b""
        self._num_cached_tokens: int | None = None
        self._retained: Sequence[RetainedPrefix] = ()
        self._metrics = RequestMetrics(arrival_time=time.time() - request.age)

    @property
    def finished(self) -> bool:
        """True once all outputs have ended."""
        return self._num_live == 0

    @property
    def metrics(self) -> RequestMetrics:
        """Times of the request so far."""
        return self._metrics

    @property
    def output_token_ids(self) -> list[list[int]]:
        """All tokens generated so far, by output. With them the request can be continued on another core."""
        return [list(output.token_ids) for output in self._outputs]

    @property
    def num_outputs(self) -> int:
        """How many outputs the request has, ended ones included."""
        return len(self._outputs)

    @property
    def num_output_tokens(self) -> int:
        """How many tokens all outputs have so far."""
        return sum(len(output.token_ids) for output in self._outputs)

    @property
    def finish_reasons(self) -> list[str | None]:
        """Finish reason of each output; None while it runs."""
        return [output.finish_reason for output in self._outputs]

    @property
    def has_output(self) -> bool:
        """True if `take` may return an output: with FINAL_ONLY, only at the end or after an error."""
        return not self._final_only or self._num_live == 0 or self.error is not None

    def exception(self) -> Exception:
        """Return the exception for the caller: of the type `error_type` if it is a known one, else RequestError."""
        if self.error_type not in REFUSALS:
            return RequestError(self.error)
        return received_error(self.error or "", self.error_type, self.error_place)

    def append(self, token_id: int, now: float) -> bool:
        """Add a token of the first output, with which nothing else came; as `apply`.

        now: seconds since the epoch.
        """
        if not self._outputs or (output := self._outputs[0]).finish_reason is not None:
            return False
        self._metrics.last_token_time = now
        if not output.append(token_id):
            return False
        self._num_live -= 1
        self._clock(None)
        return True

    def apply(self, delta: TokenDelta) -> bool:
        """Add a delta; a delta for an output that has ended is ignored.

        Returns True if a stop string has just ended the output: the caller must make the core drop it.

        Raises:
            AnswerTooLargeError: the answer has no room for the log probabilities.
        """
        if not 0 <= delta.index < len(self._outputs):
            return False
        output = self._outputs[delta.index]
        if output.finish_reason is not None:
            return False
        if delta.logprobs is not None or delta.prompt_logprobs is not None:
            self._keep_logprobs(delta)
        if delta.num_cached_tokens is not None and self._num_cached_tokens is None:
            self._num_cached_tokens = max(0, delta.num_cached_tokens - self._num_virtual_tokens)
        if delta.retained:
            self._retained = delta.retained
        if delta.adapter:
            self.adapter_content = delta.adapter
        drop = False
        if delta.token_ids or delta.finish_reason is not None or delta.error is not None:
            drop = output.apply(delta, self._texts)
            self._num_live -= output.finish_reason is not None
        if self.error is None and delta.error is not None:
            self.error, self.error_type, self.error_place = delta.error, delta.error_type, delta.error_place
        if delta.num_drafts:
            self._metrics.num_draft_tokens += delta.num_drafts
            self._metrics.num_accepted_tokens += delta.num_accepted
        self._clock(delta.timing)
        return drop

    def _keep_logprobs(self, delta: TokenDelta) -> None:
        """Count the log probabilities of a delta, and add those of the prompt."""
        if self._budget is not None:
            number = num_logprobs(delta)
            self._budget.keep(number)
            self._num_logprobs_kept += number
        if delta.prompt_logprobs is not None and self._prompt_logprobs is not None:
            rows = delta.prompt_logprobs.after(self._num_virtual_tokens - self.num_prompt_logprobs)
            add_rows(self._prompt_logprobs, rows, self._texts)
            self.num_prompt_logprobs += delta.prompt_logprobs.token_ids.shape[0]

    def end(self, finish_reason: str) -> None:
        """End all running outputs, for example because the request is aborted."""
        for output in self._outputs:
            if output.finish_reason is None:
                try:
                    output.end(finish_reason)
                except Exception:  # of a tokenizer's decoder: the output ends without its last characters
                    logger.exception("request %.100r: the end of its text is lost", self.request_id)
        self._num_live = 0
        self._clock(None)

    def fail(self, error: Exception) -> None:
        """End all running outputs with an error, for example because the core is lost. Never raises."""
        if self.error is None:
            self.error, self.error_type = error_text(error), error_type(error)
            self.error_place = error_place(error)
        for output in self._outputs:
            if output.finish_reason is None:
                output.fail()
        self._num_live = 0
        self._clock(None)

    def take(self) -> RequestOutput | None:
        """Return the next output, according to `output_kind`; None if nothing has changed since the last call."""
        finished = self.finished
        changed = [output for output in self._outputs if output.changed]
        if not changed or (self._final_only and not finished):
            return None
        if self._delta and self._num_logprobs_kept and self._budget is not None:
            self._budget.release(self._num_logprobs_kept)
            self._num_logprobs_kept = 0
        outputs = [output.take() for output in (changed if self._delta else self._outputs)]
        if self._num_returned is not None:
            outputs = best_outputs(outputs, self._num_returned)
        return RequestOutput(
            self.request_id,
            self._prompt_text,
            self._prompt_token_ids,
            None if self._prompt_logprobs is None else self._take_prompt_logprobs(self._prompt_logprobs),
            outputs,
            finished,
            msgspec.structs.replace(self._metrics),
            self._lora_request,
            None if self._source is None else self._source.text,
            None if self._source is None else self._source.token_ids,
            self._num_cached_tokens,
            retained=self._retained,
        )

    def _take_prompt_logprobs(self, taken: PromptLogprobs) -> PromptLogprobs | None:
        if not self._delta:
            return taken[:]
        self._prompt_logprobs = no_logprobs(self.request.params.flat_logprobs)
        return taken or None

    def _clock(self, timing: RequestTiming | None) -> None:
        """Record times."""
        metrics, now = self._metrics, time.time()
        metrics.last_token_time = now
        if self._num_live == 0:
            metrics.finished_time = now
        if timing is not None and timing.first_token and metrics.first_token_time is None:
            received = received_time(timing, metrics.arrival_time, now, time.monotonic())
            metrics.received_time = received
            metrics.time_in_queue = timing.scheduled - timing.arrived
            metrics.first_scheduled_time = received + metrics.time_in_queue
            metrics.first_token_time = received + timing.first_token - timing.arrived


def received_time(timing: RequestTiming, arrival: float, now: float, monotonic: float) -> float:
    """When the core had a request, in seconds since the epoch.

    The core's clock is ours if it runs on this machine. If it is another, what it says is seldom a time between
    arrival and now; then only its differences count, and the way to the core as nothing.

    arrival: its time here, in seconds since the epoch. now, monotonic: the present, by both clocks.
    """
    received = timing.arrived + now - monotonic
    latest = now - (timing.first_token - timing.arrived)
    return received if arrival <= received <= latest else arrival


class Outputs:
    """Unfinished requests by key, and the distribution of deltas to them."""

    def __init__(self) -> None:
        self.states: dict[int, RequestState] = {}

    def add(self, state: RequestState) -> None:
        """Add a request, which then gets the deltas for its key."""
        self.states[state.key] = state

    def drop(self, key: int) -> RequestState | None:
        """Remove a request and return it; later deltas for its key are ignored."""
        return self.states.pop(key, None)

    def process(self, deltas: Deltas) -> tuple[list[RequestState], Abort]:
        """Add output to its requests, and remove the requests that have finished.

        An exception that output causes, for example in a tokenizer's decoder, ends its request alone.

        Returns the requests that got output and have some to take (`RequestState.has_output`), each once, and what
        the core must drop, for it does not know the end.
        """
        touched: dict[int, RequestState] = {}
        to_drop = Abort([], [])
        now = time.time()
        for key, token_id in zip(deltas.keys, deltas.token_ids, strict=True):
            if (state := self.states.get(key)) is None:
                continue
            touched[key] = state
            try:
                if state.append(token_id, now):
                    to_drop.sequences.append((key, 0))
            except Exception as error:
                self._fail(state, error, to_drop)
        for delta in deltas.deltas:
            if (state := self.states.get(delta.key)) is None:
                continue
            touched[delta.key] = state
            try:
                if state.apply(delta):
                    to_drop.sequences.append((delta.key, delta.index))
            except Exception as error:
                self._fail(state, error, to_drop)
        ready = [state for state in touched.values() if state.has_output]
        for state in ready:
            if state.finished:
                del self.states[state.key]
        return ready, to_drop

    @staticmethod
    def _fail(state: RequestState, error: Exception, to_drop: Abort) -> None:
        """End a request whose output could not be processed."""
        to_drop.keys.append(state.key)
        if isinstance(error, AnswerTooLargeError):
            state.fail(error)
            return
        logger.exception("request %.100r: its output could not be processed", state.request_id)
        name = type(error).__name__
        state.fail(RequestError(f"the output of the request could not be processed: {name}: {error}"))


def no_logprobs(flat: bool) -> Any:
    """Return an empty container for log probabilities."""
    return FlatLogprobs() if flat else []
