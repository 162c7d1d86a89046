"""Sampling parameters: those of requests that give none, and checks against an engine, once for many prompts."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import msgspec

from pagewire.frontend.text.length import ContextLengthError
from pagewire.frontend.text.stop import StopStrings, shared_stops
from pagewire.frontend.text.tokenizer import Tokenizer
from pagewire.ipc.beams import MAX_CANDIDATES
from pagewire.ipc.bounds import check_num_logprobs
from pagewire.ipc.errors import Field, FieldTypeError, FieldValueError
from pagewire.ipc.models.own_code import check_processors
from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.messages import EngineInfo
from pagewire.ipc.wire.params import RequestOutputKind, SamplingParams, check_logit_edits
from pagewire.ipc.wire.thinking import ThinkingMarks

SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
}
"""The sampling parameters that a generation config may have, and their names there."""

USUAL = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""How llama.cpp samples where a model recommends nothing. Ollama differs in top_p 0.9, without min_p, and in a
repetition penalty of 1.1 over the last 64 tokens: ours would be over all of them, and longer answers suffer."""

USUAL_LENGTH = 4096
"""Most tokens of an answer if neither request nor model says. It is Ollama's default context, prompt included."""


class CheckedParams(msgspec.Struct, frozen=True):
    """Sampling parameters that an engine takes, completed; made by `check_params`, and not changed any more.

    stops: the search for their stop strings, so that it is made once for all prompts.
    """

    params: SamplingParams
    stops: StopStrings | None


def check_params(
    params: SamplingParams | None, info: EngineInfo, tokenizer: Tokenizer | None, eos_token_id: int | None
) -> CheckedParams:
    """Return a checked copy of parameters (None: the model's defaults), completed for `Intake.prepare`.

    It is completed from the model's config and the tokenizer, and good for any number of prompts.

    Raises:
        ValueError, TypeError: a parameter is invalid or not supported.
    """
    check_generates(info)
    if params is None:
        params = default_sampling_params(info)
    elif isinstance(params, SamplingParams):
        params = params.clone()
    else:
        raise FieldTypeError("sampling_params", f"must be SamplingParams, got {type(params).__name__}")
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        check_vocabulary(name, getattr(params, name) or (), info.vocab_size)
    if (params.best_of or 0) > params.n and not params.use_beam_search:
        choose_among(params)
    if params.n > info.max_n:
        raise FieldValueError("n", f"={params.n} is over this engine's limit of {info.max_n}")
    check_processors(params.logits_processors or (), info.logits_processors)
    most = info.max_logprobs
    if params.processed_logprobs and most != -1:
        most = max(most, MAX_CANDIDATES)
    for name in ("logprobs", "prompt_logprobs"):
        check_num_logprobs(name, getattr(params, name), most, info.vocab_size)
    if params.stop_strings and tokenizer is None:
        raise FieldValueError("stop", "strings need a tokenizer: they are searched for in the text")
    if params.bad_words:
        if tokenizer is None:
            raise FieldValueError("bad_words", "need a tokenizer")
        words = [ids for word in params.bad_words for ids in spellings(tokenizer, word)]
        params.bad_words_token_ids = words + (params.bad_words_token_ids or [])
        check_logit_edits(params.n, params.num_logit_edits)
    if params.thinking_token_budget is not None:
        params.thinking = in_tokens(params.thinking or ThinkingMarks(), tokenizer)
    for ids in params.bad_words_token_ids or ():
        check_vocabulary("bad_words", ids, info.vocab_size)
    params.update_from_generation_config(info.generation_config, eos_token_id)
    return CheckedParams(params, shared_stops(params))


def fit_params(params: SamplingParams, prompt: Prompt, info: EngineInfo) -> SamplingParams:
    """Return the parameters with a `max_tokens` that has room; raise ValueError if there is too little."""
    num_prompt_tokens, limit = len(prompt.token_ids), info.max_len_of(prompt)
    room = limit - num_prompt_tokens
    if room < 1:
        raise ContextLengthError(
            limit,
            f"the prompt has {num_prompt_tokens} tokens, which leaves no room for a new one",
        )
    if params.min_tokens > room:
        raise FieldValueError(
            "min_tokens",
            f"={params.min_tokens}, but the prompt of {num_prompt_tokens} tokens leaves room for "
            f"{room}: max_model_len is {limit}",
        )
    if params.max_tokens is None or params.max_tokens > room:
        params = copy.copy(params)
        params.max_tokens = room
    return params


def check_generates(info: EngineInfo) -> None:
    """Refuse to generate with a model that pools; raises ValueError."""
    if info.pooling is not None:
        raise ValueError(
            f"{info.served_model_names[0]} pools and does not generate: use encode, embed, classify, "
            "score or reward, or start the engine with runner='generate'"
        )


def params_for(params: SamplingParams | Sequence[SamplingParams], num_prompts: int) -> list[SamplingParams]:
    """Return one SamplingParams per prompt, given one for all or a list.

    Raises:
        ValueError: the list has another length than the prompts. TypeError: a value is not SamplingParams.
    """
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence) or not all(isinstance(entry, SamplingParams) for entry in params):
        raise FieldTypeError(
            "sampling_params", f"must be SamplingParams or a list of them, got {quoted(params)}"
        )
    if len(params) != num_prompts:
        raise ValueError(f"{num_prompts} prompts, but {len(params)} sampling parameters")
    return list(params)


def truncate_tokens(token_ids: list[int], params: SamplingParams, max_model_len: int) -> list[int]:
    """Return the last `truncate_prompt_tokens` tokens; for -1, what leaves room for `max_tokens` (at least 1)."""
    keep = params.truncate_prompt_tokens
    if keep is None:
        return token_ids
    if keep == -1:
        max_tokens = 1 if params.max_tokens is None else params.max_tokens
        keep = max(1, max_model_len - max_tokens)
    return token_ids[-keep:]


def in_tokens(marks: ThinkingMarks, tokenizer: Tokenizer | None) -> ThinkingMarks:
    """Return marks with their tokens.

    Raises:
        ValueError: there is no tokenizer, or the closing mark is several tokens.
    """
    if tokenizer is None:
        raise FieldValueError("thinking_token_budget", "needs a tokenizer")
    opening, closing = tokenizer.encode_batch([marks.open, marks.close], add_special_tokens=False)
    if len(closing) != 1:
        raise FieldValueError(
            "thinking_token_budget",
            f": {quoted(marks.close)} is {len(closing)} tokens of this model, and only a mark "
            "that is one token can be told from other text for sure; limit ",
            Field("max_tokens"),
            " instead",
        )
    return msgspec.structs.replace(marks, open_ids=opening, close_id=closing[0])


def choose_among(params: SamplingParams) -> None:
    """Make parameters generate `best_of` outputs, of which n are returned once all have ended."""
    params.num_returned, params.n = params.n, params.best_of or params.n
    params.output_kind = RequestOutputKind.FINAL_ONLY
    params.logprobs = params.logprobs or 0


def spellings(tokenizer: Tokenizer, word: str) -> list[list[int]]:
    """Return the distinct tokenizations of a word: at the start of a text, after a space, and within a line."""
    word = word.lstrip() or word
    newline, line = tokenizer.encode_batch(["\n", "\n" + word], add_special_tokens=False)
    variants = tokenizer.encode_batch([word, " " + word], add_special_tokens=False)
    if line[: len(newline)] == newline:
        variants.append(line[len(newline) :])
    return [ids for i, ids in enumerate(variants) if ids and ids not in variants[:i]]


def check_vocabulary(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Check that all token ids are in [0, vocab_size). name: what has these ids, for the message.

    Raises:
        ValueError: an id is not.
    """
    ids = token_ids if isinstance(token_ids, list) else list(token_ids)
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        raise FieldValueError(name, f"has token id {wrong}, outside the vocabulary of {vocab_size}")


def default_sampling_params(info: EngineInfo) -> SamplingParams:
    """Return the sampling parameters of the model's generation config, with pagewire's defaults for the rest."""
    names = SAMPLING | {"max_tokens": "max_new_tokens"}
    config = info.generation_config
    return SamplingParams(
        **{name: value for name, key in names.items() if (value := config.get(key)) is not None}
    )


def local_sampling_params(info: EngineInfo) -> SamplingParams:
    """Return the parameters where people talk to a model: in a terminal, on the page, and through Ollama's API.

    They are the model's own; one that recommends none of how to sample is sampled as llama.cpp does. An answer ends
    after `USUAL_LENGTH` tokens unless the model says another length.
    """
    config = info.generation_config
    recommends = any(config.get(key) is not None for key in SAMPLING.values())
    limit = config.get("max_new_tokens")
    return msgspec.structs.replace(
        default_sampling_params(info),
        **({} if recommends else USUAL),
        max_tokens=USUAL_LENGTH if limit is None else limit,
    )
