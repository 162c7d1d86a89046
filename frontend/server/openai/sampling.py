"""Fields of requests to parameters of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from pagewire.frontend.inputs import PromptType
from pagewire.frontend.outputs import CompletionOutput
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.openai.protocol import ResponseFormat, SamplingFields, StreamOptions
from pagewire.frontend.server.service import Service
from pagewire.ipc.params import RequestOutputKind, SamplingParams

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
)
MAX_TOKEN_CHARACTERS = 256  # no vocabulary has longer tokens
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


def sampling_params(
    service: Service, request: SamplingFields, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """The engine's parameters: the model's recommendations, overridden by what the request gives.

    max_tokens: None, as many as the model's length leaves, or as the model recommends.

    Raises:
        ValueError, TypeError: a value out of range, or contradictions.
    """
    given: dict[str, Any] = {
        name: value for name in SAME_NAME if (value := getattr(request, name)) is not None
    }
    number = 1 if request.n is None else request.n
    if request.best_of is not None and request.best_of < number:
        raise ValueError(f"best_of must be at least n={number}, got {request.best_of}")
    if max_tokens is None:
        max_tokens = service.info.generation_config.get("max_new_tokens")
    chooses = (request.best_of or number) > number
    if chooses and request.stream:
        raise ValueError("best_of over n cannot be streamed: which are best is known at the end")
    return msgspec.structs.replace(
        service.defaults,
        **given,
        n=request.best_of or number,
        max_tokens=max_tokens,
        logprobs=0 if chooses and logprobs is None else logprobs,
        structured_outputs=structure(request),
        detokenize=service.engine.session.tokenizer is not None,
        extra_args=request.vllm_xargs,
        output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
    )


def best_outputs(outputs: Sequence[CompletionOutput], num: int) -> list[CompletionOutput]:
    """The `num` outputs with the highest log probability per token, best first, if there are more."""
    if len(outputs) <= num:
        return list(outputs)

    def per_token(output: CompletionOutput) -> float:
        return (output.cumulative_logprob or 0.0) / max(1, len(output.token_ids))

    best = sorted(outputs, key=per_token, reverse=True)[:num]
    return [replace(output, index=index) for index, output in enumerate(best)]


def structure(request: SamplingFields) -> dict[str, Any] | None:
    """What the output must look like, by whichever of its names it is given; None: anything goes.

    Raises:
        APIError: by several of them.
    """
    found: dict[str, dict[str, Any]] = {}
    if request.structured_outputs is not None:
        found["structured_outputs"] = request.structured_outputs
    for name, kind in GUIDED.items():
        if (value := getattr(request, name)) is not None:
            found[name] = {kind: value}
    if request.response_format is not None and request.response_format.type != "text":
        found["response_format"] = format_of(request.response_format)
    if not found:
        return None
    if len(found) > 1:
        raise APIError(400, f"{' and '.join(found)} contradict each other: give one", param=next(iter(found)))
    ((name, wanted),) = found.items()
    if request.guided_whitespace_pattern is not None and name != "structured_outputs":
        wanted["whitespace_pattern"] = request.guided_whitespace_pattern
    return wanted


def format_of(wanted: ResponseFormat) -> dict[str, Any]:
    """A response format as structured outputs.

    Raises:
        APIError: its schema is missing.
    """
    if wanted.type == "json_object":
        return {"json_object": True}
    if wanted.type == "structural_tag":
        if wanted.format is not None:
            return {"structural_tag": {"type": "structural_tag", "format": wanted.format}}
        return {"structural_tag": {"structures": wanted.structures or [], "triggers": wanted.triggers or []}}
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        raise APIError(400, "response_format needs json_schema.schema", param="response_format")
    return {"json": wanted.json_schema.schema}


def check_stream_options(request: SamplingFields) -> StreamOptions:
    """The stream's options.

    Raises:
        APIError: there are some, but no stream.
    """
    if request.stream_options is not None and not request.stream:
        raise APIError(400, "stream_options are for stream=true", param="stream_options")
    return request.stream_options or StreamOptions()


def check_text_length(service: Service, text: str) -> None:
    """Refuse a text that is far too long before anybody spends seconds on tokenizing it.

    Raises:
        APIError: it is.
    """
    most = service.info.max_model_len * MAX_TOKEN_CHARACTERS
    if len(text) > most:
        raise APIError(
            400,
            f"the prompt has {len(text)} characters, more than {service.info.max_model_len} tokens can hold",
            code="context_length_exceeded",
        )


def salted(prompt: PromptType, salt: str | None) -> PromptType:
    """The prompt with its cache salt."""
    if salt is None:
        return prompt
    if isinstance(prompt, str):
        return {"prompt": prompt, "cache_salt": salt}
    if isinstance(prompt, list):
        return {"prompt_token_ids": prompt, "cache_salt": salt}
    return {**prompt, "cache_salt": salt}  # type: ignore[return-value]
