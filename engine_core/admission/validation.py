"""Validation of submitted requests in the core.

Frontends make the same checks, but the core does not rely on them: a bad value must not reach the worker.
`SamplingParams` validates itself when it is decoded; lengths of lists and strings are bounded there (`ipc.budget`).
"""

from __future__ import annotations

from collections.abc import Iterable

from pagewire.ipc.beams import MAX_CANDIDATES
from pagewire.ipc.bounds import MAX_INT, check_fields, check_int, check_num_logprobs
from pagewire.ipc.errors import FieldValueError
from pagewire.ipc.models.own_code import check_processors
from pagewire.ipc.tenants import check_tenant
from pagewire.ipc.wire.embeddings import check_media
from pagewire.ipc.wire.messages import EngineInfo
from pagewire.ipc.wire.params import SamplingParams, check_turn, max_n
from pagewire.ipc.wire.pooling import PoolingParams
from pagewire.ipc.wire.requests import Request
from pagewire.ipc.wire.sources import NO_PROMPT_LOGPROBS, check_source
from pagewire.ipc.wire.thinking import ThinkingMarks

MAX_RANK = 2**31  # sequences of one batch


def check_request(request: Request, info: EngineInfo, *, task_known: bool = False) -> None:
    """Check that the engine can run a request. task_known: its parameters passed this check with another one.

    Raises:
        ValueError, TypeError: it cannot; the text says why.
    """
    check_int("key", request.key, 0)
    check_int("seed", request.seed, -MAX_INT - 1)
    check_turn(request.priority, request.age)
    check_int("rank", request.rank, 0, MAX_RANK)
    if request.tenant:
        check_tenant(request.tenant)
    if info.source is None:
        check_media(request.prompt, info.embeddings, info.media)
    else:
        check_source(request.prompt, info.source, info.block_size)
    check_adapter(request, info)
    check_retention(request)
    if isinstance(request.task, PoolingParams):
        check_pooling(request, request.task, info)
        return
    if info.pooling is not None:
        raise ValueError("this engine pools and does not generate: submit PoolingParams")
    if request.task.n > max_n():
        raise FieldValueError("n", f"must be at most {max_n()}, got {request.task.n}")
    num_prompt = len(request.prompt.token_ids)
    if num_prompt == 0:
        raise ValueError("the prompt is empty")
    limit = info.max_len_of(request.prompt)
    if num_prompt >= limit:
        raise ValueError(
            f"This model's maximum context length is {limit} tokens. However, "
            f"the prompt of {num_prompt} tokens leaves no room to generate: "
            f"the prompt is too long (max_model_len is {limit})"
        )
    check_prompt(request, info)
    if request.eos_token_id is not None:
        check_int("eos_token_id", request.eos_token_id, 0, 2**31 - 1)
    if not task_known:
        check_params(request.task, info)
    if request.task.processed_logprobs and request.task.timestamps is None:
        check_step_of_search(request)
    check_int("num_prompt_logprobs", request.num_prompt_logprobs, 0, num_prompt - 1)
    if request.output_token_ids is not None:
        check_resumed(request, info)


def check_prompt(request: Request, info: EngineInfo) -> None:
    """Check the tokens of a prompt; those that stand for media may lie behind the vocabulary. Raises ValueError."""
    kinds = {} if info.media is None else info.media.kinds
    places = {own.embedding_id for own in kinds.values()}
    token_ids: Iterable[int] = request.prompt.token_ids
    vocab_size = vocab_size_of(request, info)
    if any(place >= vocab_size for place in places):
        token_ids = (token_id for token_id in request.prompt.token_ids if token_id not in places)
    check_token_ids("prompt", token_ids, vocab_size)


def check_adapter(request: Request, info: EngineInfo) -> None:
    """Check that a request may name an adapter, and its content only if it goes on; raises ValueError."""
    if request.adapter is not None and info.lora is None:
        raise ValueError("this engine serves no adapters: start it with enable_lora")
    if request.prompt.adapter and (request.adapter is None or request.output_token_ids is None):
        raise ValueError("the content of an adapter is for the core to find: name the adapter itself")


def check_retention(request: Request) -> None:
    """Check what a request says of the time for which its prefix stays cached; raises ValueError."""
    if request.retention and isinstance(request.task, PoolingParams):
        raise FieldValueError("retention", ": a request to pool keeps no prefix")
    for wish in request.retention:
        check_fields(wish)


def vocab_size_of(request: Request, info: EngineInfo) -> int:
    """The vocabulary of the model, and of its adapter at most."""
    extra = info.lora.extra_vocab_size if info.lora is not None and request.adapter is not None else 0
    return info.vocab_size + extra


def check_pooling(request: Request, params: PoolingParams, info: EngineInfo) -> None:
    """Check that the engine can pool a request; raises ValueError."""
    if info.pooling is None:
        raise ValueError("this engine generates text and does not pool: submit SamplingParams")
    num_tokens = len(request.prompt.token_ids)
    if num_tokens == 0:
        raise ValueError("the prompt is empty")
    if num_tokens > info.max_model_len:
        raise ValueError(
            f"This model's maximum context length is {info.max_model_len} tokens. However, the prompt has "
            f"{num_tokens} tokens: the prompt is too long (max_model_len is {info.max_model_len})"
        )
    check_prompt(request, info)
    if request.output_token_ids:
        raise FieldValueError("output_token_ids", ": a request to pool has none")
    info.pooling.check(params, num_tokens)


def check_params(params: SamplingParams, info: EngineInfo) -> None:
    """Check token ids and numbers of log probabilities against this engine; raises ValueError."""
    check_token_ids("allowed_token_ids", params.allowed_token_ids or (), info.vocab_size)
    check_token_ids("logit_bias", params.logit_bias or (), info.vocab_size)
    for word in params.bad_words_token_ids or ():
        check_token_ids("bad_words_token_ids", word, info.vocab_size)
    if params.use_beam_search:
        raise FieldValueError(
            "use_beam_search", "is for frontends, which search by requests of one token each"
        )
    check_processors(params.logits_processors or (), info.logits_processors)
    if params.thinking_token_budget is not None:
        check_marks(params.thinking, info)
    if (rules := params.timestamps) is not None:
        check_token_ids("timestamps", [rules.first, rules.end], info.vocab_size)
    if info.source is not None and params.prompt_logprobs is not None:
        raise FieldValueError("prompt_logprobs", NO_PROMPT_LOGPROBS)
    for name in ("logprobs", "prompt_logprobs"):
        most = info.max_logprobs
        if params.processed_logprobs and most != -1:  # of a single token
            most = max(most, MAX_CANDIDATES)
        check_num_logprobs(name, getattr(params, name), most, info.vocab_size)


def check_marks(marks: ThinkingMarks | None, info: EngineInfo) -> None:
    """Check that the marks of a budget for reasoning are tokens of the model; raises ValueError."""
    if marks is None or not marks.open_ids or marks.close_id is None:
        raise FieldValueError(
            "thinking_token_budget", "needs the tokens of the marks, which frontends fill in"
        )
    check_token_ids("thinking", [*marks.open_ids, marks.close_id], info.vocab_size)


def check_step_of_search(request: Request) -> None:
    """Check that a request for processed log probabilities generates a single token; raises ValueError."""
    params, done = request.params, request.output_token_ids or [[]]
    if params.n > 1 or params.prompt_logprobs is not None or params.max_tokens != len(done[0]) + 1:
        raise FieldValueError("processed_logprobs", "are for steps of beam search, which generate one token")


def check_resumed(request: Request, info: EngineInfo) -> None:
    """Check the tokens of a resubmitted request: n sequences, none of them complete; raises ValueError."""
    done = request.output_token_ids or []
    if len(done) != request.params.n:
        raise FieldValueError("output_token_ids", f"has {len(done)} sequences, but n is {request.params.n}")
    limit = info.max_len_of(request.prompt) - len(request.prompt.token_ids)
    limit = min(limit, request.params.max_tokens or limit)
    for token_ids in done:
        if len(token_ids) >= limit:
            raise FieldValueError(
                "output_token_ids",
                f": a sequence of {len(token_ids)} tokens is already complete (limit {limit})",
            )
        check_token_ids("output_token_ids", token_ids, vocab_size_of(request, info))


def check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Check that all ids lie in [0, vocab_size); raises ValueError."""
    ids = list(token_ids)
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise FieldValueError(name, f": token id {wrong} is outside the vocabulary of {vocab_size}")
