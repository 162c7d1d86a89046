"""Conversion of request fields to the engine's sampling parameters."""

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
MAX_TOKEN_CHARACTERS = 256  # longest token that any vocabulary is expected to have
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


def sampling_params(
    service: Service, request: SamplingFields, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """Return the engine's parameters: the model's defaults, overridden by the request's fields.

    max_tokens: None: the model's recommendation, else as many as its context length allows.

    Raises:
        ValueError, TypeError: a value is out of range, or fields contradict each other.
    """
    given: dict[str, Any] = {
        name: value for name in SAME_NAME if (value := getattr(request, name)) is not None
    }
    number = 1 if request.n is None else request.n
    if request.best_of is not None and request.best_of < number:
        raise ValueError(f"best_of must be at least n={number}, got {request.best_of}")
    if max_tokens is None:
        max_tokens = service.info.generation_config.get("max_new_tokens")
    selects = (request.best_of or number) > number
    if selects and request.stream:
        raise ValueError(
            "best_of greater than n cannot be streamed: the best outputs are known only at the end"
        )
    return msgspec.structs.replace(
        service.defaults,
        **given,
        n=request.best_of or number,
        num_returned=number if selects else None,
        max_tokens=max_tokens,
        logprobs=0 if selects and logprobs is None else logprobs,
        structured_outputs=structure(request),
        detokenize=service.engine.session.tokenizer is not None,
        extra_args=request.vllm_xargs,
        output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
    )


def best_outputs(outputs: Sequence[CompletionOutput], num: int) -> list[CompletionOutput]:
    """Return the `num` outputs with the highest log probability per token, best first; all if there are no more."""
    if len(outputs) <= num:
        return list(outputs)

    def per_token(output: CompletionOutput) -> float:
        return (output.cumulative_logprob or 0.0) / max(1, len(output.token_ids))

    best = sorted(outputs, key=per_token, reverse=True)[:num]
    return [replace(output, index=index) for index, output in enumerate(best)]


def structure(request: SamplingFields) -> dict[str, Any] | None:
    """Return the constraint on the output's form as fields of `StructuredOutputsParams`; None: no constraint.

    It may be given as `structured_outputs`, `guided_*` or `response_format`.

    Raises:
        APIError: more than one of these fields is given.
    """
    given: dict[str, dict[str, Any]] = {}
    if request.structured_outputs is not None:
        given["structured_outputs"] = request.structured_outputs
    for name, kind in GUIDED.items():
        if (value := getattr(request, name)) is not None:
            given[name] = {kind: value}
    if request.response_format is not None and request.response_format.type != "text":
        given["response_format"] = format_of(request.response_format)
    if not given:
        return None
    if len(given) > 1:
        raise APIError(
            400, f"{' and '.join(given)} exclude each other: give only one", param=next(iter(given))
        )
    ((name, constraint),) = given.items()
    if request.guided_whitespace_pattern is not None and name != "structured_outputs":
        constraint["whitespace_pattern"] = request.guided_whitespace_pattern
    return constraint


def format_of(response_format: ResponseFormat) -> dict[str, Any]:
    """Return a response format as fields of `StructuredOutputsParams`.

    Raises:
        APIError: the schema is missing.
    """
    if response_format.type == "json_object":
        return {"json_object": True}
    if response_format.type == "structural_tag":
        if response_format.format is not None:
            return {"structural_tag": {"type": "structural_tag", "format": response_format.format}}
        return {
            "structural_tag": {
                "structures": response_format.structures or [],
                "triggers": response_format.triggers or [],
            }
        }
    if response_format.json_schema is None or response_format.json_schema.schema is None:
        raise APIError(400, "response_format needs json_schema.schema", param="response_format")
    return {"json": response_format.json_schema.schema}


def check_stream_options(request: SamplingFields) -> StreamOptions:
    """Return the request's stream options.

    Raises:
        APIError: options are given, but stream is false.
    """
    if request.stream_options is not None and not request.stream:
        raise APIError(400, "stream_options needs stream=true", param="stream_options")
    return request.stream_options or StreamOptions()


def check_text_length(service: Service, text: str) -> None:
    """Check that a text is not far too long, before seconds are spent on tokenizing it.

    Raises:
        APIError: the text has more characters than `max_model_len` tokens can hold.
    """
    limit = service.info.max_model_len * MAX_TOKEN_CHARACTERS
    if len(text) > limit:
        raise APIError(
            400,
            f"the prompt has {len(text)} characters, more than {service.info.max_model_len} tokens can hold",
            code="context_length_exceeded",
        )


def salted(prompt: PromptType, salt: str | None) -> PromptType:
    """Return the prompt with a cache salt; unchanged if `salt` is None."""
    if salt is None:
        return prompt
    if isinstance(prompt, str):
        return {"prompt": prompt, "cache_salt": salt}
    if isinstance(prompt, list):
        return {"prompt_token_ids": prompt, "cache_salt": salt}
    return {**prompt, "cache_salt": salt}  # type: ignore[return-value]
