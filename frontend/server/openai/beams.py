"""Beam search over HTTP: returns n beams for each prompt, best first."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from pagewire.frontend.beam_search import BeamSearchSequence, add_text, beam_steps
from pagewire.frontend.outputs import CompletionOutput, RequestOutput
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.exchange import check_aborted
from pagewire.frontend.server.openai.protocol import SamplingFields
from pagewire.frontend.server.service import Service
from pagewire.ipc.params import BeamSearchParams, SamplingParams

UNSUPPORTED = (
    "logprobs",
    "prompt_logprobs",
    "stop",
    "stop_token_ids",
    "bad_words",
    "logit_bias",
    "allowed_token_ids",
)


async def beam_outputs(
    service: Service, request: SamplingFields, prompts: list[Any], params: SamplingParams, request_id: str
) -> list[RequestOutput]:
    """Run a beam search for each prompt, and return one output per prompt, with a completion for each beam.

    Raises:
        APIError: the request has fields that beam search does not support.
        ValueError: the engine's `max_logprobs` is too small.
    """
    if request.stream:
        raise APIError(
            400,
            "use_beam_search cannot be streamed: the best beams are known only at the end",
            param="use_beam_search",
        )
    for name in UNSUPPORTED:
        if getattr(params, name) not in (None, [], {}):
            raise APIError(400, f"{name} is not supported with use_beam_search", param=name)
    if params.structured_outputs is not None:
        raise APIError(400, "structured outputs are not supported with use_beam_search")
    beam_params = BeamSearchParams(
        beam_width=params.n,
        max_tokens=params.max_tokens or service.info.max_model_len,
        ignore_eos=params.ignore_eos,
        temperature=params.temperature if request.temperature is not None else 0.0,
        length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
        include_stop_str_in_output=params.include_stop_str_in_output,
    )
    session = service.engine.session
    token_ids = [session.tokenize(prompt) for prompt in prompts]
    groups = await search(service, token_ids, beam_params, request_id, request.priority or 0)
    for group in groups:
        for beam in group:
            add_text(beam, beam_params, session.tokenizer)
    return [
        RequestOutput(request_id, None, ids, None, [as_output(i, beam) for i, beam in enumerate(group)], True)
        for ids, group in zip(token_ids, groups, strict=True)
    ]


async def search(
    service: Service, prompts: list[list[int]], params: BeamSearchParams, request_id: str, priority: int
) -> list[list[BeamSearchSequence]]:
    """Run the steps of a beam search on the engine, and return the beams of each prompt, best first."""
    steps = beam_steps(
        prompts,
        params,
        eos_token_id=service.engine.session.eos_token_id,
        max_model_len=service.info.max_model_len,
    )
    outputs: list[RequestOutput] | None = None
    while True:
        try:
            batch, step_params = next(steps) if outputs is None else steps.send(outputs)
        except StopIteration as stop:
            beams: list[list[BeamSearchSequence]] = stop.value
            return beams
        outputs = await complete_all(service, batch, step_params, request_id, priority)


async def complete_all(
    service: Service, prompts: list[list[int]], params: SamplingParams, request_id: str, priority: int
) -> list[RequestOutput]:
    """Run some prompts to their end, and return their outputs in order."""
    finals: dict[int, RequestOutput] = {}
    batches = service.engine.generate_all(prompts, params, request_id, priority=priority)
    async with aclosing(batches):
        async for outputs in batches:
            for index, output in outputs:
                check_aborted(output)
                finals[index] = output
    return [finals[index] for index in range(len(prompts))]


def as_output(index: int, beam: BeamSearchSequence) -> CompletionOutput:
    """Return a beam as a completion."""
    return CompletionOutput(
        index, beam.text, beam.token_ids, beam.cumulative_logprob, finish_reason=beam.finish_reason
    )
