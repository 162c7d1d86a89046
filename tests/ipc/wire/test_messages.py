"""Every message goes through the codec unharmed, and nothing else comes out of it than messages."""

from __future__ import annotations

import math
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewire.ipc.errors import ProtocolError
from pagewire.ipc.wire import codec as codec_module
from pagewire.ipc.wire.codec import FORMATS, INLINE_BYTES, ITEM_SIZES, MAX_FRAMES, Buffer, Codec, Tensor
from pagewire.ipc.wire.items import LogprobRows, Prompt
from pagewire.ipc.wire.messages import (
    Call,
    CallAnswer,
    Hello,
    Ping,
    Request,
    Submit,
    ToCore,
    ToFrontend,
    TokenDelta,
)
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.worker_messages import NO_TOKEN, RowResult, StepResult
from tests.ipc.strategies import UNIONS, members, tensors, values

CODECS: dict[str, Codec[Any]] = {name: Codec(union) for name, union in UNIONS.items()}
KINDS = [(name, kind) for name, union in UNIONS.items() for kind in members(union)]

relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
any_message = st.sampled_from(KINDS).flatmap(lambda case: st.tuples(st.just(case[0]), values(case[1])))


def received(frames: list[Buffer]) -> list[Buffer]:
    """Frames as a socket gives them: large ones as read-only views."""
    return [frame if len(frame) < INLINE_BYTES else memoryview(frame).toreadonly() for frame in frames]


def decode(name: str, frames: list[Buffer]) -> Any:
    """The message, or None where it is refused as it should be; any other error is a bug."""
    try:
        return CODECS[name].decode(frames)
    except ProtocolError:
        return None


def pack(value: Any) -> list[Buffer]:
    return [msgspec.msgpack.encode(value)]


# ---------------------------------------------------------------- there and back


@pytest.mark.parametrize(("name", "kind"), KINDS, ids=lambda value: getattr(value, "__name__", value))
@given(data=st.data())
@settings(relaxed, max_examples=40)
def test_round_trip(name: str, kind: type, data: st.DataObject) -> None:
    message = data.draw(values(kind))
    frames = Codec(UNIONS[name]).encode(message)
    assert Codec(UNIONS[name]).decode(received(frames)) == message


@given(st.lists(tensors(), max_size=4))
@relaxed
def test_large_tensors_have_frames_of_their_own(arrays: list[Tensor]) -> None:
    reply = CallAnswer(call_id=1, result=arrays)
    frames = Codec(ToFrontend).encode(reply)
    assert frames[1:] == [t.data for t in arrays if len(t.data) >= INLINE_BYTES]
    assert len(frames[0]) < 100 + len(arrays) * (INLINE_BYTES + 50)


def test_a_large_tensor_is_not_copied() -> None:
    data = bytearray(2 * INLINE_BYTES)
    tensor = Tensor("uint8", (len(data),), data)
    assert Codec(ToFrontend).encode(rows_of(tensor))[1] is data


def rows_of(tensor: Tensor) -> StepResult:
    """A message with a tensor in it."""
    return StepResult(1, [RowResult([2], LogprobRows(tensor, tensor, tensor))])


@given(tensors())
@relaxed
def test_a_decoded_tensor_is_read_only(tensor: Tensor) -> None:
    result = CODECS["FromWorker"].decode(received(Codec(ToCore).encode(rows_of(tensor))))
    assert memoryview(result.rows[0].logprobs.token_ids.data).readonly


def test_a_message_with_several_tensors_keeps_them_apart() -> None:
    arrays = [Tensor("uint8", (INLINE_BYTES,), bytes([i]) * INLINE_BYTES) for i in range(3)]
    rows = [RowResult(prompt_logprobs=LogprobRows(*ordered)) for ordered in (arrays, arrays[::-1])]
    message = StepResult(1, rows)
    frames = CODECS["FromWorker"].encode(message)
    assert len(frames) == 7 and CODECS["FromWorker"].decode(frames) == message


def test_a_codec_is_usable_after_an_error() -> None:
    codec: Codec[ToCore] = Codec(ToCore)
    large = Tensor("uint8", (INLINE_BYTES,), bytes(INLINE_BYTES))
    with pytest.raises(TypeError, match="a message cannot contain object"):
        codec.encode(Call(1, "m", [large, object()]))
    assert codec.encode(Ping()) == pack({"type": "ping"})
    with pytest.raises(ProtocolError):
        codec.decode([b"", b"frame"])
    assert codec.decode(pack({"type": "ping"})) == Ping()


def test_defaults_are_not_sent() -> None:
    assert CODECS["ToCore"].encode(Call(7, "sleep")) == pack(
        {"type": "call", "call_id": 7, "method": "sleep"}
    )


def test_tags_are_unique_within_a_union() -> None:
    for union in UNIONS.values():
        tags = [kind.__struct_config__.tag for kind in get_args(union)]
        assert len(set(tags)) == len(tags) and None not in tags


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(ProtocolError, match="unknown field"):
        CODECS["ToCore"].decode(pack({"type": "ping", "extra": 1}))


def test_parameters_are_checked_again_where_they_arrive() -> None:
    message = {"type": "submit", "requests": [[1, "r", [[1]], {"type": "sampling", "temperature": -1.0}, 0]]}
    with pytest.raises(ProtocolError, match=r">= 0.0 - at .*temperature`, got -1.0"):
        CODECS["ToCore"].decode(pack(message))


def test_a_message_of_another_direction_is_refused() -> None:
    with pytest.raises(ProtocolError, match="Invalid value 'ping'"):
        CODECS["ToFrontend"].decode(pack({"type": "ping"}))


@pytest.mark.parametrize(
    "message",
    [
        Submit([Request(1, "r", Prompt([1]), SamplingParams(), seed=2**64)]),
        Submit([Request(1, "r", Prompt([2**64]), SamplingParams(), seed=0)]),
        Submit([Request(-(2**63) - 1, "r", Prompt([1]), SamplingParams(), seed=0)]),
        Call(1, "m", [2**64]),
    ],
    ids=["seed", "token id", "key", "argument"],
)
def test_integers_beyond_64_bits_are_never_sent(message: Any) -> None:
    with pytest.raises(OverflowError):
        CODECS["ToCore"].encode(message)


def test_unsigned_integers_do_not_pass_as_signed_ones() -> None:
    """msgpack holds 64 bits of either kind; the parameters refuse what int64 cannot hold."""
    message = {"type": "submit", "requests": [[1, "r", [[1]], {"type": "sampling", "seed": 2**63}, 0]]}
    with pytest.raises(ProtocolError, match="seed must be"):
        CODECS["ToCore"].decode(pack(message))


def test_columns_of_different_lengths_are_refused() -> None:
    message = {"type": "deltas", "keys": [1, 2], "token_ids": [5, 6]}
    assert list(CODECS["ToFrontend"].decode(pack(message))) == [TokenDelta(1, 0, [5]), TokenDelta(2, 0, [6])]
    with pytest.raises(ProtocolError, match="1 tokens for 2 keys"):
        CODECS["ToFrontend"].decode(pack(message | {"token_ids": [5]}))


def test_a_result_by_columns_is_the_same_result() -> None:
    rows = [RowResult([3]), RowResult(), RowResult([4], drafts=[5]), RowResult([6]), RowResult([7, 8])]
    result = StepResult(1, rows, 2, 3)
    columns = result.by_columns()
    assert columns.token_ids == [3, NO_TOKEN, NO_TOKEN, 6, NO_TOKEN] and not columns.rows
    assert [columns.row(i) for i in range(columns.num_rows)] == rows
    assert (columns.num_tokens, columns.busy_us, columns.idle_us) == (result.num_tokens, 2, 3) == (5, 2, 3)
    assert columns.by_columns() is columns


# ---------------------------------------------------------------- what is no message


@given(any_message, st.data())
@relaxed
def test_truncated(case: tuple[str, Any], data: st.DataObject) -> None:
    name, message = case
    head, *rest = Codec(UNIONS[name]).encode(message)
    cut = data.draw(st.integers(0, len(head) - 1))
    with pytest.raises(ProtocolError):
        CODECS[name].decode([head[:cut], *rest])


@given(any_message, st.data())
@settings(relaxed, max_examples=300)
def test_flipped_bits(case: tuple[str, Any], data: st.DataObject) -> None:
    name, message = case
    head, *rest = Codec(UNIONS[name]).encode(message)
    spoilt = bytearray(head)
    for bit in data.draw(st.lists(st.integers(0, 8 * len(head) - 1), min_size=1, max_size=3)):
        spoilt[bit // 8] ^= 1 << bit % 8
    outcome = decode(name, [bytes(spoilt), *rest])
    assert outcome is None or isinstance(outcome, members(UNIONS[name]))


@given(any_message, st.data())
@relaxed
def test_lost_and_exchanged_tensor_frames(case: tuple[str, Any], data: st.DataObject) -> None:
    name, message = case
    head, *rest = Codec(UNIONS[name]).encode(message)
    foreign = data.draw(st.permutations([*rest, b"", b"foreign"]))
    outcome = decode(name, [head, *foreign[: data.draw(st.integers(0, len(foreign)))]])
    assert outcome is None or isinstance(outcome, members(UNIONS[name]))
    if rest:
        assert decode(name, [head, *rest[:-1]]) is None


@given(st.sampled_from(sorted(UNIONS)), st.lists(st.binary(max_size=64), max_size=4))
@settings(relaxed, max_examples=300)
def test_random_bytes(name: str, frames: list[Buffer]) -> None:
    outcome = decode(name, frames)
    assert outcome is None or isinstance(outcome, members(UNIONS[name]))


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
keys = st.text() | st.integers(-(2**63), 2**64 - 1)
msgpack_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4)
)


@given(st.sampled_from(sorted(UNIONS)), msgpack_values)
@relaxed
def test_random_msgpack(name: str, value: Any) -> None:
    try:
        frames = pack(value)
    except UnicodeEncodeError:
        return  # a lone surrogate: not msgpack
    assert decode(name, frames) is None


@given(st.sampled_from(KINDS), st.data())
@settings(relaxed, max_examples=300)
def test_right_names_with_wrong_values(case: tuple[str, type], data: st.DataObject) -> None:
    name, kind = case
    fields = {field.encode_name: msgpack_values for field in msgspec.structs.fields(kind)}
    tag = kind.__struct_config__.tag  # type: ignore[attr-defined]
    value = data.draw(st.fixed_dictionaries({"type": st.just(tag)}, optional=fields))
    try:
        frames = pack(value)
    except UnicodeEncodeError:
        return
    outcome = decode(name, frames)
    assert outcome is None or isinstance(outcome, kind)


@given(msgpack_values | st.lists(msgpack_values, min_size=3, max_size=3), st.lists(st.binary(), max_size=2))
@settings(relaxed, max_examples=300)
def test_foreign_tensors(value: Any, frames: list[Buffer]) -> None:
    message = {"type": "result", "step_id": 1, "token_ids": [], "logprobs": {0: [value, value, value]}}
    try:
        head = pack(message)
    except UnicodeEncodeError:
        return
    outcome = decode("FromWorker", [*head, *frames])
    assert outcome is None or isinstance(outcome, StepResult)


GOOD = ["int32", [1], b"1234"]


@pytest.mark.parametrize(
    "tensor",
    [
        ["int32", [1], 2],
        ["int32", [1], -1],
        ["int32", [1], 2**63],
        ["int32", [2], 0],
        ["int32", [2], b"1234"],
        ["int32", [], b""],
        ["int32", [-1], b"1234"],
        ["int32", [-1, -1], b"1234"],
        ["int32", [2**63, 2**63], b"1234"],
        ["int32", ["1"], b"1234"],
        ["int32", [1.0], b"1234"],
        ["int32", 1, b"1234"],
        ["int32", None, b"1234"],
        ["complex64", [1], b"12345678"],
        [["int32"], [1], b"1234"],
        [None, [1], b"1234"],
        ["int32", [1], "1234"],
        ["int32", [1], [1]],
        ["int32", [1], None],
        ["int32", [1]],
        ["int32", [1], b"1234", b""],
        [],
        {},
        "abc",
        7,
    ],
    ids=repr,
)
def test_a_tensor_that_is_none(tensor: Any) -> None:
    message = {"type": "result", "step_id": 1, "token_ids": [], "logprobs": {0: [GOOD, tensor, GOOD]}}
    with pytest.raises(ProtocolError, match="not a message of this protocol"):
        CODECS["FromWorker"].decode([*pack(message), b"123", b"1234"])


@pytest.mark.parametrize("num_frames", [0, MAX_FRAMES + 1])
def test_wrong_numbers_of_frames(num_frames: int) -> None:
    with pytest.raises(ProtocolError, match=f"1 to {MAX_FRAMES} frames, not {num_frames}"):
        CODECS["ToCore"].decode(pack({"type": "ping"}) * num_frames)


def test_an_oversized_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_module, "MAX_MESSAGE_BYTES", 20)
    head = pack({"type": "ping"})
    assert CODECS["ToCore"].decode([*head, bytes(20 - len(head[0]))]) == Ping()
    with pytest.raises(ProtocolError, match="message of 21 bytes is over the limit of 20"):
        CODECS["ToCore"].decode([*head, bytes(21 - len(head[0]))])


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1k"], ids=["arrays", "maps"])
def test_nested_too_deep(opening: bytes) -> None:
    head = b"\x84\xa4type\xa4call\xa7call_id\x01\xa6method\xa1m\xa4args\x91"
    assert decode("ToCore", [head + opening * 20 + b"\xc0"]) is not None
    with pytest.raises(ProtocolError, match="recursion"):
        CODECS["ToCore"].decode([head + opening * 100_000 + b"\xc0"])


@pytest.mark.parametrize(
    "length", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
)
def test_lengths_that_lie(length: bytes) -> None:
    head = b"\x84\xa4type\xa4call\xa7call_id\x01\xa6method\xa1m\xa4args\x91"
    with pytest.raises(ProtocolError):
        CODECS["ToCore"].decode([head + length])


def test_the_protocol_of_a_frontend_is_read_whatever_else_changed() -> None:
    """Otherwise a newer frontend could not be told which version to install."""
    hello = CODECS["ToCore"].decode(pack({"type": "hello", "protocol": 99, "version": "9.9", "pid": 1}))
    assert hello == Hello(99, "9.9", 1)


# ---------------------------------------------------------------- tensors


@pytest.mark.parametrize("dtype", sorted(FORMATS))
def test_tensors_as_lists(dtype: str) -> None:
    data = memoryview(bytes(ITEM_SIZES[dtype])).cast("B")
    assert Tensor(dtype, (1,), data).tolist() == [0]
    assert Tensor(dtype, (0, 3), b"").tolist() == []


def test_values_are_little_endian() -> None:
    assert Tensor("int32", (2,), b"\x01\0\0\0\xff\xff\xff\xff").tolist() == [1, -1]
    assert Tensor("float32", (1,), b"\0\0\x80\x3f").tolist() == [1.0]
    assert Tensor("bool", (2,), b"\0\1").tolist() == [False, True]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_floats_have_no_list(dtype: str) -> None:
    with pytest.raises(TypeError, match=dtype):
        Tensor(dtype, (1,), b"\0\0").tolist()


@pytest.mark.parametrize(
    ("dtype", "shape", "size", "text"),
    [
        ("int8", (1,), 1, "unknown tensor dtype 'int8'"),
        ("int32", (2,), 4, "4 bytes do not fill a int32 tensor of shape (2,)"),
        ("int32", (-1, -1), 4, "none negative"),
        ("int32", (), 0, "do not fill"),
    ],
)
def test_tensors_that_cannot_be(dtype: str, shape: tuple[int, ...], size: int, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        Tensor(dtype, shape, bytes(size))
    assert text in str(caught.value)


@given(tensors(), tensors())
@relaxed
def test_equality_is_of_dtype_shape_and_bytes(a: Tensor, b: Tensor) -> None:
    same = (a.dtype, a.shape, bytes(a.data)) == (b.dtype, b.shape, bytes(b.data))
    assert (a == b) == same
    copy = Tensor(a.dtype, list(a.shape), bytearray(a.data))
    assert copy == a and hash(copy) == hash(a) and a != "a"
    assert repr(a) == f"Tensor({a.dtype}, {a.shape})" and math.prod(a.shape) * ITEM_SIZES[a.dtype] == len(
        a.data
    )
