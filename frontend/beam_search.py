"""Beam search, on top of plain requests: each step asks for one more token of every beam.

All beams of all prompts go as one batch, and the prefix cache keeps what they share, so a step computes one
token per beam.
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

# Continues every token sequence by one token, with log probabilities; outputs in the order given.
Extend = Callable[[list[list[int]], SamplingParams], "list[RequestOutput]"]


@dataclass
class BeamSearchSequence:
    """One beam.

    Attributes:
        token_ids: what was generated, an end-of-sequence token included.
        cumulative_logprob: sum of the generated tokens' log probabilities.
        text: of the generated tokens; the end-of-sequence token only with `include_stop_str_in_output`.
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
        """`cumulative_logprob` by its other name."""
        return self.cumulative_logprob

    def score(self, length_penalty: float, length: int | None = None) -> float:
        """The log probability over length ** length_penalty (`length`: another than its own)."""
        divisor: float = max(1, length or len(self.token_ids)) ** length_penalty
        return self.cumulative_logprob / divisor

    def extended(self, token_id: int, logprob: float) -> BeamSearchSequence:
        """This beam and one token more."""
        return BeamSearchSequence([*self.token_ids, token_id], self.cumulative_logprob + logprob)


@dataclass
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]
    finished: bool = True


class Beams:
    """The search for one prompt: running beams, and the best of those that met the end of sequence."""

    def __init__(self, prompt: Sequence[int], params: BeamSearchParams, eos_token_id: int | None) -> None:
        self.prompt = list(prompt)
        self.running = [BeamSearchSequence([])]
        self._params = params
        self._eos = None if params.ignore_eos else eos_token_id
        self._ended: list[BeamSearchSequence] = []

    def prompts(self) -> list[list[int]]:
        """What is to be continued."""
        return [[*self.prompt, *beam.token_ids] for beam in self.running]

    def advance(self, candidates: Iterable[Sequence[tuple[int, float]]]) -> None:
        """Take the best continuations. candidates: per running beam, (token id, log probability) pairs."""
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
        """The best beams, best first."""
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
        """True if no running beam can still come among the best: log probabilities only fall."""
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
    """The best `beam_width` continuations of each prompt, best first; their text is left empty.

    Scores are those of Hugging Face's `generate(num_beams=..., early_stopping="never")`: the log probability
    over (generated tokens, an end of sequence included) ** `length_penalty`. A search ends early only where
    going on could not change its result.

    on_done: called as each prompt's search ends.

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
        found: list[list[BeamSearchSequence]] = stop.value
        return found


def beam_steps(
    prompts: Sequence[Sequence[int]],
    params: BeamSearchParams,
    *,
    eos_token_id: int | None,
    max_model_len: int,
    on_done: Callable[[], None] = lambda: None,
) -> Generator[tuple[list[list[int]], SamplingParams], list[RequestOutput], list[list[BeamSearchSequence]]]:
    """`beam_search` without an engine: yields what is to be continued by one token, is sent the outputs, and
    returns the beams.
    """
    searches = [Beams(prompt, params, eos_token_id) for prompt in prompts]
    step_params = one_token(params)
    open_ = [search for search in searches if len(search.prompt) < max_model_len]
    for step in range(params.max_tokens):
        if not open_:
            break
        outputs = iter((yield [prompt for search in open_ for prompt in search.prompts()], step_params))
        for search in open_:
            search.advance([candidates(next(outputs), params) for _ in list(search.running)])
        still_open = [
            search for search in open_ if search.running and len(search.prompt) + step + 1 < max_model_len
        ]
        for _ in range(len(open_) - len(still_open)):
            on_done()
        open_ = still_open
    for _ in open_:
        on_done()
    return [search.result() for search in searches]


def add_text(beam: BeamSearchSequence, params: BeamSearchParams, tokenizer: Tokenizer | None) -> None:
    """Fill in the text of a finished beam."""
    if tokenizer is not None:
        ended = beam.finish_reason == "stop" and not params.include_stop_str_in_output
        beam.text = tokenizer.decode(beam.token_ids[:-1] if ended else beam.token_ids)


def one_token(params: BeamSearchParams) -> SamplingParams:
    """Parameters of one step: one greedy token, and the log probabilities of all that may follow.

    Engines report log probabilities before temperature; with another than 1 the whole distribution is needed.
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
    """The 2 * beam_width most likely next tokens, with log probabilities at the search's temperature."""
    logprobs = output.outputs[0].logprobs
    first = logprobs[0] if logprobs else None
    assert first is not None, "a step asks for log probabilities"
    found = {token_id: entry.logprob for token_id, entry in first.items()}
    if params.temperature not in (0.0, 1.0):
        scaled = {token_id: logprob / params.temperature for token_id, logprob in found.items()}
        peak = max(scaled.values())
        norm = peak + math.log(math.fsum(math.exp(value - peak) for value in scaled.values()))
        found = {token_id: value - norm for token_id, value in scaled.items()}
    return heapq.nlargest(2 * params.beam_width, found.items(), key=lambda pair: pair[1])
