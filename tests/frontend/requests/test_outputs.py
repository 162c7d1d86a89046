"""Deltas in, outputs out: however they are cut and whenever they are taken, the outcome is the same."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.frontend.requests.outputs import (
    CompletionOutput,
    Outputs,
    RequestOutput,
    RequestState,
    received_time,
)
from pagewire.frontend.text.logprobs import FlatLogprobs
from pagewire.frontend.text.tokenizer import Tokenizer
from pagewire.ipc.errors import EngineDeadError, RequestError
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.messages import Abort, Deltas, Request, RequestTiming, TokenDelta
from pagewire.ipc.wire.params import RequestOutputKind, SamplingParams
from tests.frontend import trained
from tests.frontend.conftest import by_columns
from tests.frontend.text.test_logprobs import rows

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
PROMPT = [5, 6, 7]


def new_state(tokenizer: Tokenizer | None, key: int = 0, **params: Any) -> RequestState:
    request = Request(
        key, f"r{key}", Prompt(PROMPT), SamplingParams(**{"max_tokens": 1000, **params}), seed=0
    )
    return RequestState(request, "prompt", tokenizer)


def take(state: RequestState) -> RequestOutput:
    output = state.take()
    assert output is not None
    return output


@pytest.fixture
def tokenizer(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["byte_level"]


@pytest.fixture
def ids(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode("The quick brown fox jumps", add_special_tokens=False)


# ---------------------------------------------------------------- any cut, any takes


def deltas_of(
    draw: random.Random, key: int, sequences: list[list[int]], with_logprobs: bool
) -> list[TokenDelta]:
    """All sequences of a request in random pieces, in a random order that keeps each one's own."""
    left = {index: list(ids) for index, ids in enumerate(sequences)}
    deltas = []
    while left:
        index = draw.choice(list(left))
        size = draw.randrange(0, 4)
        ids, left[index] = left[index][:size], left[index][size:]
        logprobs = None
        if with_logprobs and ids:
            logprobs = rows([[i, 1] for i in ids], [[-0.5, -0.25]] * len(ids), [2] * len(ids))
        delta = TokenDelta(key, index, ids, logprobs=logprobs)
        if not left[index]:
            del left[index]
            delta.finish_reason = "length"
        deltas.append(delta)
    return deltas


@pytest.mark.parametrize("family", ["byte_level", "llama_2", "unigram", "word_piece", "unknown_decoder"])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_all_output_kinds_add_up_to_the_same(
    family: str, tokenizers: dict[str, Tokenizer], data: st.DataObject
) -> None:
    tokenizer = tokenizers[family]
    draw = random.Random(data.draw(st.integers(0, 2**32)))
    text = tokenizer.encode(draw.choice(trained.TEXT), add_special_tokens=False)
    sequences = []
    for _ in range(data.draw(st.integers(1, 3))):
        noise = [draw.randrange(tokenizer.vocab_size) for _ in range(draw.randrange(8))]
        at = draw.randrange(len(text))
        sequences.append(text[at:][:20] + ([] if family == "unknown_decoder" else noise))
    stop = data.draw(st.sampled_from([None, ["e", "fox"], ["の"], [" "]]))
    with_logprobs = data.draw(st.booleans())
    outcomes = []
    for kind in RequestOutputKind:
        state = new_state(
            tokenizer,
            n=len(sequences),
            stop=stop,
            output_kind=kind,
            logprobs=1 if with_logprobs else None,
            flat_logprobs=draw.random() < 0.5,
        )
        taken = []
        outputs = Outputs()
        outputs.add(state)
        deltas = deltas_of(draw, 0, sequences, with_logprobs)
        dropped = []
        while deltas:
            size = draw.randrange(1, 4)
            dropped += outputs.process(draw.choice([Deltas, by_columns])(deltas[:size]))[1].sequences
            deltas = deltas[size:]
            if draw.random() < 0.5:
                taken.append(state.take())
        taken.append(state.take())
        assert state.finished and not outputs.states and state.take() is None
        assert len(set(dropped)) == len(dropped)
        outcomes.append(merged([output for output in taken if output is not None], kind))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    for (index, text, ids, logprobs, _, reason, why), sequence in zip(outcomes[0], sequences, strict=True):
        assert sequence[: len(ids)] == ids and (len(logprobs) == len(ids) or not with_logprobs)
        if reason == "length":
            assert (ids, text) == (sequence, tokenizer.decode(sequence))
        else:
            assert (reason, why in stop) == ("stop", True)
            assert tokenizer.decode(ids).startswith(text)
        assert index < 3


def merged(taken: list[RequestOutput], kind: RequestOutputKind) -> list[Any]:
    """What all outputs of a request together hold: (index, text, tokens, log probabilities, ...) per sequence."""
    assert [output.finished for output in taken] == [False] * (len(taken) - 1) + [True]
    if kind is not DELTA:
        if kind is FINAL_ONLY:
            assert len(taken) == 1
        for earlier, later in itertools.pairwise(taken):
            for old, new in zip(earlier.outputs, later.outputs, strict=True):
                assert new.text.startswith(old.text) and new.token_ids[: len(old.token_ids)] == old.token_ids
        return [
            (
                o.index,
                o.text,
                o.token_ids,
                list(o.logprobs or []),
                o.cumulative_logprob,
                o.finish_reason,
                o.stop_reason,
            )
            for o in taken[-1].outputs
        ]
    parts: dict[int, list[CompletionOutput]] = {}
    for output in taken:
        for completion in output.outputs:
            parts.setdefault(completion.index, []).append(completion)
    for index in parts:
        assert [part.finished() for part in parts[index]] == [False] * (len(parts[index]) - 1) + [True]
    return [
        (
            index,
            "".join(part.text for part in parts[index]),
            [i for part in parts[index] for i in part.token_ids],
            [position for part in parts[index] for position in part.logprobs or []],
            parts[index][-1].cumulative_logprob,
            parts[index][-1].finish_reason,
            parts[index][-1].stop_reason,
        )
        for index in sorted(parts)
    ]


# ---------------------------------------------------------------- one request


def test_cumulative(tokenizer: Tokenizer, ids: list[int]) -> None:
    state = new_state(tokenizer)
    assert state.take() is None
    state.apply(TokenDelta(0, 0, ids[:1], num_cached_tokens=2))
    first = take(state)
    assert (first.request_id, first.prompt, first.prompt_token_ids) == ("r0", "prompt", PROMPT)
    assert (first.finished, first.num_cached_tokens, first.prompt_logprobs) == (False, 2, None)
    assert state.take() is None
    state.apply(TokenDelta(0, 0, ids[1:], "stop", stop_reason=7))
    (output,) = take(state).outputs
    assert output == CompletionOutput(0, tokenizer.decode(ids), ids, None, None, "stop", 7)
    assert output.finished() and first.outputs[0].token_ids == ids[:1]


def test_without_text(tokenizer: Tokenizer, ids: list[int]) -> None:
    for state in (new_state(tokenizer, detokenize=False), new_state(None)):
        state.apply(TokenDelta(0, 0, ids, "length"))
        assert take(state).outputs == [CompletionOutput(0, "", ids, finish_reason="length")]


def test_a_stop_string_ends_a_sequence_once(tokenizer: Tokenizer, ids: list[int]) -> None:
    state = new_state(tokenizer, stop="quick", n=2)
    outputs = Outputs()
    outputs.add(state)
    assert outputs.process(Deltas([TokenDelta(0, 0, ids)])) == ([state], Abort([], [(0, 0)]))
    assert outputs.process(Deltas([TokenDelta(0, 0, ids), TokenDelta(0, 1, ids[:1])])) == ([state], Abort())
    output = take(state)
    assert output.outputs[0].text == "The " and output.outputs[0].stop_reason == "quick"
    assert tokenizer.decode(output.outputs[0].token_ids).endswith("quick")
    assert not output.finished and output.outputs[1].token_ids == ids[:1]
    assert (
        outputs.process(Deltas([TokenDelta(0, 1, ids[1:], "length")]))[1] == Abort()
    )  # the core has ended it itself
    assert take(state).outputs[1].finish_reason == "stop" and state.finished


def test_tokens_behind_a_stop_string_are_not_part_of_it(tokenizer: Tokenizer, ids: list[int]) -> None:
    state = new_state(tokenizer, stop="quick", logprobs=0)
    state.apply(TokenDelta(0, 0, ids, logprobs=rows([[i] for i in ids], [[-1.0]] * len(ids), [1] * len(ids))))
    (output,) = take(state).outputs
    assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids) < len(ids)
    assert output.cumulative_logprob == -len(output.token_ids)


def test_an_error_ends_its_sequence(tokenizer: Tokenizer, ids: list[int]) -> None:
    state = new_state(tokenizer, n=2)
    state.apply(TokenDelta(0, 0, ids[:1], error="no memory"))
    assert (state.error, state.finished, state.finish_reasons) == ("no memory", False, ["error", None])
    state.apply(TokenDelta(0, 1, ids, "length"))
    assert [output.finish_reason for output in take(state).outputs] == ["error", "length"]


def test_late_and_foreign_deltas_are_ignored(tokenizer: Tokenizer, ids: list[int]) -> None:
    state = new_state(tokenizer)
    outputs = Outputs()
    outputs.add(state)
    assert outputs.process(Deltas([TokenDelta(9, 0, ids), TokenDelta(0, 5, ids)])) == ([state], Abort())
    assert state.take() is None
    outputs.process(Deltas([TokenDelta(0, 0, ids, "length")]))
    assert take(state).finished and not outputs.states
    assert outputs.process(Deltas([TokenDelta(0, 0, ids)])) == ([], Abort())


def test_each_request_is_touched_once(tokenizer: Tokenizer, ids: list[int]) -> None:
    outputs = Outputs()
    states = [new_state(tokenizer, key) for key in range(3)]
    for state in states:
        outputs.add(state)
    deltas = [TokenDelta(key, 0, ids[i : i + 1]) for i in range(2) for key in (2, 0)]
    assert outputs.process(Deltas(deltas)) == ([states[2], states[0]], Abort())
    assert outputs.drop(2) is states[2] and outputs.drop(2) is None
    assert outputs.process(Deltas(deltas)) == ([states[0]], Abort())


def test_a_failed_request_keeps_what_it_has(tokenizer: Tokenizer, ids: list[int]) -> None:
    state = new_state(tokenizer, output_kind=FINAL_ONLY)
    state.apply(TokenDelta(0, 0, ids))
    state.fail(EngineDeadError("gone"))
    assert (str(state.exception()), type(state.exception())) == ("gone", EngineDeadError)
    output = take(state)
    assert output.finished and output.outputs[0].finish_reason == "error"
    assert output.outputs[0].text == tokenizer.decode(ids)


def test_an_exception_in_one_output_ends_its_request_alone(
    tokenizer: Tokenizer, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core must drop the request, and others get their deltas of the same step."""
    outputs, states = Outputs(), [new_state(tokenizer, key, n=2) for key in range(3)]
    for state in states:
        outputs.add(state)

    def broken(token_ids: list[int]) -> int:
        raise KeyError("no such piece")

    monkeypatch.setattr(states[1]._outputs[0]._detokenizer, "feed", broken)
    touched, to_drop = outputs.process(Deltas([TokenDelta(key, 0, ids) for key in range(3)]))
    assert (touched, to_drop) == (states, Abort(keys=[1]))
    assert states[1].finished and 1 not in outputs.states
    assert type(states[1].exception()) is RequestError and "KeyError: 'no such piece'" in str(states[1].error)
    assert take(states[1]).finished
    assert [states[key].output_token_ids[0] for key in (0, 2)] == [ids, ids]
    assert outputs.process(Deltas([TokenDelta(key, 0, [], "stop") for key in range(3)])) == (
        [states[0], states[2]],
        Abort(),
    )


def test_a_detokenizer_that_cannot_end_ends_nothing_else(
    tokenizer: Tokenizer, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = new_state(tokenizer, n=2)
    state.apply(TokenDelta(0, 0, ids))

    def broken() -> None:
        raise KeyError("no such piece")

    monkeypatch.setattr(state._outputs[0]._detokenizer, "end", broken)
    state.end("abort")
    assert state.finish_reasons == ["abort", "abort"]
    assert take(state).outputs[0].text == tokenizer.decode(ids)


def test_an_aborted_request_keeps_what_it_has(tokenizer: Tokenizer, ids: list[int]) -> None:
    state = new_state(tokenizer, n=2, output_kind=DELTA)
    state.apply(TokenDelta(0, 0, ids, "length"))
    state.apply(TokenDelta(0, 1, ids[:1]))
    take(state)
    state.end("abort")
    (output,) = take(state).outputs
    assert (output.index, output.token_ids, output.finish_reason) == (1, [], "abort")
    assert state.output_token_ids == [ids, ids[:1]]


def test_a_delta_output_holds_only_what_is_new(tokenizer: Tokenizer, ids: list[int]) -> None:
    state = new_state(tokenizer, n=3, output_kind=DELTA)
    state.apply(TokenDelta(0, 2, ids[:1]))
    state.apply(TokenDelta(0, 0, ids[:2]))
    state.apply(TokenDelta(0, 2, ids[1:2]))
    assert [(output.index, output.token_ids) for output in take(state).outputs] == [
        (0, ids[:2]),
        (2, ids[:2]),
    ]
    state.apply(TokenDelta(0, 2, ids[2:3]))
    assert [(output.index, output.token_ids) for output in take(state).outputs] == [(2, ids[2:3])]


@pytest.mark.parametrize("flat", [False, True])
def test_logprobs_of_the_prompt(flat: bool, tokenizer: Tokenizer, ids: list[int]) -> None:
    some, more = rows([[6, 1]], [[-1.0, -0.5]], [2]), rows([[7, 1]], [[-2.0, -0.5]], [3])
    for kind in (CUMULATIVE, DELTA):
        state = new_state(tokenizer, prompt_logprobs=1, output_kind=kind, flat_logprobs=flat)
        state.apply(TokenDelta(0, 0, [], prompt_logprobs=some))
        assert state.take() is None
        state.apply(TokenDelta(0, 0, ids[:1], prompt_logprobs=more))
        logprobs = take(state).prompt_logprobs
        assert (
            logprobs is not None
            and isinstance(logprobs, FlatLogprobs) == flat
            and len(logprobs) == len(PROMPT)
        )
        assert logprobs[0] is None and logprobs[1] is not None and logprobs[2] is not None
        assert list(logprobs[1]) == [6, 1] and logprobs[2][7].rank == 3
        assert logprobs[1][6].decoded_token == tokenizer.decode([6])
        state.apply(TokenDelta(0, 0, ids[1:2]))
        again = take(state).prompt_logprobs
        assert again == (None if kind is DELTA else logprobs)


def test_an_output_does_not_change_afterwards(tokenizer: Tokenizer, ids: list[int]) -> None:
    for flat in (False, True):
        state = new_state(tokenizer, logprobs=0, flat_logprobs=flat)
        state.apply(TokenDelta(0, 0, ids[:1], logprobs=rows([ids[:1]], [[-1.0]], [1])))
        output = take(state)
        state.apply(TokenDelta(0, 0, ids[1:2], "stop", logprobs=rows([ids[1:2]], [[-1.0]], [1])))
        later = take(state)
        assert len(output.outputs[0].token_ids) == len(output.outputs[0].logprobs or []) == 1
        assert len(later.outputs[0].logprobs or []) == 2
        assert output.metrics is not later.metrics


def test_metrics(tokenizer: Tokenizer, ids: list[int]) -> None:
    state = new_state(tokenizer)
    state.apply(TokenDelta(0, 0, ids[:1], timing=RequestTiming(100.0, 102.0, 105.0, 0.0)))
    metrics = take(state).metrics
    assert metrics is not None and metrics.finished_time is None
    assert metrics.time_in_queue == 2.0
    assert metrics.first_scheduled_time == metrics.arrival_time + 2
    assert metrics.first_token_time == metrics.arrival_time + 5
    state.apply(TokenDelta(0, 0, ids[1:], "length", timing=RequestTiming(100.0, 102.0, 105.0, 106.0)))
    metrics = take(state).metrics
    assert metrics is not None and metrics.finished_time == metrics.last_token_time
    assert metrics.finished_time is not None and metrics.finished_time >= metrics.arrival_time


def test_the_way_to_a_core_counts_if_its_clock_is_ours() -> None:
    timing = RequestTiming(arrived=100.0, scheduled=102.0, first_token=105.0, finished=0.0)
    assert received_time(timing, arrival=5000.0, now=5010.0, monotonic=106.0) == 5004.0
    assert received_time(timing, arrival=5000.0, now=5010.0, monotonic=110.0) == 5000.0
    assert received_time(timing, arrival=5000.0, now=5010.0, monotonic=105.0) == 5005.0
    for elsewhere in (104.0, 111.0, 0.0, 1e6):
        assert received_time(timing, arrival=5000.0, now=5010.0, monotonic=elsewhere) == 5000.0


def test_metrics_of_a_core_on_this_machine(tokenizer: Tokenizer, ids: list[int]) -> None:
    state = new_state(tokenizer)
    state = RequestState(msgspec.structs.replace(state.request, age=60.0), "prompt", tokenizer)
    now = time.monotonic()
    state.apply(TokenDelta(0, 0, ids[:1], timing=RequestTiming(now - 20, now - 19, now - 10, 0.0)))
    metrics = take(state).metrics
    assert metrics is not None and metrics.received_time is not None
    assert metrics.received_time - metrics.arrival_time >= 40
    assert metrics.first_scheduled_time == metrics.received_time + 1
    assert metrics.first_token_time == metrics.received_time + 10
    assert metrics.last_token_time is not None and metrics.last_token_time >= metrics.first_token_time


def test_outputs_can_be_read(tokenizer: Tokenizer, ids: list[int]) -> None:
    state = new_state(tokenizer)
    state.apply(TokenDelta(0, 0, ids, "length"))
    text = repr(take(state))
    for part in (
        "RequestOutput(request_id='r0'",
        "prompt='prompt'",
        "finish_reason='length'",
        "The quick brown",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("reason", "keep", "count"), [("stop", False, 1), ("stop", True, 2), ("length", False, 2)]
)
def test_a_special_token_that_ends_an_output_is_not_in_its_text(
    reason: str, keep: bool, count: int, tokenizer: Tokenizer, ids: list[int]
) -> None:
    special = min(tokenizer.special_ids)
    for cut in range(len(ids) + 1):
        state = new_state(tokenizer, skip_special_tokens=False, include_stop_str_in_output=keep)
        state.apply(TokenDelta(0, 0, [special, *ids[:cut]]))
        state.apply(TokenDelta(0, 0, [*ids[cut:], special], reason))
        (output,) = take(state).outputs
        assert output.token_ids == [special, *ids, special]
        assert output.text.count(tokenizer.decode([special], False)) == count
        assert output.text.startswith(tokenizer.decode([special, *ids], False))


def test_which_weights_gave_the_tokens(tokenizer: Tokenizer) -> None:
    """Deltas say all that their core knows; one that took the request over does not know of tokens before."""
    state = new_state(tokenizer)
    for token_ids, weights, expected in [
        ([5], [], ()),
        ([6, 7], [(1, "1")], ((1, "1"),)),
        ([8], [(1, "1"), (3, "2")], ((1, "1"), (3, "2"))),
        ([9], [], ((1, "1"), (3, "2"))),
        ([5], [(5, "")], ((1, "1"), (3, "2"), (5, ""))),
        ([6], [(5, ""), (6, "3")], ((1, "1"), (3, "2"), (5, ""), (6, "3"))),
    ]:
        state.apply(TokenDelta(0, 0, token_ids, weights=weights))
        (output,) = take(state).outputs
        assert output.weights_versions == expected
        assert output.weights_version == (expected[-1][1] if expected else "")


def test_a_core_that_took_over_with_the_first_weights_says_nothing(tokenizer: Tokenizer) -> None:
    state = new_state(tokenizer)
    state.apply(TokenDelta(0, 0, [5]))
    state.apply(TokenDelta(0, 0, [6], weights=[(1, "")]))
    (output,) = take(state).outputs
    assert output.weights_versions == ()
