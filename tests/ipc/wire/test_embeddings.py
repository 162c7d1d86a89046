"""Embeddings in prompts: names, pieces, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from pagewire.ipc.wire.budget import MAX_EMBEDDINGS_BYTES
from pagewire.ipc.wire.codec import Codec, Tensor
from pagewire.ipc.wire.embeddings import (
    PIECE,
    EmbeddingsInfo,
    check_embeddings,
    check_media,
    media_of,
    name_of,
)
from pagewire.ipc.wire.items import NOTHING, Media, Prompt
from pagewire.ipc.wire.messages import ToCore
from pagewire.ipc.wire.worker_messages import Row

DTYPES = ("float32", "bfloat16", "float16")
BOTH = EmbeddingsInfo(size=2, prompts=True, adapters=True)


def plain(tensor: torch.Tensor) -> Tensor:
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return Tensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)


def numbers(num_tokens: int, dtype: str = "float32") -> Tensor:
    return plain(torch.arange(2.0 * num_tokens).view(-1, 2).to(getattr(torch, dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_numbers_of_a_reasonable_size_pass(dtype: str) -> None:
    """Every upper half of a number, alone among zeros."""
    kind = getattr(torch, dtype)
    words = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    values = torch.stack([torch.zeros_like(words), words], 1).view(torch.float32).view(-1)
    values = values if kind is torch.float32 else words.view(kind)
    good = values.isfinite() & (values.float().abs() < 1 << 15)
    for some in values[good].split(4096):
        check_embeddings("x", plain(some[:, None]), 1)
    for i in (~good).nonzero()[::97, 0].tolist():
        one = torch.zeros(5, 3, dtype=kind)
        one[3, 1] = values[i]
        with pytest.raises(ValueError, match="x have a number that is NaN, infinite or not between"):
            check_embeddings("x", plain(one), 3)


def test_names_tell_content_dtype_and_shape_apart() -> None:
    """float16 and bfloat16 may have equal bytes."""
    data = bytes(range(16))
    tensors = [Tensor(dtype, (4, 2), data) for dtype in ("float16", "bfloat16")]
    tensors += [Tensor("float16", (2, 4), data), Tensor("float16", (4, 2), data[::-1])]
    names = {name_of(tensor) for tensor in tensors}
    assert len(names) == 4 and {len(name) for name in names} == {32}
    assert name_of(Tensor("float16", (4, 2), memoryview(data))) in names


def test_prompts_that_begin_alike_share_the_names_of_pieces() -> None:
    short, long = media_of(numbers(2 * PIECE + 5), 3), media_of(numbers(3 * PIECE), 3)
    assert [(m.start, m.num_tokens) for m in short] == [(3, PIECE), (3 + PIECE, PIECE), (3 + 2 * PIECE, 5)]
    assert [a.name == b.name for a, b in zip(short, long, strict=True)] == [True, True, False]
    assert b"".join(bytes(m.data.data) for m in short) == numbers(2 * PIECE + 5).data


def test_a_prompt_gives_the_embeddings_of_any_range() -> None:
    prompt = Prompt([0] * 20, [*media_of(numbers(5), 2), *media_of(numbers(6), 9)])
    for start in range(20):
        for end in range(start + 1, 21):
            found = prompt.embeddings(start, end)
            rows = {
                m.start + i: value
                for m in found
                for i, value in enumerate(memoryview(bytes(m.data.data)).cast("f").tolist()[::2])
            }
            expected = {2 + i: 2.0 * i for i in range(5)} | {9 + i: 2.0 * i for i in range(6)}
            assert rows == {at: value for at, value in expected.items() if start <= at < end}
    assert [(m.start, m.num_tokens, m.data.shape) for m in prompt.places()] == [(2, 5, (0,)), (9, 6, (0,))]


def test_the_media_of_a_block_are_found_without_a_look_at_all() -> None:
    """Prompts have thousands of blocks, and may have a thousand media: each with each takes a second."""

    class Indexed(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            raise AssertionError("all media were looked at")

    places = [(start, 1 + start % 7) for start in range(0, 400, 8)]
    prompt = Prompt([0] * 400)
    prompt.media = Indexed(Media(start, count, b"%d" % start, NOTHING, True) for start, count in places)
    for size in (1, 3, 16):
        for index in range(400 // size):
            begin, end = index * size, (index + 1) * size
            touched = [(start, count) for start, count in places if start < end and start + count > begin]
            assert prompt.block_keys(index, size) == [
                ("media", b"%d" % start, start - begin, count) for start, count in touched
            ]


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (Tensor("float64", (1, 2), bytes(16)), "must be float32, bfloat16 or float16, got float64"),
        (Tensor("float32", (2,), bytes(8)), r"shape \[number of tokens, 2\]"),
        (Tensor("float32", (1, 3), bytes(12)), r"embeddings of this model have 2 numbers; got \[1, 3\]"),
        (Tensor("float32", (0, 2), b""), "shape"),
        (Tensor("float32", (1, 1, 2), bytes(8)), "shape"),
        (numbers(MAX_EMBEDDINGS_BYTES // 8 + 1), "67108872 bytes, and a prompt's may have 67108864"),
    ],
)
def test_what_does_not_fit_is_refused(tensor: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_embeddings("x", tensor, 2)


def changed(media: list[Media], **fields: Any) -> list[Media]:
    return [msgspec.structs.replace(media[0], **fields), *media[1:]]


PIECES = media_of(numbers(4), 1)
NAN = plain(torch.full((4, 2), float("nan")))


@pytest.mark.parametrize(
    ("media", "info", "message"),
    [
        (PIECES, EmbeddingsInfo(size=2), "start it with enable_prompt_embeds"),
        (changed(PIECES, embeddings=False), BOTH, "takes no media of the kind 'image'"),
        (changed(PIECES, name=bytes(32)), BOTH, "name of embeddings is not that of their content"),
        (changed(PIECES, data=numbers(4, "float16")), BOTH, "name"),
        (changed(PIECES, data=numbers(3)), BOTH, r"shape \(3, 2\) for 4 tokens"),
        (changed(PIECES, num_tokens=5), BOTH, "do not fit"),
        (changed(PIECES, num_tokens=0), BOTH, "overlap, or lie outside"),
        (changed(PIECES, num_tokens=9), BOTH, "overlap, or lie outside"),
        (changed(PIECES, start=-1), BOTH, "overlap, or lie outside"),
        ([*PIECES, *media_of(numbers(1), 4)], BOTH, "overlap"),
        ([*media_of(numbers(1), 6), *PIECES], BOTH, "overlap"),
        (changed(PIECES, data=NAN, name=name_of(NAN)), BOTH, "NaN"),
        (PIECES, EmbeddingsInfo(size=3, prompts=True), "have 3 numbers"),
        (PIECES, EmbeddingsInfo(size=2, adapters=True), "of prompt adapters only"),
        (media_of(numbers(7)), EmbeddingsInfo(size=2, adapters=True), "of prompt adapters only"),
        (
            media_of(numbers(4)),
            EmbeddingsInfo(size=2, adapters=True, max_adapter_tokens=3),
            "4 virtual tokens is over max_prompt_adapter_token=3",
        ),
    ],
)
def test_the_core_trusts_no_media(media: list[Media], info: EmbeddingsInfo, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_media(Prompt([0] * 7, media), info)


def test_the_core_takes_what_the_options_permit() -> None:
    check_media(Prompt([0] * 7), EmbeddingsInfo())
    check_media(Prompt([0] * 7, PIECES), BOTH)
    check_media(Prompt([0] * 7, media_of(numbers(7))), EmbeddingsInfo(size=2, prompts=True))
    adapter = Prompt([0] * 700, media_of(numbers(600)))
    check_media(adapter, EmbeddingsInfo(size=2, adapters=True, max_adapter_tokens=600))


def test_rows_take_embeddings_over_a_socket() -> None:
    """Also those that are cut, whose bytes are views."""
    row = Row(1, 100, 300, media=Prompt([0] * 999, media_of(numbers(999))).embeddings(100, 400))
    codec: Codec[Any] = Codec(ToCore)
    frames = codec.encode(row)
    assert len(frames) == 1 and sum(map(len, frames)) > 300 * 8
    big = Row(1, 0, 999, media=media_of(plain(torch.zeros(999, 8))))
    frames = Codec[Any](ToCore).encode(big)
    assert [len(frame) for frame in frames[1:]] == [PIECE * 32, PIECE * 32, PIECE * 32, 231 * 32]
    decoder: Codec[Row] = Codec(Row)
    assert decoder.decode(frames).media == big.media
