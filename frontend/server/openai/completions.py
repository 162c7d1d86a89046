"""The endpoint /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import UNSET

from pagewire.frontend.client import (
    CompletionOutput,
    ContextLengthError,
    PromptLogprobs,
    RequestOutput,
    TextOffsets,
    Tokenizer,
    check_characters,
    encode_within,
    infill_form,
    off_loop,
    prompt_offsets,
    prompts_of,
    tokenize_off_loop,
)
from pagewire.frontend.server.http import sse
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.openai.beams import beam_outputs, check_beam_fields
from pagewire.frontend.server.openai.embeds import embeds_in
from pagewire.frontend.server.openai.logprobs import TokenNames, completion_logprobs, prompt_logprobs
from pagewire.frontend.server.openai.protocol import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    SamplingFields,
)
from pagewire.frontend.server.openai.sampling import (
    check_stream_options,
    make_sampling_params,
    salt_prompt,
)
from pagewire.frontend.server.openai.size import check_amount, logprob_budget, writing_size
from pagewire.frontend.server.serving.exchange import Exchange
from pagewire.frontend.server.serving.generation_endpoint import Events, GenerationEndpoint
from pagewire.frontend.server.serving.service import Service, Services
from pagewire.ipc.wire.budget import MAX_PROMPTS
from pagewire.ipc.wire.params import SamplingParams

DEFAULT_MAX_TOKENS = 16  # as in OpenAI's API


def routes(services: Services) -> list[Operation]:
    """Return the route of the endpoint."""
    endpoint = GenerationEndpoint(services, "cmpl-", CompletionRequest, answer_completions)
    return [
        Operation(
            "POST",
            "/v1/completions",
            endpoint,
            "Complete one or more prompts.",
            body=CompletionRequest,
            result=Completion,
            streams=Completion,
        )
    ]


async def answer_completions(
    service: Service, request: CompletionRequest, exchange: Exchange
) -> bytes | Events:
    """Run a request, and return the JSON of the response or the events of a stream.

    Raises:
        APIError, ValueError, TypeError: the request is invalid.
        Exceptions of the engine.
    """
    writer = CompletionWriter(service, request, exchange)
    check_beam_fields(request)
    prompts = [*await embeds_in(service, request), *prompts_in(service, request)]
    params = completion_params(service, request)
    check_amount(service, len(prompts), params)
    if request.add_special_tokens is False:
        tokenizer = service.tokenizer_of(request.model)
        prompts = await without_special_tokens(service, tokenizer, prompts, params, request.cache_salt)
    exchange.prompt = prompts[0] if isinstance(prompts[0], (str, list)) else ""
    if request.use_beam_search:
        return writer.whole(await beam_outputs(service, request, prompts, params, exchange))
    batches = batches_of(service, request, prompts, params, exchange)
    if request.stream:
        return writer.stream(batches)
    finals: dict[int, RequestOutput] = {}
    async with aclosing(batches):
        async for outputs in batches:
            finals.update(outputs)
    answered = [finals[index] for index in sorted(finals)]
    return await off_loop(writing_size(answered), writer.whole, answered)


def batches_of(
    service: Service, request: SamplingFields, prompts: list[Any], params: SamplingParams, exchange: Exchange
) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
    """Submit prompts when the result is first asked for an item; see `AsyncLLM.generate_all`."""
    return service.engine.generate_all(
        [salt_prompt(prompt, request.cache_salt) for prompt in prompts],
        params,
        exchange.id,
        priority=request.priority or 0,
        trace_headers=exchange.headers,
        logprob_budget=logprob_budget(service, params.n),
        admit=exchange.lease.admit,
        lora_request=service.adapter(request.model),
        prompt_adapter_request=service.prompt_adapter(request.model),
    )


def prompts_in(service: Service, request: CompletionRequest) -> list[Any]:
    """Return the request's prompts, each as text or token ids.

    Raises:
        APIError: there are none or too many prompts, or a field is not supported.
        ContextLengthError: a prompt is far too long for the model.
    """
    given, max_model_len = request.prompt, service.info.max_model_len
    if given is None and request.prompt_embeds:
        return []
    if given is None:
        raise APIError(422, "missing required field `prompt`", param="prompt")
    is_tokens = isinstance(given, list) and bool(given) and isinstance(given[0], int)
    if is_tokens and request.truncate_prompt_tokens is None and len(given) > max_model_len:
        raise ContextLengthError(max_model_len, f"the prompt has {len(given)} tokens")
    if isinstance(given, list) and not is_tokens and len(given) > MAX_PROMPTS:
        raise APIError(400, f"there must be 1 to {MAX_PROMPTS} prompts, got {len(given)}", param="prompt")
    try:
        prompts: list[Any] = prompts_of(given)
    except TypeError as error:
        raise APIError(422, str(error), param="prompt") from None
    if any(isinstance(prompt, int) for prompt in prompts):
        raise APIError(422, "prompt mixes token ids with other prompts", param="prompt")
    if not prompts:
        raise APIError(400, f"there must be 1 to {MAX_PROMPTS} prompts, got 0", param="prompt")
    suffix = request.suffix or ""
    for prompt in prompts:
        if isinstance(prompt, str):
            check_characters(len(prompt) + len(suffix), max_model_len)
    return infills(service, request, suffix, prompts) if suffix else prompts


def infills(service: Service, request: CompletionRequest, suffix: str, prompts: list[Any]) -> list[str]:
    """Return prompts whose completions stand between the request's prompts and its suffix.

    The tokens that end such a completion become stop tokens of the request.

    Raises:
        APIError: a prompt is no text, or `echo` is set. ValueError: the model cannot fill in the middle.
    """
    if request.echo:
        raise APIError(
            400, "suffix: the prompt has marks of the model, so echo cannot return it", param="echo"
        )
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise APIError(400, "suffix needs prompts that are text", param="suffix")
    tokenizer = service.tokenizer_of(request.model)
    form = infill_form(tokenizer)
    request.stop_token_ids = [*(request.stop_token_ids or ()), *form.end_token_ids(tokenizer)]
    return [form.prompt(prompt, suffix) for prompt in prompts]


async def without_special_tokens(
    service: Service, tokenizer: Tokenizer, prompts: list[Any], params: SamplingParams, salt: str | None
) -> list[Any]:
    """Tokenize the prompts that are text, without adding special tokens; returns them as dicts with both.

    Raises:
        ContextLengthError: a prompt is too long for the model.
    """
    truncates = params.truncate_prompt_tokens is not None

    def tokenized(prompt: Any) -> Any:
        if not isinstance(prompt, str):
            return prompt
        ids = encode_within(tokenizer, prompt, service.info.max_model_len, False, truncates, salt)
        return {"prompt": prompt, "prompt_token_ids": ids}

    size = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    return await tokenize_off_loop(size, lambda: [tokenized(prompt) for prompt in prompts])


def completion_params(service: Service, request: CompletionRequest) -> SamplingParams:
    """Return the engine's parameters for a request."""
    echoes_only = bool(request.echo) and request.max_tokens == 0
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    params = make_sampling_params(service, request, 1 if echoes_only else max_tokens, request.logprobs)
    if request.echo and request.logprobs is not None and params.prompt_logprobs is None:
        return msgspec.structs.replace(params, prompt_logprobs=request.logprobs)
    return params


class CompletionWriter:
    """Converts the engine's outputs to the response to one request. Choice i * n + j is output j of prompt i.

    Raises:
        APIError: from the constructor, for an unknown model or contradictory fields.
    """

    def __init__(self, service: Service, request: CompletionRequest, exchange: Exchange) -> None:
        self.service, self.request, self.exchange = service, request, exchange
        self.model = service.model(request.model)
        self.options = check_stream_options(request)
        as_ids = request.return_tokens_as_token_ids
        self._tokenizer = service.optional_tokenizer(request.model)
        self._names = TokenNames(
            self._tokenizer,
            service.options.return_tokens_as_token_ids if as_ids is None else as_ids,
        )
        self._offsets: dict[int, TextOffsets] = {}  # by choice
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}
        self._num_choices = request.n or 1
        self._echoes_only = bool(request.echo) and request.max_tokens == 0

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Return the whole response as JSON."""
        choices = []
        for index, output in enumerate(outputs):
            self._take_prompt(index, output)
            best = output.best(self._num_choices)
            choices += [self._choice(index, output, part, first=True) for part in best]
        return sse.ENCODER.encode(self._completion(choices, usage=self.exchange.usage()))

    async def stream(self, batches: AsyncGenerator[list[tuple[int, RequestOutput]], None]) -> Events:
        """Yield the response as events; all events of a batch of outputs are one piece."""
        begun: set[int] = set()
        request = self.request
        async with aclosing(batches):
            async for outputs in batches:
                events = b""
                for index, output in outputs:
                    self._take_prompt(index, output)
                    for part in output.outputs:
                        place = self._place(index, part)
                        choice = self._choice(index, output, part, first=place not in begun)
                        begun.add(place)
                        if choice.text or choice.finish_reason or choice.logprobs or request.return_token_ids:
                            events += sse.event(self._completion([choice], usage=self._usage()))
                if events:
                    yield events
        if self.options.include_usage:
            yield sse.event(self._completion([], usage=self.exchange.usage())) + sse.DONE
        else:
            yield sse.DONE

    def _take_prompt(self, index: int, output: RequestOutput) -> None:
        """Count an output, and store the prompt's log probabilities, which come with its first output only."""
        if self._echoes_only:
            for part in output.outputs:  # the engine generates at least one token
                part.text, part.token_ids, part.logprobs = "", [], None
        self.exchange.count(index, output)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[index] = output.prompt_logprobs

    def _usage(self) -> Any:
        """Return the field `usage` of an event: counts, null (None), or absent (UNSET)."""
        if not self.options.include_usage:
            return UNSET
        return self.exchange.usage() if self.options.continuous_usage_stats else None

    def _completion(self, choices: list[CompletionChoice], usage: Any) -> Completion:
        return Completion(
            id=self.exchange.id,
            created=self.exchange.created,
            model=self.model,
            choices=choices,
            usage=usage,
        )

    def _place(self, index: int, part: CompletionOutput) -> int:
        return index * self._num_choices + part.index

    def _choice(
        self, index: int, output: RequestOutput, part: CompletionOutput, first: bool
    ) -> CompletionChoice:
        """Return a choice. first: it is the first of this choice, which carries the prompt's data if requested."""
        request = self.request
        token_ids = list(part.token_ids)
        prompt_positions = self._prompt_logprobs.get(index)
        echo = self._prompt_text(output) if first and request.echo else ""
        logprobs = None
        if request.logprobs is not None:
            logprobs = self._choice_logprobs(index, output, part, echo if first and request.echo else None)
        with_prompt_logprobs = request.prompt_logprobs is not None and first
        return CompletionChoice(
            index=self._place(index, part),
            text=echo + part.text,
            logprobs=logprobs,
            finish_reason=part.finish_reason,
            stop_reason=part.stop_reason,
            prompt_logprobs=prompt_logprobs(prompt_positions or ()) if with_prompt_logprobs else UNSET,
            token_ids=token_ids if request.return_token_ids else UNSET,
            prompt_token_ids=output.prompt_token_ids or [] if request.return_token_ids and first else UNSET,
        )

    def _choice_logprobs(
        self, index: int, output: RequestOutput, part: CompletionOutput, echo: str | None
    ) -> CompletionLogprobs:
        """Return the log probabilities of an increment. echo: the prompt's text if the increment begins with it."""
        tokenizer, top = self._tokenizer, self.request.logprobs or 0
        token_ids, positions = list(part.token_ids), list[Any](part.logprobs or ())
        places = self._offsets.setdefault(
            self._place(index, part),
            TextOffsets(
                tokenizer,
                len(echo or ""),
                self.request.skip_special_tokens is not False,
                self.request.spaces_between_special_tokens is not False,
            ),
        )
        offsets = [places.feed(token_id) for token_id in token_ids]
        if echo is not None:
            prompt_ids = output.prompt_token_ids or []
            offsets = prompt_offsets(tokenizer, prompt_ids, echo) + offsets
            token_ids, positions = (
                prompt_ids + token_ids,
                [*(self._prompt_logprobs.get(index) or ()), *positions],
            )
        return completion_logprobs(self._names, token_ids, positions, offsets, top)

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None and self.request.truncate_prompt_tokens is None:
            return output.prompt
        tokenizer = self.service.tokenizer_of(self.request.model)
        return tokenizer.decode(output.prompt_token_ids or [], skip_special_tokens=False)
