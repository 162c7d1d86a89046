"""Sources: what the encoder of an encoder-decoder reads, at the beginning of a sequence.

    source, filled up to whole blocks | target: what the decoder runs, from its start token on

A source is the first medium of its prompt, of the kind `TEXT` or a sound. The names of all blocks depend on it, as
on any medium; so a source is encoded once, whoever sends it.
"""

from __future__ import annotations

import msgspec

from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.items import Media, Prompt
from pagewire.ipc.wire.media import MediaInfo, MediumInfo, media_name

TEXT, SOUND = "text", "audio"
"""The kinds of media that are sources."""
NO_PROMPT_LOGPROBS = "prompt_logprobs: an encoder-decoder gives none: ask for logprobs of what is generated"
PADDING = 0
"""The token behind a source, up to the end of its last block, and in place of a sound; nothing reads it."""


class SourceInfo(msgspec.Struct, omit_defaults=True, frozen=True):
    """The sources that an engine takes.

    kind: `TEXT` or `SOUND`. max_tokens: of a source; a sound always has so many.
    max_target_tokens: of a target, the prompt of the decoder and what is generated together.
    start_ids: the prompt of the decoder in requests that give none.
    sampling_rate: of sound, in samples a second. max_samples: of a sound.
    """

    kind: str
    max_tokens: int
    max_target_tokens: int
    start_ids: list[int]
    sampling_rate: int = 0
    max_samples: int = 0

    @property
    def media(self) -> MediaInfo | None:
        """The media that frontends fetch and decode for it; None: it reads text."""
        if self.kind == TEXT:
            return None
        sound = MediumInfo(PADDING, "", PADDING, max_tokens=self.max_tokens)
        return MediaInfo({SOUND: sound}, self.sampling_rate, whole=True)

    def num_tokens(self, data: Tensor) -> int:
        """The number of tokens of a source with these contents."""
        return data.shape[0] if self.kind == TEXT else self.max_tokens


def filled(num_tokens: int, block_size: int) -> int:
    """The tokens of whole blocks that hold a source."""
    return -(-num_tokens // block_size) * block_size


def text_source(token_ids: list[int], block_size: int) -> Media:
    """A text as a source."""
    data = Tensor("int64", (len(token_ids),), b"".join(i.to_bytes(8, "little") for i in token_ids))
    return Media(0, filled(len(token_ids), block_size), media_name(TEXT, data, ""), data, kind=TEXT)


def sound_source(data: Tensor, info: SourceInfo, block_size: int) -> Media:
    """A sound float32 [samples] as a source."""
    num_tokens = filled(info.max_tokens, block_size)
    return Media(0, num_tokens, media_name(SOUND, data, ""), data, kind=SOUND)


def with_source(source: Media, source_ids: list[int], target: Prompt) -> Prompt:
    """A prompt of a source and its target. source_ids: of a text; empty for a sound."""
    padding = [PADDING] * (source.num_tokens - len(source_ids))
    return msgspec.structs.replace(
        target, token_ids=[*source_ids, *padding, *target.token_ids], media=[source, *target.media]
    )


def check_source(prompt: Prompt, info: SourceInfo, block_size: int) -> None:
    """Check that a prompt begins with its source, and that nothing else in it is no token.

    Raises:
        ValueError: it does not, or the name of the source is not that of its content.
    """
    if len(prompt.media) != 1 or prompt.media[0].kind != info.kind or prompt.media[0].start:
        raise ValueError(f"a prompt of this model begins with its source, a medium of the kind {info.kind!r}")
    (source,) = prompt.media
    dtype = "int64" if info.kind == TEXT else "float32"
    if source.data.dtype != dtype or len(source.data.shape) != 1 or not source.data.shape[0]:
        raise ValueError(f"a source has contents of the dtype {dtype} in one dimension, and is not empty")
    num_tokens = info.num_tokens(source.data)
    if num_tokens > info.max_tokens:
        raise ValueError(f"the source has {num_tokens} tokens, and this model takes {info.max_tokens}")
    if info.kind == SOUND and source.data.shape[0] > info.max_samples:
        raise ValueError(
            f"the sound has {source.data.shape[0]} samples, and this model takes {info.max_samples}"
        )
    if source.num_tokens != filled(num_tokens, block_size) or source.embeddings or source.uuid:
        raise ValueError("the source does not fill its blocks")
    if len(prompt.token_ids) <= source.num_tokens:
        raise ValueError("the target is empty: it begins with the decoder's start token")
    if source.name != media_name(source.kind, source.data, source.options) or source.options:
        raise ValueError("the name of the source is not that of its content")
    own = prompt.token_ids[: source.num_tokens]
    if info.kind == SOUND:
        token_ids = []
    else:
        data = bytes(source.data.data)
        token_ids = [int.from_bytes(data[i : i + 8], "little", signed=True) for i in range(0, len(data), 8)]
    if own != token_ids + [PADDING] * (source.num_tokens - len(token_ids)):
        raise ValueError("the tokens of the source are not those of its content")
