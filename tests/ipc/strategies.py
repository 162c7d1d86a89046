"""Values of every type that messages are made of, drawn from the definitions themselves."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Sequence
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
from hypothesis import strategies as st

from pagewire.ipc.speculative import MAX_ALPHA, MAX_DRAFTS, MAX_LOOKUP, Acceptance, Method, SpeculativeConfig
from pagewire.ipc.timestamps import TimestampRules
from pagewire.ipc.wire import messages, worker_messages
from pagewire.ipc.wire.codec import INLINE_BYTES, ITEM_SIZES, Tensor
from pagewire.ipc.wire.items import MAX_RETAINED_SECONDS, Retention
from pagewire.ipc.wire.lora import MAX_ADAPTER_ID, AdapterSource
from pagewire.ipc.wire.params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from pagewire.ipc.wire.pooling import POOLING_TYPES, TASKS, PoolerConfig, PoolingParams

UNIONS = {
    "ToCore": messages.ToCore,
    "ToFrontend": messages.ToFrontend,
    "ToWorker": worker_messages.ToWorker,
    "FromWorker": worker_messages.FromWorker,
}

int64 = st.integers(-(2**63), 2**63 - 1)
token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=4)
floats = st.floats(allow_nan=False)
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
plain = st.recursive(
    st.none() | st.booleans() | int64 | floats | words | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Of every dtype; empty, inline, or large enough for a frame of its own."""
    dtype = draw(st.sampled_from(sorted(ITEM_SIZES)))
    rows = draw(st.sampled_from([0, 1, 3, INLINE_BYTES // 8, INLINE_BYTES // 8 + 1, 2 * INLINE_BYTES]))
    shape = draw(st.sampled_from([(rows,), (rows, 1), (1, rows), (rows, 2), (rows, 0), ()]))
    size = math.prod(shape) * ITEM_SIZES[dtype]
    pattern = draw(st.binary(min_size=1, max_size=9))
    return Tensor(dtype, shape, (pattern * (size // len(pattern) + 1))[:size])


def numbers(low: float, high: float | None = None, *, above: bool = False) -> st.SearchStrategy[float]:
    """Floats of a range, most often its ends."""
    inside = st.floats(low, high, exclude_min=above, allow_infinity=False, allow_nan=False)
    return inside if high is None else inside | st.just(high)


structures = st.one_of(
    st.builds(StructuredOutputsParams, json=st.fixed_dictionaries({"const": st.none() | words})),
    st.builds(StructuredOutputsParams, regex=words, disable_fallback=st.booleans()),
    st.builds(StructuredOutputsParams, choice=st.lists(words, min_size=1, max_size=3)),
    st.builds(StructuredOutputsParams, grammar=words),
    st.builds(StructuredOutputsParams, json_object=st.just(True), whitespace_pattern=st.none() | words),
)

timestamp_rules = st.builds(
    TimestampRules,
    first=st.integers(10, 2**31 - 1),
    end=st.integers(0, 9),
    max_initial=st.none() | st.integers(0, 2**31 - 1),
)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    """Every parameter over its whole range."""
    max_tokens = draw(st.none() | st.integers(1, 2**63 - 1))
    detokenize = draw(st.booleans())
    texts = st.lists(words.filter(bool), max_size=3)
    few = st.none() | st.integers(-1, 2**63 - 1)
    fields: dict[str, st.SearchStrategy[Any]] = {
        "n": st.integers(1, 64),
        "presence_penalty": numbers(-2.0, 2.0),
        "frequency_penalty": numbers(-2.0, 2.0),
        "repetition_penalty": numbers(0.0, above=True),
        "temperature": numbers(0.0),
        "top_p": numbers(0.0, 1.0, above=True),
        "top_k": st.integers(-1, 2**63 - 1),
        "min_p": numbers(0.0, 1.0),
        "seed": st.none() | int64,
        "stop": st.none() | words.filter(bool) | texts if detokenize else st.none(),
        "stop_token_ids": st.none() | token_ids,
        "bad_words": st.none() | texts,
        "ignore_eos": st.booleans(),
        "min_tokens": st.integers(0, 2**63 - 1 if max_tokens is None else max_tokens),
        "logprobs": few,
        "prompt_logprobs": few,
        "flat_logprobs": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "spaces_between_special_tokens": st.booleans(),
        "include_stop_str_in_output": st.booleans(),
        "truncate_prompt_tokens": st.sampled_from([None, -1, 1, 2**63 - 1]),
        "output_kind": st.sampled_from(RequestOutputKind),
        "structured_outputs": st.none() | structures,
        "logit_bias": st.none()
        | st.dictionaries(st.integers(0, 2**31 - 1), numbers(-100.0, 100.0), max_size=3),
        "allowed_token_ids": st.none() | token_ids.filter(bool),
        "extra_args": st.none() | st.dictionaries(words, plain, max_size=3),
        "bad_words_token_ids": st.none() | st.lists(token_ids, max_size=3),
        "num_returned": st.sampled_from([None, 1]),
        "best_of": st.sampled_from([None, 64]),
        "processed_logprobs": st.booleans(),
        "timestamps": st.none() | timestamp_rules,
        "logits_processors": st.none() | st.lists(words.filter(bool), max_size=2),
    }
    given = draw(st.sets(st.sampled_from(sorted(fields)), max_size=8))
    values = {name: draw(fields[name]) for name in sorted(given)}
    return SamplingParams(max_tokens=max_tokens, detokenize=detokenize, **values)


choices = st.none() | st.booleans()
sizes = st.none() | st.integers(1, 2**63 - 1)
pooling_params = st.builds(
    PoolingParams,
    truncate_prompt_tokens=sizes | st.just(-1),
    dimensions=sizes,
    normalize=choices,
    activation=choices,
    task=st.none() | st.sampled_from(TASKS),
    prompt_name=st.none() | words,
    all_tokens=st.booleans(),
    second_segment=st.integers(0, 2**63 - 1),
)
pooler_configs = st.builds(
    PoolerConfig,
    pooling_type=st.none() | st.sampled_from(POOLING_TYPES),
    normalize=choices,
    dimensions=sizes,
    activation=choices,
)
speculative_configs = st.builds(
    SpeculativeConfig,
    method=st.sampled_from(get_args(Method)),
    model=st.none() | words,
    num_speculative_tokens=st.integers(0, MAX_DRAFTS),
    prompt_lookup_min=st.integers(1, MAX_LOOKUP),
    prompt_lookup_max=st.integers(1, MAX_LOOKUP),
    disable_by_batch_size=sizes,
    max_model_len=sizes,
    quantization=st.none() | words,
    revision=st.none() | words,
    acceptance_method=st.sampled_from(get_args(Acceptance)),
    posterior_threshold=st.floats(0, 1),
    posterior_alpha=st.floats(0, MAX_ALPHA),
)

adapters = st.builds(
    AdapterSource,
    name=words.filter(bool),
    adapter_id=st.integers(1, MAX_ADAPTER_ID),
    path=st.just("") | words.map(lambda text: "/" + text.replace("\0", "")),
    version=words,
)

retentions = st.builds(
    Retention,
    seconds=numbers(0, MAX_RETAINED_SECONDS, above=True),
    name=words,
    num_tokens=st.integers(0, 2**40),
    with_output=st.booleans(),
)

SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    int: int64,
    float: floats,
    str: words,
    bytes: st.binary(max_size=8),
    bool: st.booleans(),
    type(None): st.none(),
    Any: plain,
    Tensor: tensors(),
    SamplingParams: sampling_params(),
    PoolingParams: pooling_params,
    PoolerConfig: pooler_configs,
    SpeculativeConfig: speculative_configs,
    AdapterSource: adapters,
    Retention: retentions,
}


@st.composite
def deltas(draw: st.DrawFn) -> messages.Deltas:
    """With as many tokens as keys."""
    tokens = draw(st.dictionaries(int64, int64, max_size=3))
    return messages.Deltas(draw(values(list[messages.TokenDelta])), list(tokens), list(tokens.values()))


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of the annotated type `kind`."""
    if kind in SIMPLE:
        return SIMPLE[kind]
    if kind is messages.Deltas:
        return deltas()
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(values, args))
    if origin in (list, Sequence):  # a sequence is decoded as a list
        return st.lists(values(args[0]), max_size=3)
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, args))
    if origin is dict:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    if inspect.isclass(kind) and issubclass(kind, Enum):
        return st.sampled_from(kind)
    if inspect.isclass(kind) and issubclass(kind, msgspec.Struct):
        return st.builds(kind, **{name: values(hint) for name, hint in get_type_hints(kind).items()})
    raise TypeError(f"no values of {kind}")


def members(union: Any) -> tuple[type, ...]:
    """The message types of a union."""
    return get_args(union)
