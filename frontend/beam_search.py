"""Beam search on top of ordinary requests: each step generates one more token for every beam.

All beams of all prompts are submitted as one batch, and the prefix cache holds their common prefixes, so a step
computes one token per beam.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagewire.ipc.params import BeamSearchParams, RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from pagewire.frontend.outputs import RequestOutput
    from pagewire.frontend.text.tokenizer import Tokenizer

# Generates one more token, with log probabilities, for every token sequence; returns outputs in the same order.
Extend = Callable[[list[list[int]], SamplingParams], "list[RequestOutput]"]


@dataclass
class BeamSearchSequence:
    """One beam.

    Attributes:
        token_ids: generated tokens, including an end-of-sequence token.
        cumulative_logprob: sum of the generated tokens' log probabilities.
        text: text of the generated tokens; has the end-of-sequence token only with `include_stop_str_in_output`.
        finish_reason: "stop" at an end of sequence, "length" at `max_tokens`.
        tokens: prompt and generated tokens.
    """

    token_ids: list[int]
    cumulative_logprob: float = 0.0
    text: str = ""
    finish_reason: str | None = None
    tokens: list[int] = field(default_factory=list)

    @property
    def cum_logprob(self) -> float:
        """Alias of `cumulative_logprob`."""
        return self.cumulative_logprob

    def score(self, length_penalty: float, length: int | None = None) -> float:
        """Return the log probability / length ** length_penalty. length: None: number of generated tokens."""
        divisor: float = max(1, length or len(self.token_ids)) ** length_penalty
        return self.cumulative_logprob / divisor

    def extended(self, token_id: int, logprob: float) -> BeamSearchSequence:
        """Return a copy of the beam with one more token."""
        return BeamSearchSequence([*self.token_ids, token_id], self.cumulative_logprob + logprob)


@dataclass
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]
    finished: bool = True


class Beams:
    """The search for one prompt: running beams, and the best beams that have reached the end of sequence."""

    def __init__(self, prompt: Sequence[int], params: BeamSearchParams, eos_token_id: int | None) -> None:
        self.prompt = list(prompt)
        self.running = [BeamSearchSequence([])]
        self._params = params
        self._eos = None if params.ignore_eos else eos_token_id
        self._ended: list[BeamSearchSequence] = []

    def prompts(self) -> list[list[int]]:
        """Return the token ids of every running beam, including the prompt."""
        return [[*self.prompt, *beam.token_ids] for beam in self.running]

    def advance(self, candidates: Iterable[Sequence[tuple[int, float]]]) -> None:
        """Extend the beams by the best candidates: (token id, log probability) pairs for each running beam."""
        grown: list[BeamSearchSequence] = []
        for beam, tokens in zip(self.running, candidates, strict=True):
            for token_id, logprob in tokens:
                (self._ended if token_id == self._eos else grown).append(beam.extended(token_id, logprob))
        width = self._params.beam_width
        self.running = heapq.nlargest(width, grown, key=lambda beam: beam.cumulative_logprob)
        self._ended = self._best(self._ended)
        if self._settled():
            self.running = []

    def result(self) -> list[BeamSearchSequence]:
        """Return the best `beam_width` beams, best first."""
        for beam in self._ended:
            beam.finish_reason = "stop"
        for beam in self.running:
            beam.finish_reason = "length"
        best = self._best([*self._ended, *self.running])
        for beam in best:
            beam.tokens = [*self.prompt, *beam.token_ids]
        return best

    def _best(self, beams: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        penalty = self._params.length_penalty
        return heapq.nlargest(self._params.beam_width, beams, key=lambda beam: beam.score(penalty))

    def _settled(self) -> bool:
        """Return True if no running beam can become one of the best: log probabilities only decrease."""
        if len(self._ended) < self._params.beam_width or not self.running:
            return False
        penalty = self._params.length_penalty
        length = self._params.max_tokens if penalty > 0 else len(self.running[0].token_ids) + 1
        return self.running[0].score(penalty, length) <= self._ended[-1].score(penalty)


def beam_search(
    prompts: Sequence[Sequence[int]],
    params: BeamSearchParams,
    extend: Extend,
    *,
    eos_token_id: int | None,
    max_model_len: int,
    on_done: Callable[[], None] = lambda: None,
) -> list[list[BeamSearchSequence]]:
    """Return the best `beam_width` continuations of each prompt, best first, without their text (see `add_text`).

    Scores are those of Hugging Face's `generate(num_beams=..., early_stopping="never")`: the log probability
    divided by (number of generated tokens, including an end of sequence) ** `length_penalty`. A search ends early
    only if more steps could not change its result.

    on_done: called when the search of a prompt ends.

    Raises:
        ValueError: the engine allows fewer log probabilities (`max_logprobs`) than the search needs.
    """
    search = beam_steps(
        prompts, params, eos_token_id=eos_token_id, max_model_len=max_model_len, on_done=on_done
    )
    try:
        batch = next(search)
        while True:
            batch = search.send(extend(*batch))
    except StopIteration as stop:
        beams: list[list[BeamSearchSequence]] = stop.value
        return beams


def beam_steps(
    prompts: Sequence[Sequence[int]],
    params: BeamSearchParams,
    *,
    eos_token_id: int | None,
    max_model_len: int,
    on_done: Callable[[], None] = lambda: None,
) -> Generator[tuple[list[list[int]], SamplingParams], list[RequestOutput], list[list[BeamSearchSequence]]]:
    """Generator form of `beam_search`: yields the sequences to extend by one token and the parameters, receives the
    outputs by `send`, and returns the beams.
    """
    searches = [Beams(prompt, params, eos_token_id) for prompt in prompts]
    step_params = one_token(params)
    searching = [search for search in searches if len(search.prompt) < max_model_len]
    for step in range(params.max_tokens):
        if not searching:
            break
        outputs = iter((yield [prompt for search in searching for prompt in search.prompts()], step_params))
        for search in searching:
            search.advance([candidates(next(outputs), params) for _ in list(search.running)])
        still_open = [
            search for search in searching if search.running and len(search.prompt) + step + 1 < max_model_len
        ]
        for _ in range(len(searching) - len(still_open)):
            on_done()
        searching = still_open
    for _ in searching:
        on_done()
    return [search.result() for search in searches]


def add_text(beam: BeamSearchSequence, params: BeamSearchParams, tokenizer: Tokenizer | None) -> None:
    """Set the text of a finished beam."""
    if tokenizer is not None:
        ended = beam.finish_reason == "stop" and not params.include_stop_str_in_output
        beam.text = tokenizer.decode(beam.token_ids[:-1] if ended else beam.token_ids)


def one_token(params: BeamSearchParams) -> SamplingParams:
    """Return the parameters of one step: one token, with the log probabilities of the candidates.

    Log probabilities are reported before temperature; for one other than 1 the whole distribution is needed.
    """
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        logprobs=2 * params.beam_width if params.temperature in (0.0, 1.0) else -1,
        flat_logprobs=True,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def candidates(output: RequestOutput, params: BeamSearchParams) -> list[tuple[int, float]]:
    """Return the 2 * beam_width most likely next tokens, with log probabilities at the search's temperature."""
    logprobs = output.outputs[0].logprobs
    first = logprobs[0] if logprobs else None
    assert first is not None, "steps request log probabilities"
    logprob_of = {token_id: entry.logprob for token_id, entry in first.items()}
    if params.temperature not in (0.0, 1.0):
        scaled = {token_id: logprob / params.temperature for token_id, logprob in logprob_of.items()}
        peak = max(scaled.values())
        norm = peak + math.log(math.fsum(math.exp(value - peak) for value in scaled.values()))
        logprob_of = {token_id: value - norm for token_id, value in scaled.items()}
    return heapq.nlargest(2 * params.beam_width, logprob_of.items(), key=lambda pair: pair[1])
