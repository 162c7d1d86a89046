"""Beam search over HTTP: returns n beams for each prompt, best first."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from functools import partial

from pagewire.frontend.client import (
    LoRARequest,
    PromptAdapterRequest,
    PromptType,
    RequestOutput,
    TokensPrompt,
    search_all,
)
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.openai.constraints import demands
from pagewire.frontend.server.openai.protocol import SamplingFields
from pagewire.frontend.server.openai.sampling import salt_prompt
from pagewire.frontend.server.serving.exchange import Exchange, check_aborted
from pagewire.frontend.server.serving.service import Service
from pagewire.ipc.beams import beam_refusal
from pagewire.ipc.wire.params import BeamSearchParams, SamplingParams

RANKS = "beams are extended by tokens, without a grammar; sample with best_of instead"


def check_beam_fields(request: SamplingFields) -> None:
    """Check that a request's fields fit its `use_beam_search`.

    Raises:
        APIError, ValueError: a field has no meaning in beam search, or has one only there.
    """
    if (refused := beam_refusal(request, bool(request.use_beam_search))) is not None:
        raise refused
    if not request.use_beam_search:
        return
    if request.stream:
        raise APIError(
            400,
            "use_beam_search cannot be streamed: the best beams are known only at the end",
            param="use_beam_search",
        )
    if demands(request):
        message = "structured outputs are not supported with use_beam_search: " + RANKS
        raise APIError(400, message, param="use_beam_search")


def beam_params(service: Service, request: SamplingFields, params: SamplingParams) -> BeamSearchParams:
    """Return the parameters of the search. A temperature counts only if the request itself has one.

    Raises:
        ValueError: a value is out of range.
    """
    return BeamSearchParams(
        beam_width=params.n,
        max_tokens=params.max_tokens or service.info.max_model_len,
        ignore_eos=params.ignore_eos,
        temperature=params.temperature if request.temperature is not None else 0.0,
        length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
        include_stop_str_in_output=params.include_stop_str_in_output,
        early_stopping=request.early_stopping or False,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
    )


async def beam_outputs(
    service: Service,
    request: SamplingFields,
    prompts: Sequence[PromptType],
    params: SamplingParams,
    exchange: Exchange,
) -> list[RequestOutput]:
    """Run a beam search for each prompt, and return one output per prompt, with its n best beams as completions.

    request: checked by `check_beam_fields`.

    Raises:
        APIError: the output must have a form, which beam search does not support.
        ValueError: a prompt leaves no room, or the engine's `max_logprobs` is too small.
    """
    if params.structured_outputs is not None:  # by `tool_choice`
        raise APIError(
            400, "tool_choice cannot require calls with use_beam_search: " + RANKS, param="tool_choice"
        )
    adapter = service.adapter(request.model)
    complete = partial(
        complete_all,
        service,
        exchange=exchange,
        priority=request.priority or 0,
        lora_request=adapter,
        prompt_adapter_request=service.prompt_adapter(request.model),
    )
    return await search_all(
        service.engine.session,
        [salt_prompt(prompt, request.cache_salt) for prompt in prompts],
        beam_params(service, request, params),
        params,
        complete,
        request_id=exchange.id,
        num_best=request.n or 1,
        lora_request=adapter,
    )


async def complete_all(
    service: Service,
    prompts: list[TokensPrompt],
    params: SamplingParams,
    *,
    exchange: Exchange,
    priority: int,
    lora_request: LoRARequest | None,
    prompt_adapter_request: PromptAdapterRequest | None,
) -> list[RequestOutput]:
    """Run some prompts to their end, and return their outputs in order."""
    finals: dict[int, RequestOutput] = {}
    batches = service.engine.generate_all(
        prompts,
        params,
        exchange.id,
        priority=priority,
        admit=exchange.lease.admit,
        lora_request=lora_request,
        prompt_adapter_request=prompt_adapter_request,
    )
    async with aclosing(batches):
        async for outputs in batches:
            for index, output in outputs:
                check_aborted(output)
                finals[index] = output
    return [finals[index] for index in range(len(prompts))]
