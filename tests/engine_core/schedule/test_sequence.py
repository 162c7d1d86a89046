from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.engine_core.schedule.sequence import Sequence, State, sequence_seed, sequences
from pagewire.engine_core.tenants.accounts import Account
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.requests import Request, RequestTiming

int64 = st.integers(-(2**63), 2**63 - 1)


def group(
    prompt: tuple[int, ...] = (1, 2, 3), *, arrival: int = 5, share_prefixes: bool = True, **fields: Any
) -> list[Sequence]:
    """The sequences of a submitted request; what is no field of `Request` is a parameter."""
    own = {name: fields.pop(name) for name in set(fields) & set(Request.__struct_fields__)}
    inputs = Prompt(list(prompt), cache_salt=fields.pop("cache_salt", None))
    submitted = Request(1, "r1", inputs, SamplingParams(**fields), **{"seed": 42, **own})
    return sequences(
        submitted,
        b"c",
        arrival,
        1.5,
        max_model_len=32,
        share_prefixes=share_prefixes,
        tenant=Account(b"c"),
    )


def test_each_of_n_sequences_is_a_request_of_its_own() -> None:
    first, second, third = group(n=3, priority=2, eos_token_id=9)
    assert [r.index for r in (first, second, third)] == [0, 1, 2]
    assert [r.arrival for r in (first, second, third)] == [5, 6, 7]
    assert len({r.seed for r in (first, second, third)}) == 3
    assert first.token_ids == second.token_ids and first.token_ids is not second.token_ids
    for r in (first, second, third):
        assert (r.key, r.client, r.request_id) == (1, b"c", "r1")
        assert r.request is first.request and r.request.priority == 2
        assert (r.state, r.computed, r.slot, r.arrival_time) == (State.WAITING, 0, -1, 1.5)


@pytest.mark.parametrize(("max_tokens", "allowed"), [(1, 1), (29, 29), (30, 29), (1000, 29), (None, 29)])
def test_output_ends_at_max_tokens_or_at_the_models_length(max_tokens: int | None, allowed: int) -> None:
    assert group(max_tokens=max_tokens)[0].max_output == allowed


def test_a_resubmission_goes_on_behind_its_tokens() -> None:
    first, second = group(n=2, output_token_ids=[[7, 8], []])
    assert first.token_ids == [1, 2, 3, 7, 8] and second.token_ids == [1, 2, 3]
    assert (first.num_prompt_tokens, first.num_output_tokens, second.num_output_tokens) == (3, 2, 0)


def test_what_is_left_to_compute() -> None:
    (request,) = group(max_tokens=2)
    assert request.num_to_compute == 3
    request.launch(3, 1)
    assert request.num_to_compute == 1  # the token in flight
    request.launch(1, 1)
    request.land(1)
    request.token_ids.append(9)
    assert request.num_to_compute == 0  # the last token is in flight: its KV is of no use


def test_a_launch_of_several_samples_must_return_before_the_next() -> None:
    (sequence,) = group(max_tokens=9)
    sequence.launch(5, 3)  # the prompt, and two drafts
    assert (sequence.computed, sequence.num_to_compute) == (5, 0)
    sequence.land(3)
    sequence.computed -= 1
    sequence.token_ids += [7, 8]  # one draft was right
    assert (sequence.computed, sequence.num_pending, sequence.num_to_compute) == (4, 0, 1)


def test_prompt_logprobs_are_the_first_sequences_alone() -> None:
    assert [r.returns_prompt_logprobs for r in group(n=3, prompt_logprobs=0)] == [True, False, False]
    assert not group()[0].returns_prompt_logprobs


def test_salts_set_apart_and_no_salt_is_the_empty_one() -> None:
    spaces = [group(cache_salt=salt)[0].block_keys(0, 4) for salt in (None, "", "a", "b")]
    assert spaces[0] == spaces[1] and len(set(spaces)) == 3


def test_without_shared_prefixes_every_submission_is_set_apart_but_not_its_sequences() -> None:
    first, second = group(n=2, arrival=1, share_prefixes=False)
    (other,) = group(arrival=3, share_prefixes=False)
    assert first.namespace == second.namespace != other.namespace


def test_timing() -> None:
    (request,) = group()
    request.scheduled_time, request.first_token_time = 2.0, 3.0
    assert request.timing(4.0) == RequestTiming(1.5, 2.0, 3.0, 4.0)


@given(int64)
def test_the_first_sequence_samples_with_the_requests_own_seed(seed: int) -> None:
    assert sequence_seed(seed, 0) == seed


@given(int64, st.integers(0, 64), st.integers(0, 64))
def test_sequences_have_different_seeds_of_64_bits(seed: int, i: int, j: int) -> None:
    a, b = sequence_seed(seed, i), sequence_seed(seed, j)
    assert -(2**63) <= a < 2**63
    assert (a == b) == (i == j)


def test_seeds_are_those_of_splitmix64() -> None:
    """The published first outputs for state 0."""
    assert [sequence_seed(0, i) % 2**64 for i in (1, 2, 3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]
