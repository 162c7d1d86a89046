"""Pictures and sound in prompts: what an engine takes, how they are named, and what stands for one in a prompt.

    placeholder token --MediaLayout--> the tokens in its place; those with `embedding_id` take embeddings

A frontend decodes a medium, asks the engine for its layout (`media_layout`), puts the layout's tokens into the
prompt in place of the placeholder, and submits the content as `Media` (`ipc.wire.items`). The core trusts neither
its name nor its tokens: it computes both again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from pagewire.ipc.digest import sha256_of
from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.budget import MAX_MEDIUM_BYTES, MAX_TOKENS
from pagewire.ipc.wire.codec import Tensor

KEPT_EMBEDDINGS = 1 << 14  # that workers keep of media
TOKEN_TYPE = "i"  # of an `array` of tokens: a layout that is kept takes 4 bytes a token, a list up to 36


class MediumInfo(msgspec.Struct, omit_defaults=True, frozen=True):
    """One kind of media that an engine takes.

    token_id: the placeholder's token, which a prompt has once for each medium. text: the placeholder as text.
    embedding_id: the token, in a layout, whose place takes an embedding.
    limit: media of this kind in a prompt. max_tokens: of the longest layout.
    leads: the model takes them before the prompt's text: in a prompt without placeholders their layouts come first.
    """

    token_id: int
    text: str
    embedding_id: int
    limit: int = 1
    max_tokens: int = 0
    leads: bool = False


class MediaInfo(msgspec.Struct, omit_defaults=True, frozen=True):
    """The media that an engine takes.

    kinds: by name: "image", "audio". sampling_rate: of sound, in samples a second; 0: none is taken.
    embedding_size: numbers of an embedding that a prompt may bring in place of a medium; 0: it may bring none.
    whole: the tokens of a medium attend to each other both ways, so that one step computes all of them.
    """

    kinds: dict[str, MediumInfo]
    sampling_rate: int = 0
    embedding_size: int = 0
    whole: bool = False


class MediaLayout(msgspec.Struct, omit_defaults=True, frozen=True):
    """The tokens that replace one placeholder in a prompt, for a medium of some shape."""

    token_ids: Annotated[list[int], Meta(max_length=MAX_TOKENS)]


def check_kind(info: MediaInfo | None, kind: str, shape: Sequence[int]) -> None:
    """Refuse a kind of media that the engine does not take, or a shape that is none of its kind.

    Raises:
        ValueError: says which.
    """
    if info is None or kind not in info.kinds:
        raise ValueError(f"this engine takes no media of the kind {quoted(kind)}")
    fits = len(shape) == 3 and shape[2] == 3 if kind == "image" else len(shape) == 1
    if not fits or not all(size > 0 for size in shape):
        wanted = "[height, width, 3]" if kind == "image" else "[samples]"
        raise ValueError(f"{kind}: the shape {wanted} expected, got {quoted(list(shape))}")
    if (size := math.prod(shape) * (1 if kind == "image" else 4)) > MAX_MEDIUM_BYTES:
        raise ValueError(f"{kind}: it has {size} bytes, and one may have {MAX_MEDIUM_BYTES}: make it smaller")


def check_layout(kind: str, num_tokens: int, max_model_len: int) -> None:
    """Refuse a layout that no prompt has room for.

    Raises:
        ValueError: it has more tokens than the model takes.
    """
    if num_tokens > max_model_len:
        raise ValueError(
            f"{kind}: it takes {num_tokens} tokens of a prompt, and max_model_len is {max_model_len}: make it "
            "smaller, or give other mm_processor_kwargs"
        )


def media_name(kind: str, data: Tensor, options: str) -> bytes:
    """The name of a medium (32 bytes): equal ones have equal kinds, dtypes, shapes, bytes and options.

    kind, data: decoded content: "image": uint8 [height, width, 3]; "audio": float32 [samples].
    options: the processor's arguments as canonical JSON (keys sorted, no spaces); empty for none.
    """
    described = msgspec.json.encode(["media", kind, data.dtype, list(data.shape), options])
    return sha256_of([described, data.data])  # no two descriptions are equal as text


def uuid_name(kind: str, cache_salt: str, uuid: str, options: str) -> bytes:
    """The name of a medium (32 bytes) that a caller has named, which holds beside one cache salt only."""
    return sha256_of([msgspec.json.encode(["uuid", kind, cache_salt, uuid, options])])
