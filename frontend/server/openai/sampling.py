"""Conversion of request fields to the engine's sampling parameters."""

from __future__ import annotations

from typing import Any

import msgspec

from pagewire.frontend.client import PromptType
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.openai.constraints import demanded_constraint
from pagewire.frontend.server.openai.protocol import SamplingFields, StreamOptions
from pagewire.frontend.server.serving.service import Service
from pagewire.ipc.errors import FieldValueError
from pagewire.ipc.wire.params import RequestOutputKind, SamplingParams

SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "bad_words",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "logit_bias",
    "allowed_token_ids",
    "logits_processors",
)


def make_sampling_params(
    service: Service, request: SamplingFields, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """Return the engine's parameters: the model's defaults, overridden by the request's fields.

    max_tokens: None: the model's recommendation, else as many as its context length allows.

    Raises:
        ValueError, TypeError: a value is out of range, or fields contradict each other.
    """
    check_prompt_fields(service, request)
    for name in ("logit_bias", "allowed_token_ids"):  # before each entry is looked at
        if (number := len(getattr(request, name) or ())) > service.info.vocab_size:
            raise FieldValueError(
                name, f"has {number} entries; the vocabulary has {service.info.vocab_size} tokens"
            )
    given: dict[str, Any] = {
        name: value for name in SAME_NAME if (value := getattr(request, name)) is not None
    }
    number = 1 if request.n is None else request.n
    if request.best_of is not None and request.best_of < number:
        raise FieldValueError("best_of", f"must be at least n={number}, got {request.best_of}")
    if max_tokens is None:
        max_tokens = service.info.generation_config.get("max_new_tokens")
    selects = (request.best_of or number) > number
    if selects and request.stream:
        raise FieldValueError(
            "best_of", "greater than n cannot be streamed: the best outputs are known only at the end"
        )
    return msgspec.structs.replace(
        service.defaults,
        **given,
        n=request.best_of or number,
        num_returned=number if selects else None,
        max_tokens=max_tokens,
        logprobs=0 if selects and logprobs is None else logprobs,
        structured_outputs=demanded_constraint(request),
        detokenize=service.engine.session.intake.tokenizer is not None,
        extra_args=request.vllm_xargs,
        output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
    )


def check_stream_options(request: SamplingFields) -> StreamOptions:
    """Return the request's stream options.

    Raises:
        APIError: options are given, but stream is false.
    """
    if request.stream_options is not None and not request.stream:
        raise APIError(400, "stream_options needs stream=true", param="stream_options")
    return request.stream_options or StreamOptions()


def check_prompt_fields(service: Service, request: SamplingFields) -> None:
    """Check the fields about the prompt.

    Raises:
        APIError: a field cannot have an effect on this engine.
    """
    info = service.info
    if request.truncation_side == "right":
        message = (
            "truncation_side 'right' is not supported: truncate_prompt_tokens keeps the last tokens ('left')"
        )
        raise APIError(400, message, param="truncation_side")
    if (request.truncate_prompt_tokens or 0) > info.max_model_len:
        message = (
            f"truncate_prompt_tokens must be at most {info.max_model_len}, the model's context length, "
            f"got {request.truncate_prompt_tokens}"
        )
        raise APIError(400, message, param="truncate_prompt_tokens")


def salt_prompt(prompt: PromptType, salt: str | None) -> PromptType:
    """Return the prompt with a cache salt; unchanged if `salt` is None."""
    if salt is None:
        return prompt
    if isinstance(prompt, str):
        return {"prompt": prompt, "cache_salt": salt}
    if isinstance(prompt, list):
        return {"prompt_token_ids": prompt, "cache_salt": salt}
    return {**prompt, "cache_salt": salt}  # type: ignore[return-value]
