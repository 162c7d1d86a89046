"""Checks prompts and parameters to pool, and makes requests of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagewire.frontend.media.keys import has_media
from pagewire.frontend.requests.embeds import check_embeds_params
from pagewire.frontend.requests.inputs import Intake, Prepared, check_keys, check_request_place, salt_of
from pagewire.frontend.requests.lora import LoRARequest, UsedAdapter
from pagewire.frontend.requests.pooling.text import encode
from pagewire.frontend.requests.retention import refuse_retention
from pagewire.frontend.text.length import ContextLengthError
from pagewire.frontend.text.prompts import TextPair
from pagewire.frontend.text.tokenizer import Tokenizer
from pagewire.ipc.bounds import unknown_name
from pagewire.ipc.errors import FieldTypeError, FieldValueError
from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.messages import EngineInfo, Request
from pagewire.ipc.wire.pooling import PoolingInfo, PoolingParams

TOKEN_TYPES = "token_type_ids"


def pooling_of(info: EngineInfo) -> PoolingInfo:
    """The engine's pooling.

    Raises:
        ValueError: its model generates.
    """
    if info.pooling is None:
        raise ValueError(
            f"{info.served_model_names[0]} generates text and does not pool: use generate or chat, or start the "
            "engine with convert='embed' (--convert embed)"
        )
    return info.pooling


def engine_task(task: str | None, info: PoolingInfo) -> str:
    """The engine's task for a task of the API.

    Raises:
        ValueError: the model does not serve it; the text says what it serves.
    """
    if task in (None, "encode"):
        return info.tasks[0]
    names = [task]
    if task == "reward":
        names = ["classify", "token_classify"]
    elif task == "score":
        names = ["classify"]
    for name in names:
        if name in info.tasks:
            return str(name)
    raise ValueError(f"this model does not serve the task {task!r}, it serves {', '.join(info.tasks)}")


def check_pooling_params(
    params: PoolingParams | None, info: EngineInfo, task: str | None = None
) -> PoolingParams:
    """A copy of parameters with everything that the engine needs to know; task: in place of that of `params`.

    Raises:
        ValueError: a parameter does not fit the model. TypeError: they are no parameters to pool.
    """
    pooling = pooling_of(info)
    if params is None:
        params = PoolingParams()
    elif not isinstance(params, PoolingParams):
        raise FieldTypeError("pooling_params", f"must be PoolingParams, got {type(params).__name__}")
    params = params.clone()
    if task is not None and params.task not in (None, task):
        raise FieldValueError(
            "task", f"={params.task!r} of the parameters is not the task {task!r} of the call"
        )
    name = task or params.task
    if name == "reward" and params.activation is None:
        params.activation = pooling.rewards_activated
    params.task = engine_task(name, pooling)
    params.all_tokens = pooling.needs_all_tokens(params.task)
    keep = params.truncate_prompt_tokens
    if keep is not None and keep > info.max_model_len:
        raise FieldValueError(
            "truncate_prompt_tokens",
            f"={keep} is over this model's maximum context length of {info.max_model_len} tokens",
        )
    if params.prompt_name is not None and params.prompt_name not in pooling.prompts:
        raise ValueError(
            f"{unknown_name('prompt_name', params.prompt_name, pooling.prompts)}; this model has "
            f"{', '.join(pooling.prompts) or 'none'}"
        )
    pooling.check(params, 1)
    return params


def pooling_params_for(
    params: PoolingParams | Sequence[PoolingParams] | None,
    num_prompts: int,
    info: EngineInfo,
    task: str | None,
    truncate_prompt_tokens: int | None,
) -> list[PoolingParams]:
    """Checked parameters for each prompt, given those for all or a list; prompts may share them.

    truncate_prompt_tokens: of parameters that give none.

    Raises:
        ValueError: a parameter does not fit the model, or the list has another length than the prompts.
        TypeError: something else than parameters.
    """
    if params is None or isinstance(params, PoolingParams):
        return [complete_pooling_params(params, info, task, truncate_prompt_tokens)] * num_prompts
    if not isinstance(params, Sequence):
        raise FieldTypeError(
            "pooling_params", f"must be PoolingParams or a list of them, got {type(params).__name__}"
        )
    if len(params) != num_prompts:
        raise ValueError(f"{num_prompts} prompts, but {len(params)} pooling parameters")
    return [complete_pooling_params(each, info, task, truncate_prompt_tokens) for each in params]


def complete_pooling_params(
    params: PoolingParams | None, info: EngineInfo, task: str | None, truncate_prompt_tokens: int | None
) -> PoolingParams:
    """Checked parameters for one prompt or several; see `pooling_params_for`."""
    if truncate_prompt_tokens is not None:
        params = PoolingParams() if params is None else params
        if not isinstance(params, PoolingParams):
            raise FieldTypeError("pooling_params", f"must be PoolingParams, got {type(params).__name__}")
        if params.truncate_prompt_tokens is None:
            params = params.clone()
            params.truncate_prompt_tokens = truncate_prompt_tokens
            params.__post_init__()
    return check_pooling_params(params, info, task)


def prepare_pooling(
    intake: Intake,
    prompt: Any,
    params: PoolingParams,
    request_id: str,
    priority: int = 0,
    age: float = 0.0,
    lora_request: LoRARequest | None = None,
) -> Prepared:
    """The request for one prompt. params: `check_pooling_params`. prompt: as for generation, or a `TextPair`.

    age: seconds since the request arrived. lora_request: the adapter that it runs with.

    Raises:
        ValueError, TypeError: the prompt is invalid or too long, no such adapter, or as `check_request_place`.
    """
    adapter = intake.find_adapter(lora_request)
    check_request_place(intake.info, request_id, priority, age)
    pooling = pooling_of(intake.info)
    content, text, second = _content(intake, prompt, params, adapter)
    num_tokens = len(content.token_ids)
    if num_tokens > intake.info.max_model_len:
        raise ContextLengthError(intake.info.max_model_len, f"the prompt has {num_tokens} tokens")
    if 0 < second < num_tokens and pooling.token_types:
        params = params.clone()
        params.second_segment = second
    pooling.check(params, num_tokens)
    request = Request(
        key=intake.next_key(),
        request_id=request_id,
        prompt=content,
        task=params,
        seed=0,
        priority=priority,
        age=age,
        adapter=None if adapter is None else adapter.source,
    )
    return Prepared(request, text if isinstance(text, str) else None, None, adapter)


def _content(
    intake: Intake, prompt: Any, params: PoolingParams, adapter: UsedAdapter | None
) -> tuple[Prompt, str | TextPair | None, int]:
    """A prompt as the core gets it, its text, if known, and the first token of its second text; 0: it has one."""
    info, pooling = intake.info, pooling_of(intake.info)
    keep = info.max_model_len if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens
    if has_media(prompt):
        raise ValueError("models that pool take no pictures or sounds: give text, token ids or embeddings")
    refuse_retention(prompt, "models that pool")
    if (embeds := intake.embeds(prompt)) is not None:
        refuse_prompt_name(params, "embeddings")
        check_embeds_params(None, keep)
        return embeds, None, 0
    is_text = isinstance(prompt, Mapping) and not prompt.get("prompt_token_ids")
    text = prompt.get("prompt") if is_text else prompt
    if isinstance(text, (str, TextPair)):
        if isinstance(prompt, Mapping):
            check_keys(prompt)
        tokenizer = intake.tokenizer if adapter is None else adapter.tokenizer or intake.tokenizer
        token_ids, second = _encode(tokenizer, info, pooling, text, params, keep)
    else:
        refuse_prompt_name(params, "token ids")
        prompt, types = without_token_types(prompt)
        token_ids, text = intake.tokenize(prompt, keep is not None, adapter)
        second = 0 if types is None else second_segment(types, len(token_ids), pooling)
        token_ids = token_ids[:keep]
    salted: Any = {"cache_salt": prompt.cache_salt} if isinstance(prompt, TextPair) else prompt
    return Prompt(token_ids, cache_salt=salt_of(salted)), text, second


def without_token_types(prompt: Any) -> tuple[Any, Any]:
    """A prompt without its token types, and these; None if it has none."""
    if not isinstance(prompt, Mapping) or prompt.get(TOKEN_TYPES) is None:
        return prompt, None
    return {name: value for name, value in prompt.items() if name != TOKEN_TYPES}, prompt[TOKEN_TYPES]


def second_segment(types: Any, num_tokens: int, pooling: PoolingInfo) -> int:
    """The first token of type 1, given the types of all tokens of a prompt; 0 if all are of type 0.

    Raises:
        ValueError: they are not those of one text or of two, or the model has no types. TypeError: no list.
    """
    if not isinstance(types, list):
        raise FieldTypeError(TOKEN_TYPES, f"must be a list of 0 and 1, got {quoted(types)}")
    first: int = sum(kind == 0 for kind in types)
    if len(types) != num_tokens:
        raise FieldValueError(TOKEN_TYPES, f"has {len(types)} entries, but the prompt {num_tokens} tokens")
    if not first or types != [0] * first + [1] * (num_tokens - first):
        raise FieldValueError(
            TOKEN_TYPES, f"must be 0 for a first text, and then 1 for a second, got {quoted(types)}"
        )
    if first < num_tokens and not pooling.token_types:
        raise FieldValueError(TOKEN_TYPES, ": this model has no token types")
    return first % num_tokens


def refuse_prompt_name(params: PoolingParams, what: str) -> None:
    """Refuse a name of a prompt with what no prompt is put before; raises ValueError."""
    if params.prompt_name is not None:
        raise FieldValueError(
            "prompt_name", f"={params.prompt_name!r} is put before a text, not before {what}"
        )


def _encode(
    tokenizer: Tokenizer | None,
    info: EngineInfo,
    pooling: PoolingInfo,
    text: str | TextPair,
    params: PoolingParams,
    keep: int | None,
) -> tuple[list[int], int]:
    """Token ids of a text or a pair, and where the second text begins."""
    if tokenizer is None:
        raise ValueError("there is no tokenizer (skip_tokenizer_init): give the prompt as token ids")
    first, second = (text, None) if isinstance(text, str) else (text.first, text.second)
    if second is not None:
        refuse_prompt_name(params, "a pair of texts")
    elif (name := params.prompt_name or pooling.default_prompt_name) is not None:
        first = pooling.prompts.get(name, "") + first
    if pooling.lower_case:
        first, second = first.lower(), None if second is None else second.lower()
    try:
        encoded = encode(tokenizer, first, second, keep, info.max_model_len)
    except (TypeError, UnicodeError) as error:  # such as an unpaired surrogate
        raise ValueError(f"the prompt is not valid Unicode text: {error}") from error
    if not encoded.token_ids:
        raise ValueError("the prompt is empty")
    return encoded
