from __future__ import annotations

import json
import math
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.ipc.wire.params import (
    MAX_JSON_DEPTH,
    MAX_STRUCTURE_CHARS,
    BeamSearchParams,
    GuidedDecodingParams,
    RequestOutputKind,
    SamplingParams,
    SamplingType,
    StructuredOutputsParams,
)
from pagewire.ipc.wire.thinking import ThinkingMarks
from tests.ipc.strategies import sampling_params

BIG = 2**70
HUGE = 10**400

DEFAULTS = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": None,
    "stop_token_ids": None,
    "bad_words": None,
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "flat_logprobs": False,
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "logits_processors": None,
    "include_stop_str_in_output": False,
    "truncate_prompt_tokens": None,
    "output_kind": RequestOutputKind.CUMULATIVE,
    "structured_outputs": None,
    "guided_decoding": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "extra_args": None,
    "best_of": None,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "thinking_token_budget": None,
    "thinking": None,
    "timestamps": None,
}


def test_defaults() -> None:
    params = SamplingParams()
    assert {name: getattr(params, name) for name in DEFAULTS} == DEFAULTS
    assert set(SamplingParams.__struct_fields__) - set(DEFAULTS) == {
        "bad_words_token_ids",
        "num_returned",
        "processed_logprobs",
    }


def test_output_kinds_and_sampling_types() -> None:
    assert [kind.name for kind in RequestOutputKind] == ["CUMULATIVE", "DELTA", "FINAL_ONLY"]
    assert SamplingParams(temperature=0.0).sampling_type is SamplingType.GREEDY
    assert SamplingParams(temperature=0.0, seed=1).sampling_type is SamplingType.GREEDY
    assert SamplingParams().sampling_type is SamplingType.RANDOM
    assert SamplingParams(seed=1).sampling_type is SamplingType.RANDOM_SEED


EDGES: dict[str, list[Any]] = {
    "n": [1, 64],
    "presence_penalty": [-2.0, 2.0, 1],
    "frequency_penalty": [-2.0, 2.0, -1],
    "repetition_penalty": [5e-324, sys.float_info.max, 2],
    "temperature": [0.0, 5e-324, sys.float_info.max, 1, BIG],
    "top_p": [5e-324, 1.0, 1],
    "top_k": [0, 1, 2**63 - 1],
    "min_p": [0.0, 1.0, 0],
    "seed": [-(2**63), 0, 2**63 - 1, None],
    "max_tokens": [1, 2**63 - 1, None],
    "logprobs": [-1, 0, 2**63 - 1, None],
    "prompt_logprobs": [-1, 0, 2**63 - 1, None],
    "truncate_prompt_tokens": [-1, 1, 2**63 - 1, None],
    "stop_token_ids": [[], [0, 2**31 - 1]],
    "allowed_token_ids": [[0], [2**31 - 1]],
    "logit_bias": [{}, {0: -100.0, 2**31 - 1: 100}],
    "bad_words": [[], ["a b", "c"]],
    "extra_args": [{}, {"a": {"b": [1, b"x", None]}}],
    "best_of": [1, 64, None],
    "thinking_token_budget": [0, 2**63 - 1, None],
    "logits_processors": [[], ["a", "b"]],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in EDGES.items() for v in values])
def test_edges_of_the_ranges(name: str, value: Any) -> None:
    params = SamplingParams(**{name: value})
    assert getattr(params, name) == value
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


OUT_OF_RANGE: dict[str, list[Any]] = {
    "num_returned": [0, 2],
    "n": [0, -1, 65, BIG],
    "presence_penalty": [-2.1, 2.1, math.nan, math.inf, BIG],
    "frequency_penalty": [-2.1, 2.1, math.nan, -math.inf],
    "repetition_penalty": [0.0, -1.0, math.nan, math.inf, HUGE],
    "temperature": [-0.1, math.nan, math.inf, HUGE, -HUGE],
    "top_p": [0.0, -0.1, 1.1, math.nan],
    "top_k": [-2, 2**63],
    "min_p": [-0.1, 1.1, math.nan, HUGE],
    "seed": [2**63, -(2**63) - 1, BIG],
    "max_tokens": [0, -1, 2**63],
    "min_tokens": [-1, 2**63],
    "logprobs": [-2, 2**63],
    "prompt_logprobs": [-2, 2**63],
    "truncate_prompt_tokens": [0, -2, 2**63],
    "stop": ["", [""], ["a", ""], "\ud800", ["a", "\udfff"]],
    "bad_words": [[""], ["a", ""], ["\ud800"]],
    "stop_token_ids": [[-1], [2**31], [BIG]],
    "allowed_token_ids": [[], [-1], [2**31]],
    "logit_bias": [{0: 100.1}, {0: -100.1}, {0: math.nan}, {0: HUGE}, {-1: 0.0}, {2**31: 0.0}],
    "bad_words_token_ids": [[[-1]], [[BIG]]],
    "extra_args": [{"a": BIG}, {"a": object()}, {"a": "\ud800"}, {"a": print}],
    "logits_processors": [[print], ["x"] * 65],
    "best_of": [0, 65, BIG],
    "thinking_token_budget": [-1, BIG],
    "thinking": [ThinkingMarks()],
    "length_penalty": [-16.1, 17.0, math.nan, 2.0],
    "early_stopping": ["no", True, "never"],
}
OF_ANOTHER_TYPE: dict[str, list[Any]] = {
    "num_returned": [1.0, True, "1"],
    "best_of": [1.0, True, "1"],
    "thinking_token_budget": [1.0, True, "1"],
    "thinking": ["<think>", 5],
    "timestamps": ["<|0.00|>", 5],
    "use_beam_search": [1, None],
    "processed_logprobs": [1, None],
    "length_penalty": ["1", None],
    "early_stopping": [1, None],
    "logits_processors": ["a", [5], 5],
    "n": ["1", 1.0, None, True],
    "presence_penalty": ["0", None, True],
    "frequency_penalty": ["0", None],
    "repetition_penalty": ["1", None],
    "temperature": ["0.5", None, True, [1.0]],
    "top_p": ["1", None],
    "top_k": ["1", 1.5, None, True],
    "min_p": ["1", None],
    "seed": ["1", 1.0, True],
    "max_tokens": ["1", 1.5, True],
    "min_tokens": ["1", None, 1.0, True],
    "logprobs": ["1", 1.5],
    "prompt_logprobs": ["1", 1.5],
    "truncate_prompt_tokens": ["1", 1.5, True],
    "stop": [5, [5], [None], b"abc"],
    "bad_words": ["abc", [5], 5],
    "stop_token_ids": ["12", 5, ["1"], [1.0], [True], [None]],
    "allowed_token_ids": ["12", 5, ["1"], [True]],
    "logit_bias": [[1], "1", {"a": 1.0}, {None: 1.0}, {0: "1"}, {0: None}, {0: True}],
    "bad_words_token_ids": [[["a"]], [5]],
    "extra_args": [5, [("a", 1)], {1: 2}],
    "ignore_eos": [1, None, "yes"],
    "flat_logprobs": [1, None],
    "detokenize": [1, None],
    "skip_special_tokens": [1, None],
    "spaces_between_special_tokens": [1, None],
    "include_stop_str_in_output": [1, None],
    "output_kind": [0, "DELTA", None],
    "structured_outputs": ["json", 5, []],
    "guided_decoding": ["json", 5, []],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in OUT_OF_RANGE.items() for v in values])
def test_values_out_of_range_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"top_p": 0}, "top_p must be in (0.0, 1.0], got 0"),
        ({"temperature": -1}, "temperature must be in [0.0, inf), got -1"),
        ({"min_tokens": -1}, "min_tokens must be at least 0, got -1"),
        ({"seed": 2**63}, "seed must be in [-2**63, 2**63 - 1], got 9223372036854775808"),
        ({"stop_token_ids": [-1]}, "each of stop_token_ids must be in [0, 2147483647], got -1"),
        ({"logit_bias": {5: 101}}, "logit_bias[5] must be in [-100.0, 100.0], got 101"),
        ({"logit_bias": {-5: 1}}, "each key of logit_bias must be in [0, 2147483647], got -5"),
    ],
)
def test_errors_give_the_field_its_bounds_and_the_value(field: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        SamplingParams(**field)
    assert str(caught.value) == message


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in OF_ANOTHER_TYPE.items() for v in values])
def test_values_of_another_type_are_named(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: value})


def test_every_field_is_checked() -> None:
    assert set(OUT_OF_RANGE) | set(OF_ANOTHER_TYPE) == set(SamplingParams.__struct_fields__)


def test_unknown_parameters() -> None:
    with pytest.raises(TypeError, match="best_off"):
        SamplingParams(best_off=2)  # type: ignore[call-arg]


def test_parameters_that_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="min_tokens must be at most max_tokens=3, got 4"):
        SamplingParams(max_tokens=3, min_tokens=4)
    with pytest.raises(ValueError, match="stop strings need detokenize=True"):
        SamplingParams(stop="a", detokenize=False)
    assert SamplingParams(max_tokens=None, min_tokens=10**6).min_tokens == 10**6


def test_other_forms_of_a_value() -> None:
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(logprobs=True).logprobs == 1
    assert SamplingParams(prompt_logprobs=True).prompt_logprobs == 1
    assert SamplingParams(stop=("a", "b")).stop == ["a", "b"]  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=range(3)).stop_token_ids == [0, 1, 2]  # type: ignore[arg-type]
    assert SamplingParams(logit_bias={"5": 1}).logit_bias == {5: 1.0}  # type: ignore[dict-item]
    assert [SamplingParams(stop=stop).stop_strings for stop in (None, "ab", ["a"])] == [[], ["ab"], ["a"]]


def test_numbers_become_what_msgpack_calls_a_number() -> None:
    class Half(float):
        """As numpy's scalars: a float, but not to msgpack."""

    params = SamplingParams(temperature=Half(0.5), top_p=Half(0.5), logit_bias={1: Half(0.5)})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize("temperature", [0, 0.0, -0.0])
def test_greedy_resets_what_restricts_the_draw(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.5, top_k=3, min_p=0.1)
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)


def test_the_limit_of_n_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="n must be at most 64, got 65; PAGEWIRE_MAX_N_SEQUENCES raises it"):
        SamplingParams(n=65)
    monkeypatch.setenv("PAGEWIRE_MAX_N_SEQUENCES", "65")
    assert SamplingParams(n=65).n == 65
    monkeypatch.setenv("PAGEWIRE_MAX_N_SEQUENCES", "2")
    with pytest.raises(ValueError, match="at most 2"):
        SamplingParams(n=3)


def test_from_optional_takes_none_for_the_default_but_of_max_tokens() -> None:
    params = SamplingParams.from_optional(temperature=None, n=None, top_p=0.5, max_tokens=None)
    assert (params.temperature, params.n, params.top_p, params.max_tokens) == (1.0, 1, 0.5, None)
    assert SamplingParams.from_optional().max_tokens == 16


@given(sampling_params())
def test_a_clone_is_equal_and_deep(params: SamplingParams) -> None:
    clone = params.clone()
    assert clone == params and clone is not params
    for name in ("stop_token_ids", "logit_bias", "extra_args", "bad_words", "bad_words_token_ids"):
        value = getattr(params, name)
        assert value is None or getattr(clone, name) is not value


def test_a_clone_keeps_bytes() -> None:
    assert SamplingParams(extra_args={"a": [b"\xff"]}).clone().extra_args == {"a": [b"\xff"]}


@given(sampling_params())
def test_parameters_survive_the_wire_and_json_holds_them(params: SamplingParams) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    if params.extra_args is None:
        assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams) == params


def test_lone_surrogates_that_json_can_spell_are_refused() -> None:
    with pytest.raises(ValueError, match="stop must hold valid Unicode text"):
        SamplingParams(stop=json.loads('"\\ud83d"'))


@pytest.mark.parametrize(
    ("eos", "own", "params", "stops"),
    [
        (None, 5, {}, None),
        (5, 5, {}, None),
        ([5], 5, {}, None),
        ([5, 7, 6], 5, {}, [6, 7]),
        ([5, 7], None, {}, [5, 7]),
        (7, 5, {}, [7]),
        ([5, 7], 5, {"stop_token_ids": [9, 7]}, [7, 9]),
        ([5, 7], 5, {"ignore_eos": True}, None),
        ([5], 5, {"stop_token_ids": [9, 8]}, [9, 8]),
    ],
)
def test_further_ends_of_sequence_become_stop_tokens(
    eos: Any, own: int | None, params: dict[str, Any], stops: list[int] | None
) -> None:
    sampling = SamplingParams(**params)
    sampling.update_from_generation_config({} if eos is None else {"eos_token_id": eos}, own)
    assert sampling.stop_token_ids == stops


def test_updating_leaves_the_callers_list_alone() -> None:
    mine = [9]
    SamplingParams(stop_token_ids=mine).update_from_generation_config({"eos_token_id": [7]})
    assert mine == [9]


# ---------------------------------------------------------------- beam search


def test_beam_search_defaults() -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    assert (params.ignore_eos, params.temperature, params.length_penalty) == (False, 0.0, 1.0)
    assert params.include_stop_str_in_output is False
    assert (params.early_stopping, params.min_tokens, params.stop_token_ids) == (False, 0, None)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("beam_width", 0, ValueError),
        ("beam_width", 1.0, TypeError),
        ("max_tokens", 0, ValueError),
        ("max_tokens", None, TypeError),
        ("temperature", -1.0, ValueError),
        ("temperature", "0", TypeError),
        ("length_penalty", math.nan, ValueError),
        ("length_penalty", math.inf, ValueError),
        ("length_penalty", HUGE, ValueError),
        ("length_penalty", None, TypeError),
        ("early_stopping", "always", ValueError),
        ("early_stopping", 1, TypeError),
        ("early_stopping", None, TypeError),
        ("min_tokens", -1, ValueError),
        ("min_tokens", 4, ValueError),
        ("stop_token_ids", [-1], ValueError),
    ],
)
def test_beam_search_errors(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=name):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, name: value})


@pytest.mark.parametrize("value", [True, False, "never"])
def test_early_stopping(value: Any) -> None:
    assert BeamSearchParams(1, 1, early_stopping=value).early_stopping is value


@given(st.floats(-10, 10))
def test_any_finite_length_penalty(penalty: float) -> None:
    assert BeamSearchParams(1, 1, length_penalty=penalty).length_penalty == penalty


# ---------------------------------------------------------------- structured outputs

STRUCTURES: dict[str, Any] = {
    "json": '{"type":"object"}',
    "regex": "a+",
    "choice": ["a", ""],
    "grammar": 'start: "a"',
    "json_object": True,
    "structural_tag": '{"structures":[],"triggers":[]}',
}


@pytest.mark.parametrize("kind", STRUCTURES)
def test_every_kind_of_structure_survives_the_wire(kind: str) -> None:
    params = SamplingParams(structured_outputs={kind: STRUCTURES[kind]})  # type: ignore[arg-type]
    assert params.structured_outputs is not None and params.structured_outputs.kind == kind
    assert getattr(params.structured_outputs, kind) == STRUCTURES[kind]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    as_json = msgspec.json.encode(params.structured_outputs)
    assert msgspec.json.decode(as_json, type=StructuredOutputsParams) == params.structured_outputs
    assert params.clone() == params


@pytest.mark.parametrize("kind", STRUCTURES)
def test_guided_decoding_is_the_older_name(kind: str) -> None:
    value = {kind: STRUCTURES[kind]}
    new = SamplingParams(structured_outputs=StructuredOutputsParams(**value))
    assert SamplingParams(guided_decoding=GuidedDecodingParams(**value, backend="outlines")) == new
    assert SamplingParams(guided_decoding=value) == new  # type: ignore[arg-type]
    assert type(new.structured_outputs) is StructuredOutputsParams
    with pytest.raises(ValueError, match="give one"):
        SamplingParams(structured_outputs=value, guided_decoding=value)  # type: ignore[arg-type]


def test_a_schema_is_a_dict_or_text_or_a_model_class_and_keeps_its_order() -> None:
    class Model:
        @classmethod
        def model_json_schema(cls) -> dict[str, Any]:
            return {"type": "object", "properties": {"b": {}, "a": {}}}

    text = '{"type":"object","properties":{"b":{},"a":{}}}'
    for value in (Model, Model.model_json_schema(), text, f" {text}\n"):
        assert StructuredOutputsParams(json=value).json == text  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "exactly one of json, regex.* got none"),
        ({"json_object": False}, "got none"),
        ({"regex": "a", "choice": ["b"]}, "got regex and choice"),
        ({"jsn": "{}"}, r"unknown field of structured outputs 'jsn'; did you mean 'json'\?"),
        ({"json": "{"}, "json is not valid JSON"),
        ({"json": "[1]"}, "json must be a JSON object"),
        ({"json": {"a": math.nan}}, "not valid JSON"),
        ({"json": {"a": {1, 2}}}, "not valid JSON"),
        ({"json": '{"a": "\\ud800"}'}, "valid Unicode"),
        ({"json": '{"a":' * MAX_JSON_DEPTH + "{}" + "}" * MAX_JSON_DEPTH}, "levels deep, it has 101"),
        ({"json": '{"a":' * 100_000 + "{}" + "}" * 100_000}, "levels deep"),
        ({"json": {"const": "b" * MAX_STRUCTURE_CHARS}}, "at most 262144 characters"),
        (
            {"json": {"name": "string", "ages": [0], "title": "str"}},
            'json is not a JSON schema, .*: write it as {"type": "object", "properties": {"name": {"type": '
            '"string"}, "ages": {"type": "array", "items": {"type": "integer"}}, "title": {"type": "string"}}',
        ),
        ({"json": '{"a": {"b": null}, "c": 1.5, "d": true, "e": []}'}, '"b": {"type": "null"}}'),
        (
            {"regex": "a", "whitespace_pattern": ""},
            r"whitespace_pattern is for JSON \(json, .*, not for a regex",
        ),
        ({"choice": ["a"], "disable_any_whitespace": True}, "disable_any_whitespace is for JSON"),
        (
            {"grammar": "a", "disable_additional_properties": True},
            "disable_additional_properties is for JSON",
        ),
        ({"json": {"enum": [0] * (4 * MAX_STRUCTURE_CHARS)}}, "at most 262144 characters"),
        ({"json": "{" * (7 * MAX_STRUCTURE_CHARS)}, "at most 262144 characters"),
        ({"regex": "b" * (MAX_STRUCTURE_CHARS + 1)}, "at most 262144 characters"),
        ({"regex": "\ud800"}, "valid Unicode"),
        ({"choice": []}, "choice must not be empty"),
        ({"choice": ["a" * 99] * 4096}, "at most 262144 characters"),
        ({"structural_tag": "no"}, "structural_tag is not valid JSON"),
        ({"json_object": True, "whitespace_pattern": " ", "disable_any_whitespace": True}, "not both"),
    ],
)
def test_structures_that_are_refused(value: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(structured_outputs=value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value",
    [
        {"json": 5},
        {"json": ["a"]},
        {"regex": 5},
        {"grammar": b"a"},
        {"choice": "abc"},
        {"choice": [1]},
        {"json_object": 1},
        {"json_object": True, "disable_any_whitespace": 1},
        {"json_object": True, "whitespace_pattern": 1},
    ],
)
def test_structures_of_another_type(value: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(name for name in reversed(value))):
        SamplingParams(structured_outputs=value)  # type: ignore[arg-type]


def test_a_schema_that_holds_itself_is_refused() -> None:
    schema: dict[str, Any] = {}
    schema["a"] = schema
    with pytest.raises(ValueError, match="Circular"):
        StructuredOutputsParams(json=schema)


def test_beam_search_says_what_does_not_go_with_it() -> None:
    SamplingParams(n=2, best_of=3, use_beam_search=True, length_penalty=2.0, early_stopping="never", top_k=-1)
    for fields, message in (
        ({"top_p": 0.5}, "top_p is not supported with use_beam_search: .* draws no tokens"),
        ({"stop": "x"}, "stop is not supported with use_beam_search: .* give stop_token_ids"),
        ({"logprobs": 0}, "logprobs is not supported with use_beam_search"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs are not supported with use_beam_search"),
        ({"best_of": 1, "n": 2}, "best_of must be from n=2 to 64, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            SamplingParams(use_beam_search=True, **fields)
    with pytest.raises(ValueError, match="length_penalty is a parameter of beam search: set use_beam_search"):
        SamplingParams(length_penalty=2.0)
