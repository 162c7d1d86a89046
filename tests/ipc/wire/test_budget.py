"""The budget of a request holds on the wire: what is too long is refused before it becomes objects."""

from __future__ import annotations

import math
import struct
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from pagewire.ipc.bounds import all_within, check_for
from pagewire.ipc.errors import ProtocolError
from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire import budget
from pagewire.ipc.wire.codec import Codec, Tensor
from pagewire.ipc.wire.items import Media, Prompt
from pagewire.ipc.wire.messages import Hello, Request, Submit, ToCore
from pagewire.ipc.wire.params import SamplingParams, StructuredOutputsParams

ARRAY = msgspec.Raw(b"\xdd" + struct.pack(">I", 2**32 - 1))  # of so many elements, none of which follow
MAP = msgspec.Raw(b"\xdf" + struct.pack(">I", 2**32 - 1))


def submit(prompt: list[Any], *more: Any, **params: Any) -> bytes:
    """A request as a frontend could spell it."""
    request = [1, "r", prompt, {"type": "sampling", **params}, 7, *more]
    return msgspec.msgpack.encode({"type": "submit", "requests": [request]})


@pytest.mark.parametrize(
    "frame",
    [
        submit([ARRAY]),
        submit([[1], ARRAY]),
        submit([[1]], None, 0, ARRAY),
        submit([[1]], None, 0, [ARRAY]),
        submit([[1]], stop=ARRAY),
        submit([[1]], stop_token_ids=ARRAY),
        submit([[1]], bad_words=ARRAY),
        submit([[1]], bad_words_token_ids=ARRAY),
        submit([[1]], bad_words_token_ids=[ARRAY]),
        submit([[1]], allowed_token_ids=ARRAY),
        submit([[1]], logit_bias=MAP),
        submit([[1]], structured_outputs={"choice": ARRAY}),
        msgspec.msgpack.encode({"type": "submit", "requests": ARRAY}),
        msgspec.msgpack.encode({"type": "abort", "keys": ARRAY}),
        msgspec.msgpack.encode({"type": "abort", "sequences": ARRAY}),
        msgspec.msgpack.encode({"type": "call", "call_id": 1, "method": "status", "args": ARRAY}),
    ],
)
def test_the_length_of_a_list_is_checked_before_its_elements_are_read(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match="of length <= "):
        Codec(ToCore).decode([frame])


LONG = "x" * (budget.MAX_NAME_CHARS + 1)


@pytest.mark.parametrize(
    "message",
    [
        Submit([Request(1, LONG, Prompt([1]), SamplingParams(), 7)]),
        Submit([Request(1, "r", Prompt([1], cache_salt=LONG), SamplingParams(), 7)]),
        Submit([Request(1, "r", Prompt([1], adapter=LONG.encode()), SamplingParams(), 7)]),
        Hello(4, LONG, 1),
        Hello(4, "1", 1, LONG),
    ],
)
def test_strings_have_limits(message: Any) -> None:
    codec: Codec[Any] = Codec(ToCore)
    with pytest.raises(ProtocolError, match="of length <= 1024"):
        codec.decode(codec.encode(message))


def test_a_first_frame_over_the_limit_is_not_decoded_and_a_tensor_does_not_count() -> None:
    codec: Codec[Any] = Codec(ToCore, max_head_bytes=1000)
    with pytest.raises(ProtocolError, match="2000 bytes is over the limit of 1000"):
        codec.decode([b"\xc1" * 2000])  # no msgpack at all
    checked: list[Any] = []
    with pytest.raises(ProtocolError, match="over the limit"):
        codec.decode([b"\xc1" * 2000], checked.append)
    assert not checked, "a frame of any size was read"
    (frame,) = codec.encode(Hello(4, "1", 1))
    assert codec.decode([frame], checked.append) == Hello(4, "1", 1) and checked == [frame]
    tensor = Tensor("uint8", (1 << 16,), bytes(1 << 16))
    message = Submit([Request(1, "r", Prompt([1], [Media(0, 1, b"n", tensor)]), SamplingParams(), 7)])
    assert codec.decode(codec.encode(message)) == message


@pytest.mark.parametrize(("max_model_len", "vocab_size", "max_n"), [(128, 1000, 64), (4096, 150_000, 2)])
def test_the_largest_request_of_an_engine_fits_in_a_message(
    max_model_len: int, vocab_size: int, max_n: int
) -> None:
    """One with all that its limits allow at once, which is submitted again when it is all but complete."""
    words = ["\N{PILE OF POO}" * (budget.MAX_BAD_WORDS_CHARS // budget.MAX_BAD_WORDS)] * budget.MAX_BAD_WORDS
    tokens = list(range(vocab_size - max_model_len, vocab_size)) if vocab_size > max_model_len else [1]
    params = SamplingParams(
        stop=["\N{PILE OF POO}" * budget.MAX_STOP_CHARS] * budget.MAX_STOPS,
        stop_token_ids=[vocab_size - 1] * budget.MAX_STOP_TOKENS,
        allowed_token_ids=list(range(vocab_size)),
        logit_bias=dict.fromkeys(range(vocab_size), 0.5),
        extra_args={"a": "x" * (budget.MAX_EXTRA_BYTES - 100)},
        structured_outputs=StructuredOutputsParams(regex="\N{PILE OF POO}" * budget.MAX_STRUCTURE_CHARS),
        max_tokens=None,
        bad_words=words,
        bad_words_token_ids=[[vocab_size - 1] * 48] * len(words),
    )
    request = Request(1, "r" * 1024, Prompt(tokens, cache_salt="s" * 1024), params, 7)
    request.output_token_ids = [tokens] * max_n
    frame = Codec[Any](ToCore).encode(Submit([request]))[0]
    assert len(frame) <= budget.message_bytes(max_model_len, vocab_size, max_n)


numbers = st.integers(-(2**70), 2**70) | st.floats() | st.booleans() | st.just("1")


@given(st.lists(numbers, max_size=5))
def test_what_is_found_valid_at_once_is_valid_one_by_one(values: list[Any]) -> None:
    for kind in (int, float, Annotated[int, Meta(ge=0, le=9)], Annotated[float, Meta(gt=-1.0, le=1.0)]):
        check = check_for(kind)
        assert check is not None
        if all_within(values, kind):
            assert all(check("value", value) == value for value in values)


def test_infinite_and_undefined_numbers_are_not_found_valid() -> None:
    assert all_within([0.5, -0.5], float) and all_within([3, 4], int) and all_within([], int)
    for bad in ([math.nan, 0.5], [0.5, math.nan], [math.inf], [-math.inf, math.inf], [True], [1, 2**63]):
        assert not all_within(bad, float) and not all_within(bad, int)


def test_logit_edits_count_once_for_each_sequence() -> None:
    bias = dict.fromkeys(range(1 << 15), 0.5)
    assert SamplingParams(n=32, logit_bias=bias).num_logit_edits == 1 << 15
    with pytest.raises(ValueError, match=r"32768 entries for each of 33 sequences.* at most 1048576"):
        SamplingParams(n=33, logit_bias=bias)
    assert SamplingParams(bad_words=["a", "b"], bad_words_token_ids=[[1, 2], [3]]).num_logit_edits == 3
    with pytest.raises(ValueError, match="at most 1048576"):
        SamplingParams(n=64, bad_words_token_ids=[[1] * 20] * 1000)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"stop": "x" * 1025}, "stop must have at most 1024 characters, got 1025"),
        ({"stop": ["x"] * 129}, "stop must have at most 128 entries, got 129"),
        ({"stop": ["x", "x" * 1025]}, "stop must have at most 1024 characters, got 1025"),
        ({"stop_token_ids": [1] * 4097}, "stop_token_ids must have at most 4096 entries, got 4097"),
        ({"bad_words": ["x"] * 2049}, "bad_words must have at most 2048 entries, got 2049"),
        ({"bad_words": ["x" * 257]}, "bad_words must have at most 256 characters, got 257"),
        ({"bad_words": ["x" * 256] * 129}, "at most 32768 characters together, they have 33024"),
        ({"allowed_token_ids": [1] * ((1 << 19) + 1)}, "allowed_token_ids must have at most 524288 entries"),
        ({"logit_bias": dict.fromkeys(range((1 << 19) + 1), 1.0)}, "logit_bias must have at most 524288"),
        ({"extra_args": {"a": "x" * 65536}}, "extra_args must have at most 65536 bytes"),
        ({"structured_outputs": {"choice": ["x"] * 16385}}, "choice must have at most 16384 entries"),
    ],
)
def test_a_limit_is_named_with_the_value(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match="at most") as caught:
        SamplingParams(**fields)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "value", ["x" * 1_000_000, [1] * 1_000_000, {i: i for i in range(1000)}, [["x" * 100_000]], b"x" * 1000]
)
def test_an_error_shows_the_beginning_of_a_long_value(value: Any) -> None:
    assert len(quoted(value)) < 250
    with pytest.raises(TypeError) as caught:
        SamplingParams(temperature=value)
    assert len(str(caught.value)) < 300
    assert quoted("short") == "'short'" and quoted([1, 2]) == "[1, 2]"
