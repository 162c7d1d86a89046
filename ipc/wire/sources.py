"""Sources: what the encoder of an encoder-decoder reads, at the beginning of a sequence.

    source, filled up to whole blocks | target: what the decoder runs, from its start token on

A source is the first medium of its prompt, of the kind `TEXT` or a sound. The names of all blocks depend on it, as
on any medium; so a source is encoded once, whoever sends it. A sound may be an excerpt of a longer one.
"""

from __future__ import annotations

import math

import msgspec

from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.items import Media, Prompt
from pagewire.ipc.wire.media import MediaInfo, MediumInfo, media_name

TEXT, SOUND = "text", "audio"
"""The kinds of media that are sources."""
NO_PROMPT_LOGPROBS = ": an encoder-decoder gives none: ask for logprobs of what is generated"
PADDING = 0
"""The token behind a source, up to the end of its last block, and in place of a sound; nothing reads it."""


class Spectrum(msgspec.Struct, omit_defaults=True, frozen=True):
    """The log-mel spectrogram that an encoder takes of a sound.

    num_bins: mel filters. num_fft: samples of a Fourier transform. hop: samples from a frame to the next.
    """

    num_bins: int
    num_fft: int
    hop: int


class SoundExcerpt(msgspec.Struct, omit_defaults=True, frozen=True, forbid_unknown_fields=True):
    """The frames of a longer sound that a source has: those that the whole sound's spectrogram has there.

    num_before: samples before the first frame's own: half of a Fourier transform; fewer where the sound begins.
    num_frames: how many the encoder gets; behind them is nothing.
    peak: the largest value of the whole sound's spectrogram, as a logarithm to base 10.
    """

    num_before: int
    num_frames: int
    peak: float

    @classmethod
    def of(cls, options: str) -> SoundExcerpt | None:
        """That in a medium's `options`; None: it is a whole sound. Raises ValueError if they are malformed."""
        try:
            return msgspec.json.decode(options, type=cls) if options else None
        except msgspec.MsgspecError as error:
            raise ValueError(f"the options of a source: {error}") from None

    @property
    def options(self) -> str:
        """It as the options of a medium."""
        return msgspec.json.encode(self).decode()

    def check(self, num_samples: int, info: SourceInfo) -> None:
        """Check that a source of so many samples has its frames.

        Raises:
            ValueError: it has not.
        """
        spectrum = info.spectrum
        if spectrum is None:
            raise ValueError("this model takes whole sounds, no excerpts")
        half = spectrum.num_fft // 2
        most = info.max_samples // spectrum.hop
        if not (0 <= self.num_before <= half and 1 <= self.num_frames <= most and math.isfinite(self.peak)):
            raise ValueError("the excerpt of a sound has frames that there are not")
        # What is missing at either end is reflected, which takes as many samples and one more.
        missing = (self.num_frames - 1) * spectrum.hop + half + self.num_before - num_samples
        if not (half < num_samples <= info.max_samples + spectrum.num_fft and missing <= half):
            raise ValueError(f"the excerpt of a sound has {num_samples} samples for {self.num_frames} frames")


class SourceInfo(msgspec.Struct, omit_defaults=True, frozen=True):
    """The sources that an engine takes.

    kind: `TEXT` or `SOUND`. max_tokens: of a source; a sound always has so many.
    max_target_tokens: of a target, the prompt of the decoder and what is generated together.
    start_ids: the prompt of the decoder in requests that give none.
    sampling_rate: of sound, in samples a second. max_samples: of a sound. spectrum: what it is made into.
    """

    kind: str
    max_tokens: int
    max_target_tokens: int
    start_ids: list[int]
    sampling_rate: int = 0
    max_samples: int = 0
    spectrum: Spectrum | None = None

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


def num_filled_tokens(num_tokens: int, block_size: int) -> int:
    """The tokens of whole blocks that hold a source."""
    return -(-num_tokens // block_size) * block_size


def text_source(token_ids: list[int], block_size: int) -> Media:
    """A text as a source."""
    data = Tensor("int64", (len(token_ids),), b"".join(i.to_bytes(8, "little") for i in token_ids))
    return Media(
        0, num_filled_tokens(len(token_ids), block_size), media_name(TEXT, data, ""), data, kind=TEXT
    )


def sound_source(data: Tensor, info: SourceInfo, block_size: int, options: str = "") -> Media:
    """A sound float32 [samples] as a source. options: of an `SoundExcerpt`."""
    num_tokens = num_filled_tokens(info.max_tokens, block_size)
    return Media(0, num_tokens, media_name(SOUND, data, options), data, kind=SOUND, options=options)


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
    check_sound(source, info)
    if source.num_tokens != num_filled_tokens(num_tokens, block_size) or source.embeddings or source.uuid:
        raise ValueError("the source does not fill its blocks")
    if len(prompt.token_ids) <= source.num_tokens:
        raise ValueError("the target is empty: it begins with the decoder's start token")
    if source.name != media_name(source.kind, source.data, source.options):
        raise ValueError("the name of the source is not that of its content")
    own = prompt.token_ids[: source.num_tokens]
    if info.kind == SOUND:
        token_ids = []
    else:
        data = bytes(source.data.data)
        token_ids = [int.from_bytes(data[i : i + 8], "little", signed=True) for i in range(0, len(data), 8)]
    if own != token_ids + [PADDING] * (source.num_tokens - len(token_ids)):
        raise ValueError("the tokens of the source are not those of its content")


def check_sound(source: Media, info: SourceInfo) -> None:
    """Check that a source is a sound that fits the encoder, or a text.

    Raises:
        ValueError: it is neither.
    """
    if info.kind == TEXT and source.options:
        raise ValueError("a text that is a source has no options")
    num_samples = source.data.shape[0]
    if (excerpt := SoundExcerpt.of(source.options)) is not None:
        excerpt.check(num_samples, info)
    elif info.kind == SOUND and num_samples > info.max_samples:
        raise ValueError(f"the sound has {num_samples} samples, and this model takes {info.max_samples}")
