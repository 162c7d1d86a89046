"""Our reader of safetensors files, beside their own library."""

from __future__ import annotations

import io
import json
import random

import pytest
import torch
from safetensors.torch import save

from pagewire.frontend.requests.safetensors import MAX_HEADER_BYTES, read_tensors

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool)


def file(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_tensors_are_those_that_the_library_has_written() -> None:
    tensors = {str(dtype): (torch.randn(3, 5) * 9).to(dtype) for dtype in DTYPES}
    tensors |= {"empty": torch.zeros(0, 4), "scalar": torch.tensor(2.5)}
    found = read_tensors("x", save(tensors, metadata={"format": "pt"}))
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (str(tensor.dtype)[6:], tuple(tensor.shape))
        assert bytes(found[name].data) == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_a_header_of_any_length_is_no_pickle() -> None:
    """A length of 128 begins with the byte with which pickles begin."""
    for padding in range(200):
        data = save({"a" * (padding + 1): torch.ones(1)})
        assert [tensor.tolist() for tensor in read_tensors("x", data).values()] == [[1.0]]


@pytest.mark.parametrize("new", [True, False])
def test_pickles_are_refused_by_name(new: bool) -> None:
    stream = io.BytesIO()
    torch.save(torch.ones(2, 3), stream, _use_new_zipfile_serialization=new)
    with pytest.raises(
        ValueError, match=r"x: this is a file of torch.save, a pickle.*use safetensors.torch.save"
    ):
        read_tensors("x", stream.getvalue())


ENTRY = {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no safetensors file"),
        (b"{}", "no safetensors file"),
        (b"\x93NUMPY" + bytes(99), "no safetensors file"),
        (file(b" " * (MAX_HEADER_BYTES + 1)), "no safetensors file"),
        (file({})[:-1], "no safetensors file"),
        (file(b"[1, 2]"), "no safetensors file"),
        (file(b"{]"), "damaged"),
        (file(b"{" * 1000), "damaged"),
        (file(b'{"a": \xff}'), "damaged"),
        (file({"a": 1}), "damaged"),
        (file({"a": ENTRY | {"dtype": "F8"}}, bytes(8)), "'a' has the dtype 'F8'"),
        (file({"a": ENTRY | {"shape": [-1, -2]}}, bytes(8)), "damaged"),
        (file({"a": ENTRY | {"shape": [1, 3]}}, bytes(8)), "'a': 8 bytes do not fill a float32 tensor"),
        (file({"a": ENTRY | {"shape": [1 << 40] * 8}}, bytes(8)), "'a': a shape has"),
        (file({"a": ENTRY | {"shape": [9] * 20_000 + [0]}}, bytes(8)), "'a': .*length <= 8"),
        (file({"a": ENTRY, "b": ENTRY}, bytes(8)), "its tensors are larger than the file"),
        (file({"a": ENTRY | {"data_offsets": [0, 9]}}, bytes(8)), "'a' lies outside of the file"),
        (file({"a": ENTRY | {"data_offsets": [8, 0]}}, bytes(8)), "'a' lies outside"),
        (file({"a": ENTRY | {"data_offsets": [-8, 0]}}, bytes(8)), "damaged"),
        (file({"a": ENTRY}, bytes(7)), "outside of the file"),
    ],
)
def test_damaged_files_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=f"^x: .*{message}"):
        read_tensors("x", data)


def test_random_damage_gives_a_tensor_or_a_clear_error() -> None:
    whole = save({"prompt_embeddings": torch.randn(4, 6)})
    chance = random.Random(5)
    num_refused = 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(chance.choice([1, 1, 4])):
            data[chance.randrange(len(data) if chance.random() < 0.3 else 90)] = chance.randrange(256)
        if chance.random() < 0.3:
            del data[chance.randrange(len(data)) :]
        try:
            tensors = read_tensors("x", bytes(data))
        except ValueError as error:
            assert str(error).startswith("x: ") and len(str(error)) < 1000
            num_refused += 1
        else:
            assert all(len(tensor.data) <= len(whole) for tensor in tensors.values())
    assert num_refused > 100
