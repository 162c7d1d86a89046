"""The common part of the endpoints that pool: inputs, limits, and running the requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pagewire.frontend.client import (
    PoolingRequestOutput,
    Prepared,
    TextPair,
    check_characters,
    complete_pooling_params,
    prompts_of,
)
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.openai.sampling import salt_prompt
from pagewire.frontend.server.pooling.protocol import PoolingFields, PoolingUsage
from pagewire.frontend.server.serving.exchange import Exchange
from pagewire.frontend.server.serving.service import Service
from pagewire.ipc.errors import FieldValueError
from pagewire.ipc.wire.budget import MAX_HTTP_POOLED_BYTES, MAX_POOLED_INPUTS
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.pooling import PoolingInfo, PoolingParams


def inputs_in(service: Service, given: Any, param: str = "input") -> list[Any]:
    """The inputs of a request, each as text or token ids.

    Raises:
        APIError: there are none or too many. TypeError: texts and token ids are mixed.
        ValueError: one is empty, or a text is far too long for the model.
    """
    is_tokens = isinstance(given, list) and bool(given) and isinstance(given[0], int)
    if isinstance(given, list) and not is_tokens:
        check_num_prompts(len(given), param)
    prompts: list[Any] = prompts_of(given)
    for prompt in prompts:
        check_pooling_input(service, prompt)
    return prompts


def check_num_prompts(number: int, param: str) -> None:
    """Refuse a request with no inputs or too many; raises APIError."""
    if not 1 <= number <= MAX_POOLED_INPUTS:
        message = f"{param}: there must be 1 to {MAX_POOLED_INPUTS} inputs, got {number}"
        raise APIError(400, message, param=param, code="request_too_large" if number else None)


def check_pooling_input(service: Service, prompt: str | list[int]) -> None:
    """Refuse a text that is empty, or far too long to be tokenized; raises ValueError."""
    if not prompt:
        raise FieldValueError("input", "must not be empty")
    if isinstance(prompt, str):
        check_characters(len(prompt), service.info.max_model_len)


def check_pairs(service: Service, prompts: Sequence[Any], param: str) -> None:
    """Refuse pairs with more text together than a body may have, such as of a long query and many documents.

    Each pair is tokenized by itself. Raises APIError.
    """
    pairs = [prompt for prompt in prompts if isinstance(prompt, TextPair)]
    num_chars = sum(len(pair.first) + len(pair.second) for pair in pairs)
    if num_chars > (limit := service.options.max_request_bytes):
        message = (
            f"{param}: the {len(pairs)} pairs have {num_chars} characters; at most {limit} are allowed: send fewer "
            "texts at a time"
        )
        raise APIError(400, message, param=param, code="request_too_large")


def params_in(service: Service, request: PoolingFields, task: str | None, **fields: Any) -> PoolingParams:
    """The engine's parameters for a request.

    Raises:
        ValueError: they do not fit the model, or it generates.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    params = PoolingParams(
        truncate_prompt_tokens=request.truncate_prompt_tokens, prompt_name=request.prompt_name, **given
    )
    return complete_pooling_params(params, service.engine.info, task, None)


async def pool_prompts(
    service: Service,
    request: PoolingFields,
    exchange: Exchange,
    prompts: Sequence[Any],
    params: PoolingParams,
) -> list[PoolingRequestOutput[Any]]:
    """The results of a request's inputs, in order; counts its tokens.

    Raises:
        APIError: the results would be too large, or the request was aborted. Exceptions of the engine.
    """
    first = prompts[0].get("prompt") if isinstance(prompts[0], dict) else prompts[0]
    exchange.prompt = first if isinstance(first, (str, list)) else ""
    pooling = service.info.pooling
    assert pooling is not None, "the parameters are for it"
    outputs = await service.engine.pool_all(
        [with_salt(prompt, request.cache_salt) for prompt in prompts],
        params,
        exchange.id,
        priority=request.priority or 0,
        trace_headers=exchange.headers,
        admit=admission(pooling, params, exchange),
        lora_request=service.adapter(request.model),
    )
    for output in outputs:
        exchange.num_prompt += len(output.prompt_token_ids)
        exchange.num_cached += output.num_cached_tokens
        if output.outputs is None:
            raise APIError(499, "the request was aborted", code="aborted")
    exchange.reasons.append("stop")
    return outputs


def with_salt(prompt: Any, salt: str | None) -> Any:
    """A prompt with the cache salt of its request."""
    return (
        TextPair(prompt.first, prompt.second, salt)
        if isinstance(prompt, TextPair)
        else salt_prompt(prompt, salt)
    )


def admission(
    info: PoolingInfo, params: PoolingParams, exchange: Exchange
) -> Callable[[Sequence[Prepared]], Awaitable[None]]:
    """Checks the size of all results together, counts the tokens in flight, and waits for memory for results."""

    async def admit(prepared: Sequence[Prepared]) -> None:
        lengths = (len(item.request.prompt.token_ids) for item in prepared)
        num_bytes = sum(info.result_bytes(params, length) for length in lengths)
        if num_bytes > MAX_HTTP_POOLED_BYTES:
            raise APIError(
                400,
                f"the results of this request would have {num_bytes} bytes; at most {MAX_HTTP_POOLED_BYTES} are "
                "allowed: send fewer or shorter inputs at a time",
                param="input",
                code="request_too_large",
            )
        exchange.lease.admit(prepared)
        await exchange.keep(num_bytes)

    return admit


def usage(exchange: Exchange) -> PoolingUsage:
    """The token counts of a request."""
    return PoolingUsage(exchange.num_prompt, exchange.num_prompt)


def work_size(outputs: Sequence[PoolingRequestOutput[Any]]) -> int:
    """How long it takes to handle all numbers of results, as the length of a text that takes as long."""
    return sum(len(output.outputs.tensor.data) for output in outputs) // 16


def tensors(outputs: Sequence[PoolingRequestOutput[Any]]) -> list[Tensor]:
    """The results as they came."""
    return [output.outputs.tensor for output in outputs]
