"""Embeddings that take the place of tokens in a prompt: what an engine takes, their names, and their checks; also
those of pictures and sounds, but for names and layouts (`engine_core.media`).

A frontend cuts them into pieces, which are `Media`: the keys and values of a piece are shared by its name, so that
prompts share what they begin with. Their token ids are placeholders.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from pagewire.ipc.digest import sha256_of
from pagewire.ipc.errors import FieldValueError
from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.budget import MAX_EMBEDDINGS_BYTES
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.items import Media, Prompt
from pagewire.ipc.wire.media import MediaInfo, check_kind

PLACEHOLDER = 0  # the token id at the place of an embedding
PIECE = 256  # tokens of a medium
NAME_BYTES = 32  # of the names of pictures and sounds
LIMIT = 1 << 15  # largest absolute value: it overflows in no dtype of a model, and no embedding has it

# By dtype: the bytes of a number, and the last of these bytes in numbers below LIMIT, whose exponents are smaller.
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
SMALL = {
    dtype: bytes(byte for byte in range(256) if byte & 0x7F < limit)
    for dtype, limit in (("float32", 0x47), ("bfloat16", 0x47), ("float16", 0x78))
}


class EmbeddingsInfo(msgspec.Struct, omit_defaults=True, frozen=True):
    """The embeddings that prompts may bring to an engine.

    size: E, the numbers of an embedding; 0: the model takes none.
    prompts: whole prompts may be embeddings (`enable_prompt_embeds`). adapters: prompt adapters may come before a
        prompt (`enable_prompt_adapter`). max_adapters: of them are kept in memory by each frontend.
    max_adapter_tokens: virtual tokens of an adapter; 0: as many as the model takes.
    """

    size: int = 0
    prompts: bool = False
    adapters: bool = False
    max_adapters: int = 1
    max_adapter_tokens: int = 0


def name_of(embeddings: Tensor) -> bytes:
    """The name of embeddings (32 bytes): equal ones have equal dtypes, shapes and bytes."""
    return sha256_of([f"embeddings|{embeddings.dtype}|{embeddings.shape}|".encode(), embeddings.data])


def media_of(embeddings: Tensor, start: int = 0) -> list[Media]:
    """Embeddings [T, E] as the pieces of a prompt that begin at position `start`."""
    num_tokens = embeddings.shape[0]
    whole = Media(0, num_tokens, b"", embeddings, True)
    pieces = (whole.rows(first, first + PIECE) for first in range(0, num_tokens, PIECE))
    return [
        Media(start + piece.start, piece.num_tokens, name_of(piece.data), piece.data, True)
        for piece in pieces
    ]


def check_embeddings(name: str, embeddings: Tensor, size: int) -> None:
    """Check embeddings [T, E]. name: what has them, for the message. size: E of the model.

    Raises:
        ValueError: they have another shape or dtype, too many bytes, or a number that is NaN, infinite or huge.
    """
    shape, dtype = embeddings.shape, embeddings.dtype
    if dtype not in WIDTHS:
        raise FieldValueError(name, f"must be float32, bfloat16 or float16, got {dtype}: convert them")
    if len(shape) != 2 or shape[0] < 1 or shape[1] != size:
        raise FieldValueError(
            name,
            f"must have the shape [number of tokens, {size}], since embeddings of this model have "
            f"{size} numbers; got {quoted(list(shape))}",
        )
    if len(embeddings.data) > MAX_EMBEDDINGS_BYTES:
        raise FieldValueError(
            name,
            f"have {len(embeddings.data)} bytes, and a prompt's may have {MAX_EMBEDDINGS_BYTES}: send "
            "fewer, or float16 or bfloat16 in place of float32",
        )
    # The last byte of a number has its sign and the upper bits of its exponent.
    if bytes(embeddings.data)[WIDTHS[dtype] - 1 :: WIDTHS[dtype]].translate(None, SMALL[dtype]):
        raise FieldValueError(
            name, f"have a number that is NaN, infinite or not between -{LIMIT} and {LIMIT}"
        )


def check_media(prompt: Prompt, info: EmbeddingsInfo, media: MediaInfo | None = None) -> None:
    """Check the media of a prompt, and that names of embeddings are those of their contents.

    media: the pictures and sounds that the engine takes; None: none. Their names are checked elsewhere.

    Raises:
        ValueError: they are none that this engine takes.
    """
    end = num_bytes = num_leading = 0
    has_embeddings = any(medium.embeddings for medium in prompt.media)
    for medium in prompt.media:
        if medium.start < end or medium.num_tokens < 1 or medium.end > len(prompt.token_ids):
            raise ValueError("embeddings or media overlap, or lie outside of their prompt")
        num_leading = medium.end if medium.start == num_leading else num_leading
        end = medium.end
        num_bytes += len(medium.data.data) if medium.embeddings else 0
    check_encoded(prompt, media)
    if has_embeddings:
        check_permitted(prompt, info, num_leading == end)
    if num_bytes > MAX_EMBEDDINGS_BYTES:
        raise ValueError(
            f"embeddings of {num_bytes} bytes are over a prompt's limit of {MAX_EMBEDDINGS_BYTES}"
        )
    for medium in filter(lambda each: each.embeddings, prompt.media):
        if info.size and medium.data.shape[:1] != (medium.num_tokens,):
            raise ValueError(
                f"embeddings of shape {medium.data.shape} for {medium.num_tokens} tokens do not fit"
            )
        check_embeddings("embeddings", medium.data, info.size)
        if medium.name != name_of(medium.data):
            raise ValueError("the name of embeddings is not that of their content")


def check_permitted(prompt: Prompt, info: EmbeddingsInfo, lead: bool) -> None:
    """Check that the engine takes embeddings. lead: they are at the beginning of the prompt, in one piece.

    Raises:
        ValueError: it does not.
    """
    if info.prompts:
        return
    if not info.adapters:
        raise ValueError("this engine takes no embeddings: start it with enable_prompt_embeds")
    num_tokens = sum(medium.num_tokens for medium in prompt.media)
    if not lead or num_tokens == len(prompt.token_ids):
        raise ValueError(
            "this engine takes embeddings of prompt adapters only, before a prompt: start it with "
            "enable_prompt_embeds"
        )
    if num_tokens > (info.max_adapter_tokens or num_tokens):
        raise ValueError(
            f"a prompt adapter of {num_tokens} virtual tokens is over max_prompt_adapter_token="
            f"{info.max_adapter_tokens}"
        )


def check_encoded(prompt: Prompt, info: MediaInfo | None) -> None:
    """Check the pictures and sounds of a prompt. Their places are checked with those of embeddings.

    Raises:
        ValueError: the engine does not take them, or they do not fit the prompt.
    """
    counts: Counter[str] = Counter()
    within: Counter[int] = Counter()  # tokens in whose place an embedding goes, within media
    for medium in prompt.encoded:
        own = info.kinds.get(medium.kind) if info is not None else None
        check_content(medium, info)
        assert own is not None
        counts[medium.kind] += 1
        if counts[medium.kind] > own.limit:
            raise ValueError(
                f"a prompt may have {own.limit} media of the kind {medium.kind} (limit_mm_per_prompt), and this "
                "one has more"
            )
        within[own.embedding_id] += prompt.token_ids[medium.start : medium.end].count(own.embedding_id)
    for kind, own in ({} if info is None else info.kinds).items():
        if prompt.token_ids.count(own.embedding_id) != within[own.embedding_id]:
            raise ValueError(
                f"the prompt has the token {own.embedding_id}, which stands for a part of a medium ({kind}), "
                "outside of any"
            )


def check_content(medium: Media, info: MediaInfo | None) -> None:
    """Check kind, shape, dtype and length of the name of a medium; raises ValueError."""
    if len(medium.name) != NAME_BYTES:
        raise ValueError(f"{medium.kind}: its name must have {NAME_BYTES} bytes, got {len(medium.name)}")
    is_image = medium.kind == "image"
    if medium.uuid and not medium.data.data:  # the engine may have it
        return check_kind(info, medium.kind, (1, 1, 3) if is_image else (1,))
    check_kind(info, medium.kind, medium.data.shape)
    if medium.data.dtype != (dtype := "uint8" if is_image else "float32"):
        raise ValueError(f"{medium.kind}: {dtype} expected, got {medium.data.dtype}")
    return None
