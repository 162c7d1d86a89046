"""What comes back: the public outputs, and the live state of requests that deltas are folded into.

    TokenDelta -> Outputs.process -> RequestState.apply ... RequestState.take -> RequestOutput

Deltas are folded in as they come, outputs are made when somebody takes them: who takes late gets merged ones.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pagewire.frontend.text.logprobs import (
    FlatLogprobs,
    PromptLogprobs,
    SampleLogprobs,
    TokenTexts,
    add_rows,
)
from pagewire.frontend.text.stop import Detokenizer
from pagewire.frontend.text.tokenizer import Tokenizer
from pagewire.ipc.errors import EngineBusyError, RequestError
from pagewire.ipc.messages import Request, RequestTiming, TokenDelta
from pagewire.ipc.params import RequestOutputKind

REFUSALS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ValueError, TypeError, EngineBusyError)
}


class RequestMetrics(msgspec.Struct):
    """When things happened to a request, in seconds since the epoch; None: not yet.

    Attributes:
        arrival_time: it came to the frontend.
        first_scheduled_time: it first took part in a step.
        first_token_time, last_token_time: a token was generated, or (last) arrived at the frontend.
        finished_time: its end arrived at the frontend.
        time_in_queue: seconds from arrival at the core to the first step.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    time_in_queue: float | None = None


@dataclass
class CompletionOutput:
    """One of the n outputs of a request; with DELTA, what is new of it.

    Attributes:
        index: which of the n it is.
        text: of the tokens; empty without `detokenize`.
        token_ids: generated tokens, a stop token included.
        cumulative_logprob: sum of the tokens' log probabilities, of the whole output; None without `logprobs`.
        logprobs: per token, if asked for.
        finish_reason: "stop", "length", "abort" or "error"; None while it runs.
        stop_reason: the stop string, or the one of `stop_token_ids`, that ended it.
        lora_request: the adapter used.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None

    def finished(self) -> bool:
        """True once it has ended."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A request so far; with DELTA, what is new of it since the last output.

    Attributes:
        request_id: its public name.
        prompt: its text, if known. prompt_token_ids: its tokens.
        prompt_logprobs: per prompt token, None for the first; None if not asked for.
        outputs: by index; with DELTA, those of which there is something new.
        finished: all outputs have ended.
        metrics: when things happened.
        num_cached_tokens: prompt tokens whose KV was in the prefix cache.
        lora_request, encoder_prompt, encoder_prompt_token_ids, kv_transfer_params: not used yet.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    lora_request: Any = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None


class OutputState:
    """One of the n outputs while it grows."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.news = False
        self._delta = params.output_kind is RequestOutputKind.DELTA
        self._flat = params.flat_logprobs
        self._num_taken = 0
        self._text = ""
        self._detokenizer = Detokenizer(tokenizer, params) if tokenizer and params.detokenize else None
        keeps_stop = (
            params.skip_special_tokens or params.include_stop_str_in_output
        )  # or leaves it out anyway
        self._unsaid: frozenset[int] = (
            frozenset() if tokenizer is None or keeps_stop else tokenizer.special_ids
        )
        self._logprobs = None if params.logprobs is None else no_logprobs(self._flat)
        self._cumulative_logprob = 0.0

    def apply(self, delta: TokenDelta, texts: TokenTexts) -> bool:
        """Fold a delta in; true if a stop string ends this output, of which the core cannot know."""
        self.news = True
        token_ids, stop = delta.token_ids, None
        if self._detokenizer is not None:
            count = self._detokenizer.feed(token_ids[:-1] if self._ends_unsaid(delta) else token_ids)
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

    def _ends_unsaid(self, delta: TokenDelta) -> bool:
        """Whether the last token is a special one that ended the output, which is no part of the text."""
        return delta.finish_reason == "stop" and bool(delta.token_ids) and delta.token_ids[-1] in self._unsaid

    def end(self, finish_reason: str, stop_reason: int | str | None = None) -> None:
        """No more tokens."""
        self.news = True
        self.finish_reason, self.stop_reason = finish_reason, stop_reason
        if self._detokenizer is not None:
            self._detokenizer.end()

    def take(self) -> CompletionOutput:
        """The output so far or, with DELTA, what is new of it."""
        self.news = False
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
        )


class RequestState:
    """A live request: deltas go in with `apply`, outputs come out with `take`.

    request: as it was sent. error, error_type: why an output of it failed, and the exception's name, if it was
    refused.
    """

    def __init__(self, request: Request, prompt_text: str | None, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self.request = request
        self.key, self.request_id = request.key, request.request_id
        self.error: str | None = None
        self.error_type: str | None = None
        self._prompt_text = prompt_text
        self._kind = params.output_kind
        self._outputs = [OutputState(index, request, tokenizer) for index in range(params.n)]
        self._num_live = params.n
        self._texts = TokenTexts(tokenizer if params.detokenize else None)
        self._prompt_logprobs: PromptLogprobs | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = no_logprobs(params.flat_logprobs)
            self._prompt_logprobs.append(None)
        self._num_cached_tokens: int | None = None
        self._metrics = RequestMetrics(arrival_time=time.time())

    @property
    def finished(self) -> bool:
        """True once all outputs have ended."""
        return self._num_live == 0

    @property
    def metrics(self) -> RequestMetrics:
        """When things happened so far."""
        return self._metrics

    @property
    def output_token_ids(self) -> list[list[int]]:
        """All tokens generated so far, by output: with them, the request can be sent to another core."""
        return [list(output.token_ids) for output in self._outputs]

    @property
    def finish_reasons(self) -> list[str | None]:
        """How each output ended; None for those that run."""
        return [output.finish_reason for output in self._outputs]

    @property
    def ripe(self) -> bool:
        """True unless `take` would give nothing yet: an output is wanted only at the end."""
        return self._kind is not RequestOutputKind.FINAL_ONLY or self.error is not None or self.finished

    def exception(self) -> Exception:
        """The error as its caller is to see it: as the core named it if it refused the request."""
        return REFUSALS.get(self.error_type or "", RequestError)(self.error)

    def apply(self, delta: TokenDelta) -> bool:
        """Fold a delta in; one for an output that has ended is ignored.

        Returns true if a stop string has just ended that output: the core must be told to drop it.
        """
        if not 0 <= delta.index < len(self._outputs):
            return False
        output = self._outputs[delta.index]
        if output.finish_reason is not None:
            return False
        if delta.prompt_logprobs is not None and self._prompt_logprobs is not None:
            add_rows(self._prompt_logprobs, delta.prompt_logprobs, self._texts)
        if delta.num_cached_tokens is not None and self._num_cached_tokens is None:
            self._num_cached_tokens = delta.num_cached_tokens
        drop = False
        if delta.token_ids or delta.finish_reason is not None or delta.error is not None:
            drop = output.apply(delta, self._texts)
            self._num_live -= output.finish_reason is not None
        if self.error is None and delta.error is not None:
            self.error, self.error_type = delta.error, delta.error_type
        self._clock(delta.timing)
        return drop

    def end(self, finish_reason: str, error: str | None = None) -> None:
        """End all outputs that still run, as when the request is aborted or the core is lost."""
        self.error = self.error or error
        for output in self._outputs:
            if output.finish_reason is None:
                output.end(finish_reason)
        self._num_live = 0
        self._clock(None)

    def take(self) -> RequestOutput | None:
        """What is new since the last take, by `output_kind`; None if nothing is."""
        finished = self.finished
        news = [output for output in self._outputs if output.news]
        if not news or (self._kind is RequestOutputKind.FINAL_ONLY and not finished):
            return None
        delta = self._kind is RequestOutputKind.DELTA
        return RequestOutput(
            self.request_id,
            self._prompt_text,
            self.request.prompt_token_ids,
            self._take_prompt_logprobs(delta),
            [output.take() for output in (news if delta else self._outputs)],
            finished,
            copy.copy(self._metrics),
            num_cached_tokens=self._num_cached_tokens,
        )

    def _take_prompt_logprobs(self, delta: bool) -> PromptLogprobs | None:
        taken = self._prompt_logprobs
        if taken is None or not delta:
            return None if taken is None else taken[:]
        self._prompt_logprobs = no_logprobs(self.request.params.flat_logprobs)
        return taken or None

    def _clock(self, timing: RequestTiming | None) -> None:
        """Note when things happened; of the core's clock, only differences mean anything here."""
        metrics, now = self._metrics, time.time()
        metrics.last_token_time = now
        if self.finished:
            metrics.finished_time = now
        if timing is not None and timing.first_token and metrics.first_token_time is None:
            metrics.time_in_queue = timing.scheduled - timing.arrived
            metrics.first_scheduled_time = metrics.arrival_time + metrics.time_in_queue
            metrics.first_token_time = metrics.arrival_time + timing.first_token - timing.arrived


class Outputs:
    """The one loop over deltas: live requests by key."""

    def __init__(self) -> None:
        self.states: dict[int, RequestState] = {}

    def add(self, state: RequestState) -> None:
        """From now on, deltas for its key go to it."""
        self.states[state.key] = state

    def drop(self, key: int) -> RequestState | None:
        """Forget a request; later deltas for its key are ignored."""
        return self.states.pop(key, None)

    def process(self, deltas: Sequence[TokenDelta]) -> tuple[list[RequestState], list[tuple[int, int]]]:
        """Fold deltas in; requests that are finished by them are forgotten.

        Returns the requests touched, each once, and the sequences (key, index) that the core must drop.
        """
        touched: dict[int, RequestState] = {}
        to_drop = []
        for delta in deltas:
            state = self.states.get(delta.key)
            if state is None:
                continue
            touched[delta.key] = state
            if state.apply(delta):
                to_drop.append((delta.key, delta.index))
            if state.finished:
                del self.states[delta.key]
        return list(touched.values()), to_drop

    def fail(self, error: Exception) -> list[RequestState]:
        """End all live requests with this error, forget them, and return them."""
        failed = list(self.states.values())
        self.states.clear()
        for state in failed:
            state.end("error", str(error))
        return failed


def no_logprobs(flat: bool) -> Any:
    """An empty container for log probabilities."""
    return FlatLogprobs() if flat else []
