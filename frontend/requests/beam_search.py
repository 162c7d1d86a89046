"""Beam search on top of ordinary requests: each step generates one more token for every beam.

All beams of all prompts are submitted as one batch, and the prefix cache holds their common prefixes, so a step
computes one token per beam. The search is that of transformers' `generate(num_beams=...)`, beam for beam.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from pagewire.frontend.media.keys import has_media
from pagewire.frontend.requests.inputs import GENERATED, salt_of
from pagewire.frontend.requests.outputs import CompletionOutput, RequestOutput
from pagewire.frontend.requests.retention import refuse_retention
from pagewire.frontend.text.logprobs import token_text
from pagewire.frontend.text.prompts import PromptType, TokensPrompt
from pagewire.ipc.beams import MAX_CANDIDATES
from pagewire.ipc.errors import FieldValueError
from pagewire.ipc.wire.params import BeamSearchParams, RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from pagewire.frontend.text.tokenizer import Tokenizer

EDITS = (  # parameters that change the logits of a step
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "logits_processors",
    "extra_args",
)

# Generates one more token, with log probabilities, for every prompt; returns outputs in the same order.
Extend = Callable[[list[TokensPrompt], SamplingParams], "list[RequestOutput]"]
Steps = Generator[
    tuple[list[TokensPrompt], SamplingParams], "list[RequestOutput]", "list[list[BeamSearchSequence]]"
]


class BeamSearchSequence(msgspec.Struct):
    """One beam.

    Attributes:
        token_ids: generated tokens, including the one that ended the beam.
        cumulative_logprob: sum of the generated tokens' log probabilities.
        text: text of the generated tokens; has the end-of-sequence token only with `include_stop_str_in_output`.
        finish_reason: "stop" at a token that ends beams, "length" at `max_tokens` or the model's length.
        stop_reason: the token that ended the beam; None for the model's end-of-sequence token.
        tokens: prompt and generated tokens.
    """

    token_ids: list[int]
    cumulative_logprob: float = 0.0
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | None = None
    tokens: list[int] = []

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


class BeamSearchOutput(msgspec.Struct):
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]
    finished: bool = True


class Beams:
    """The search for one prompt: the beams that run, and the best of those that have ended.

    ends: the tokens that end beams (see `end_tokens`). max_tokens: largest number of tokens of a beam.
    """

    def __init__(
        self, prompt: TokensPrompt, params: BeamSearchParams, ends: Mapping[int, int | None], max_tokens: int
    ) -> None:
        self.running = [BeamSearchSequence([])]
        self._prompt, self._params, self._ends = prompt, params, ends
        self._max_tokens = max_tokens
        self._ended: list[BeamSearchSequence] = []

    def prompts(self) -> list[TokensPrompt]:
        """Return the prompt with the tokens of every running beam as its output, and with its cache salt."""
        prompts: list[Any] = [{**self._prompt, GENERATED: beam.token_ids} for beam in self.running]
        return prompts

    def advance(self, candidates: Iterable[Sequence[tuple[int, float]]]) -> None:
        """Extend the beams by the best candidates: (token id, log probability) pairs for each running beam.

        A beam that ends counts only if it is among the best `beam_width` of all candidates.
        """
        width = self._params.beam_width
        num_tokens = len(self.running[0].token_ids)
        may_end = num_tokens >= self._params.min_tokens
        grown = [
            beam.extended(token_id, logprob)
            for beam, tokens in zip(self.running, candidates, strict=True)
            for token_id, logprob in tokens
            if may_end or token_id not in self._ends
        ]
        grown.sort(key=lambda beam: beam.cumulative_logprob, reverse=True)
        self.running = []
        for rank, beam in enumerate(grown):
            last = beam.token_ids[-1]
            if last in self._ends:
                beam.finish_reason, beam.stop_reason = "stop", self._ends[last]
            elif num_tokens + 1 == self._max_tokens:
                beam.finish_reason = "length"
            if beam.finish_reason is None:
                self.running.append(beam)
            elif rank < width:
                self._ended.append(beam)
        del self.running[width:]
        self._ended = heapq.nlargest(width, self._ended, key=self._score)
        if self._settled():
            self.running = []

    def result(self) -> list[BeamSearchSequence]:
        """Return the best `beam_width` beams, best first."""
        for beam in self._ended:
            beam.tokens = [*self._prompt["prompt_token_ids"], *beam.token_ids]
        return self._ended

    def _score(self, beam: BeamSearchSequence) -> float:
        return beam.score(self._params.length_penalty)

    def _settled(self) -> bool:
        """Return True if the search has ended, by the rule of `early_stopping`."""
        params = self._params
        if len(self._ended) < params.beam_width or not self.running:
            return False
        if params.early_stopping is True:
            return True
        best = self.running[0]
        # Log probabilities only decrease. With a positive penalty, a beam's score is highest at full length.
        longest = params.early_stopping == "never" and params.length_penalty > 0
        length = self._max_tokens if longest else len(best.token_ids)
        return best.score(params.length_penalty, length) <= self._score(self._ended[-1])


def beam_search(
    prompts: Sequence[TokensPrompt], params: BeamSearchParams, extend: Extend, **options: Any
) -> list[list[BeamSearchSequence]]:
    """Return the best `beam_width` continuations of each prompt, best first, without their text (see `add_text`).

    options: those of `beam_steps`.

    Raises:
        ValueError: as `beam_steps`.
    """
    search = beam_steps(prompts, params, **options)
    try:
        batch = next(search)
        while True:
            batch = search.send(extend(*batch))
    except StopIteration as stop:
        beams: list[list[BeamSearchSequence]] = stop.value
        return beams


def beam_steps(
    prompts: Sequence[TokensPrompt],
    params: BeamSearchParams,
    *,
    ends: Mapping[int, int | None],
    max_model_len: int,
    max_logprobs: int = -1,
    edits: SamplingParams | None = None,
    on_done: Callable[[], None] = lambda: None,
) -> Steps:
    """Generator form of `beam_search`: yields the prompts to extend by one token and the parameters, receives the
    outputs by `send`, and returns the beams.

    Args:
        ends: the tokens that end beams (see `end_tokens`).
        max_logprobs: largest number of log probabilities that the engine returns per token; -1: all.
        edits: parameters whose penalties, bias, allowed tokens, bad words and processors change the logits.
        on_done: called when the search of a prompt ends.

    Raises:
        ValueError: the search needs more log probabilities than the engine returns, or a prompt leaves no room.
    """
    step_params = one_token(params, len(ends), max_logprobs, edits)
    check_num_candidates(params, step_params.logprobs or 0)
    rooms = [beam_room(prompt, params, max_model_len) for prompt in prompts]
    searches = [
        Beams(prompt, params, ends, min(params.max_tokens, room))
        for prompt, room in zip(prompts, rooms, strict=True)
    ]
    searching, num_tokens = searches, 0
    while searching:
        num_tokens += 1
        step_params = msgspec.structs.replace(step_params, max_tokens=num_tokens)
        outputs = iter((yield [prompt for search in searching for prompt in search.prompts()], step_params))
        for search in searching:
            search.advance([candidates(next(outputs), params, len(ends)) for _ in list(search.running)])
            if not search.running:
                on_done()
        searching = [search for search in searching if search.running]
    return [search.result() for search in searches]


def tokens_prompt(prompt: PromptType, token_ids: list[int]) -> TokensPrompt:
    """Return a prompt as token ids, with its cache salt.

    Raises:
        TypeError, ValueError: the salt is not a string, or empty; or the prompt has pictures or sounds.
    """
    refuse_retention(prompt, "beam search")
    if has_media(prompt):
        raise ValueError("beam search takes no pictures or sounds: sample with n or best_of instead")
    salt = salt_of(prompt)
    if salt is None:
        return TokensPrompt(prompt_token_ids=token_ids)
    return TokensPrompt(prompt_token_ids=token_ids, cache_salt=salt)


def end_tokens(
    params: BeamSearchParams, eos_token_id: int | None, generation_config: dict[str, Any]
) -> dict[int, int | None]:
    """Return the tokens that end a beam and the `stop_reason` of each.

    These are the model's end-of-sequence token (reason None), further ones of its generation config, and
    `stop_token_ids`.
    """
    stops = SamplingParams(stop_token_ids=params.stop_token_ids, ignore_eos=params.ignore_eos)
    stops.update_from_generation_config(generation_config, eos_token_id)
    ends: dict[int, int | None] = {token_id: token_id for token_id in stops.stop_token_ids or ()}
    if eos_token_id is not None and not params.ignore_eos:
        ends[eos_token_id] = None
    return ends


def add_text(
    beam: BeamSearchSequence,
    params: BeamSearchParams,
    tokenizer: Tokenizer | None,
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
) -> None:
    """Set the text of a beam that has ended. A special token that ended it is left out, unless
    `include_stop_str_in_output`.
    """
    if tokenizer is None:
        return
    token_ids, mark = beam.token_ids, ""
    if beam.finish_reason == "stop":
        last = token_ids[-1]
        if beam.stop_reason is None or last in tokenizer.special_ids:
            token_ids = token_ids[:-1]
            mark = token_text(tokenizer, last) if params.include_stop_str_in_output else ""
    beam.text = tokenizer.decode(token_ids, skip_special_tokens, spaces_between_special_tokens) + mark


def search_params(params: SamplingParams, max_tokens: int) -> BeamSearchParams:
    """Return the parameters of the search of a request with `use_beam_search`. max_tokens: if it says none."""
    return BeamSearchParams(
        beam_width=params.best_of or params.n,
        max_tokens=params.max_tokens or max_tokens,
        ignore_eos=params.ignore_eos,
        temperature=params.temperature,
        length_penalty=params.length_penalty,
        include_stop_str_in_output=params.include_stop_str_in_output,
        early_stopping=params.early_stopping,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
    )


def completion(index: int, beam: BeamSearchSequence) -> CompletionOutput:
    """Return a beam as a completion."""
    return CompletionOutput(
        index,
        beam.text,
        beam.token_ids,
        beam.cumulative_logprob,
        finish_reason=beam.finish_reason,
        stop_reason=beam.stop_reason,
    )


def one_token(
    params: BeamSearchParams, num_ends: int, max_logprobs: int, edits: SamplingParams | None
) -> SamplingParams:
    """Return the parameters of one step: one token, with the log probabilities of the candidates.

    They are the model's where that is the same as those that tokens would be sampled with, since any device finds
    these fast.
    """
    edited = {name: getattr(edits, name) for name in EDITS} if edits is not None else {}
    plain = SamplingParams()
    number = params.beam_width + num_ends
    return SamplingParams(
        max_tokens=1,
        temperature=0.0 if params.temperature == 1.0 else params.temperature,  # drawn tokens are not used
        logprobs=number,
        processed_logprobs=params.temperature not in (0.0, 1.0)
        or not (max_logprobs == -1 or number <= max_logprobs)
        or any(value and value != getattr(plain, name) for name, value in edited.items()),
        flat_logprobs=True,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        **edited,
    )


def check_num_candidates(params: BeamSearchParams, number: int) -> None:
    """Check that the engine returns as many log probabilities as a step needs.

    Raises:
        ValueError: it does not.
    """
    if number > MAX_CANDIDATES:
        raise FieldValueError(
            "beam_width",
            f"={params.beam_width} needs the log probabilities of {number} tokens per step, with those "
            f"that end beams; at most {MAX_CANDIDATES} are possible",
        )


def beam_room(prompt: TokensPrompt, params: BeamSearchParams, max_model_len: int) -> int:
    """Return the number of tokens that fit behind a prompt.

    Raises:
        ValueError: none fits, or fewer than `min_tokens`.
    """
    room = max_model_len - len(prompt["prompt_token_ids"])
    if room < max(1, params.min_tokens):
        raise ValueError(
            f"the prompt has {len(prompt['prompt_token_ids'])} tokens, which leaves room for {max(0, room)} of "
            f"at least {max(1, params.min_tokens)}: max_model_len is {max_model_len}"
        )
    return room


def candidates(output: RequestOutput, params: BeamSearchParams, num_ends: int) -> list[tuple[int, float]]:
    """Return the most likely next tokens, with their log probabilities.

    There are enough of them to go on with `beam_width` beams, even if all tokens that end beams are among them;
    fewer where fewer are possible.
    """
    logprobs = output.outputs[0].logprobs
    first = logprobs[0] if logprobs else None
    assert first is not None, "steps request log probabilities"
    possible = [(token_id, entry.logprob) for token_id, entry in first.items() if entry.logprob > -math.inf]
    return heapq.nlargest(params.beam_width + num_ends, possible, key=lambda pair: (pair[1], -pair[0]))
