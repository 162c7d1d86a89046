"""Shapes from outside: their product is computed only where that takes no time."""

from __future__ import annotations

import pytest

from pagewire.ipc.errors import ProtocolError
from pagewire.ipc.files.safetensors import MAX_NAME, parse_header
from pagewire.ipc.shapes import MAX_DIMENSIONS, num_values
from pagewire.ipc.wire.codec import Codec, Tensor
from pagewire.ipc.wire.messages import Submit, ToCore
from tests.ipc.wire.test_messages import pack

pytestmark = pytest.mark.timeout(20)

LONG = 1_000_000  # dimensions, whose product takes minutes with the interpreter's lock held


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((), 1), ((3,), 3), ((2, 0, 5), 0), ((2,) * MAX_DIMENSIONS, 256), ((2**31, 2**31), 2**62)],
)
def test_a_shape_has_as_many_values_as_its_dimensions_make(shape: tuple[int, ...], expected: int) -> None:
    assert num_values(shape) == num_values(list(shape)) == expected


@pytest.mark.parametrize(
    "shape",
    [
        *([-1], [-1, -1], [2**63], [2**32, 2**31], [0, 2**32, 2**31]),
        *([1] * (MAX_DIMENSIONS + 1), [127] * LONG, [9] * LONG + [0]),
    ],
    ids=[
        "negative",
        "twice negative",
        "large",
        "large together",
        "large strides",
        "9",
        "long",
        "long, empty",
    ],
)
def test_a_shape_that_is_none_is_refused_in_few_words(shape: list[int]) -> None:
    with pytest.raises(ValueError, match=f"got {len(shape)} dimensions") as caught:
        num_values(shape)
    assert len(str(caught.value)) < 250
    with pytest.raises(ValueError, match="a shape has at most 8 dimensions"):
        Tensor("float32", shape, b"")


def test_a_message_with_a_long_shape_is_refused_in_few_words() -> None:
    medium = [0, 1, b"", ["float32", [127] * LONG, b""], True]
    request = [2, "r", [[1, 5], [medium]], {"type": "sampling", "max_tokens": 2}, 1]
    with pytest.raises(ProtocolError, match="at most 8 dimensions") as caught:
        Codec(ToCore).decode(pack({"type": "submit", "requests": [request]}))
    assert len(str(caught.value)) < 500


def test_errors_repeat_little_of_a_message() -> None:
    name = "x" * 100_000
    for message in ({"type": name}, {"type": "ping", name: 1}, {"type": "call", "call_id": name}):
        with pytest.raises(ProtocolError) as caught:
            Codec(ToCore).decode(pack(message))
        assert len(str(caught.value)) < 700


ENTRY = b'{"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (
            b'{"a": {"dtype": "F32", "data_offsets": [0, 0], "shape": [' + b"9," * LONG + b"0]}}",
            "length <= 8",
        ),
        (
            b'{"a": {"dtype": "F32", "data_offsets": [0, 8], "shape": [4294967296, 4294967296]}}',
            "2\\^63 values",
        ),
        (b'{"a": %b, "b": %b}' % (ENTRY, ENTRY), "its tensors are larger than the file"),
        (b'{"%b": %b}' % (b"a" * (MAX_NAME + 1), ENTRY), f"over {MAX_NAME} characters"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}', "'a' lies outside of the file"),
    ],
    ids=["a long shape", "a large shape", "tensors that share bytes", "a long name", "outside"],
)
def test_headers_of_safetensors_files_that_are_refused(header: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        list(parse_header(header, 15))
    assert len(str(caught.value)) < 300


def test_what_a_header_says_of_a_tensor_is_read_with_and_without_metadata() -> None:
    (_, plain), (_, empty) = parse_header(
        b'{"__metadata__": {"shape": "x"}, "a": %b, "b": {"dtype": "I8", "shape": [], "data_offsets": [8, 9]}}'
        % ENTRY,
        9,
    )
    assert (plain.dtype, plain.shape, plain.num_bytes) == ("F32", [2], 8)
    assert (empty.dtype, empty.shape, empty.num_bytes) == ("I8", [], 1)


def test_a_receiver_that_takes_no_tensors_reads_none() -> None:
    codec: Codec[ToCore] = Codec(ToCore)
    codec.reads_tensors = False
    media = [[0, 1, b"", tensor, True] for tensor in (["float32", [127] * LONG, b""], "no tensor", 7)]
    message = codec.decode(
        pack({"type": "submit", "requests": [[2, "r", [[1], media], {"type": "sampling"}, 1]]})
    )
    assert isinstance(message, Submit)
    assert [medium.data.shape for medium in message.requests[0].prompt.media] == [(0,)] * 3
