"""Beam search for the prompts of one HTTP request, whose steps run together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from pagewire.frontend.api.off_loop import num_chars, tokenize_off_loop
from pagewire.frontend.core.session import Session
from pagewire.frontend.requests.beam_search import (
    BeamSearchSequence,
    Steps,
    add_text,
    beam_steps,
    completion,
    end_tokens,
    tokens_prompt,
)
from pagewire.frontend.requests.checked_params import truncate_tokens
from pagewire.frontend.requests.lora import LoRARequest
from pagewire.frontend.requests.outputs import RequestOutput
from pagewire.frontend.text.prompts import PromptType, TokensPrompt, text_of
from pagewire.ipc.wire.params import BeamSearchParams, SamplingParams

Complete: TypeAlias = Callable[[list[TokensPrompt], SamplingParams], Awaitable[list[RequestOutput]]]
"""Runs prompts to their end; returns their outputs in order."""


async def search_all(
    session: Session,
    prompts: Sequence[PromptType],
    params: BeamSearchParams,
    edits: SamplingParams,
    complete: Complete,
    *,
    request_id: str,
    num_best: int,
    lora_request: LoRARequest | None = None,
) -> list[RequestOutput]:
    """Search for the beams of several prompts together; returns one output for each, with its best beams.

    edits: what changes the logits, and how a beam becomes text. complete: runs a step. num_best: most beams of a
    prompt that are returned.

    Raises:
        ValueError: a prompt leaves no room, or the engine's `max_logprobs` is too small.
    """
    limit, truncates = session.info.max_model_len, edits.truncate_prompt_tokens is not None
    batch = []
    for prompt in prompts:
        token_ids = await tokenize_off_loop(
            num_chars(prompt), session.intake.token_ids, prompt, truncates, lora_request
        )
        batch.append(tokens_prompt(prompt, truncate_tokens(token_ids, edits, limit)))
    steps = beam_steps(
        batch,
        params,
        ends=end_tokens(params, session.intake.eos_token_id, session.info.generation_config),
        max_model_len=limit,
        max_logprobs=session.info.max_logprobs,
        edits=edits,
    )
    found = await ends_of(steps, complete)
    tokenizer, results = session.intake.tokenizer_for(lora_request), []
    for prompt, tokens, beams in zip(prompts, batch, found, strict=True):
        best = beams[:num_best]
        for beam in best:
            add_text(beam, params, tokenizer, edits.skip_special_tokens, edits.spaces_between_special_tokens)
        completions = [completion(index, beam) for index, beam in enumerate(best)]
        ids = tokens["prompt_token_ids"]
        results.append(RequestOutput(request_id, text_of(prompt), ids, None, completions, True))
    return results


async def ends_of(steps: Steps, complete: Complete) -> list[list[BeamSearchSequence]]:
    """Run the steps of a search; returns the beams of each prompt, best first."""
    outputs: list[RequestOutput] | None = None
    while True:
        try:
            batch, step_params = next(steps) if outputs is None else steps.send(outputs)
        except StopIteration as stop:
            beams: list[list[BeamSearchSequence]] = stop.value
            return beams
        outputs = await complete(batch, step_params)
