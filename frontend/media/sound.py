"""Decoding of sounds with soundfile and soxr, which are imported in the process that decodes only."""

from __future__ import annotations

from importlib import import_module
from io import BytesIO
from typing import TYPE_CHECKING, TypeAlias

from pagewire.frontend.media.keys import MediaError
from pagewire.frontend.media.limits import (
    MAX_CHANNELS,
    MAX_LOUDNESS,
    MAX_RATE,
    MAX_SAMPLES,
    MAX_SOUND_FRAMES,
    MAX_SOUND_SECONDS,
    MIN_RATE,
)

if TYPE_CHECKING:
    import numpy as np
    import soundfile
    from numpy.typing import NDArray

    Samples: TypeAlias = NDArray[np.float32]

FORMATS = ("WAV", "WAVEX", "FLAC", "OGG", "MP3")
NAMED = "WAV, FLAC, OGG and MP3"
BLOCK = 1 << 18  # frames that are read at a time


def load_sound_libraries() -> None:
    """Import what decoding needs, once for all processes that do it."""
    for name in ("numpy", "soundfile", "soxr"):
        import_module(name)


def decode_sound(data: bytes, rate: int) -> tuple[tuple[int, ...], bytes]:
    """Decode a sound: its shape [samples], and its samples as float32, little-endian.

    Channels are averaged, then it is resampled to `rate` (0: not) by soxr in high quality, as librosa does both,
    by which transformers reads sounds.

    Raises:
        MediaError: it is of another format, damaged, empty or too long.
    """
    import soundfile

    if not is_known(data):
        raise MediaError(f"a sound has none of the formats {NAMED}")
    try:
        with soundfile.SoundFile(BytesIO(data)) as file:
            if file.format not in FORMATS:
                raise MediaError(f"a sound has none of the formats {NAMED}")
            check_sound_length(file.frames, file.samplerate, file.channels)
            samples, own_rate = mono(file), file.samplerate
    except MemoryError:
        raise
    except MediaError:
        raise
    except Exception:  # of any type, by what is wrong with its bytes
        raise MediaError("a sound is damaged or truncated") from None
    return pack_samples(resample_sound(samples, own_rate, rate))


def convert_samples(data: bytes, own_rate: int, rate: int) -> tuple[tuple[int, ...], bytes]:
    """Resample float32 samples of one channel; see `decode_sound`. Raises MediaError."""
    import numpy as np

    samples = np.frombuffer(data, "<f4").astype(np.float32)
    check_sound_length(len(samples), own_rate, 1)
    return pack_samples(resample_sound(samples, own_rate, rate))


def is_known(data: bytes) -> bool:
    """True if a file begins as one of the formats does: the library would try dozens of others."""
    head = data[:12]
    wav = head[:4] in (b"RIFF", b"RF64") and head[8:] == b"WAVE"
    mp3 = head[:3] == b"ID3" or (head[:1] == b"\xff" and len(head) > 1 and head[1] & 0xE0 == 0xE0)
    return wav or mp3 or head[:4] in (b"fLaC", b"OggS")


def check_sound_length(num_frames: int, rate: int, num_channels: int) -> None:
    """Check the sizes that a sound says it has, before it is decoded.

    Raises:
        MediaError: it is too long, or has none.
    """
    if not 1 <= num_channels <= MAX_CHANNELS:
        raise MediaError(f"a sound may have {MAX_CHANNELS} channels")
    if not MIN_RATE <= rate <= MAX_RATE:
        raise MediaError(f"a sound must have {MIN_RATE} to {MAX_RATE} samples a second")
    if num_frames > MAX_SOUND_FRAMES or num_frames > MAX_SOUND_SECONDS * rate:
        raise MediaError(f"a sound may have {MAX_SOUND_SECONDS} s, and {MAX_SOUND_FRAMES} samples a channel")


def mono(file: soundfile.SoundFile) -> Samples:
    """The average of all channels [frames], read in blocks: those of sixteen channels are in memory once only."""
    import numpy as np

    blocks: list[Samples] = []
    num_frames = 0
    for block in file.blocks(BLOCK, dtype="float32", always_2d=True):
        blocks.append(block[:, 0].copy() if file.channels == 1 else block.mean(axis=1, dtype=np.float32))
        num_frames += len(block)
        check_sound_length(
            num_frames, file.samplerate, file.channels
        )  # a header may name fewer than there are
    if num_frames == 0:
        raise MediaError("a sound has no samples")
    if num_frames < file.frames:
        raise MediaError("a sound is damaged or truncated")
    return np.concatenate(blocks)


def resample_sound(samples: Samples, own_rate: int, rate: int) -> Samples:
    """Samples [n] at another rate; rate 0: at their own."""
    import numpy as np
    import soxr

    if rate in (0, own_rate):
        return samples
    # As librosa: the number of samples that the ratio gives, rounded up.
    count = -(-len(samples) * rate // own_rate)
    converted = soxr.resample(samples, own_rate, rate, quality="soxr_hq")
    fitted = np.zeros(count, np.float32)
    fitted[: len(converted)] = converted[:count]
    return fitted


def pack_samples(samples: Samples) -> tuple[tuple[int, ...], bytes]:
    """The shape and the bytes of samples, which are checked. Raises MediaError."""
    import numpy as np

    if len(samples) > MAX_SAMPLES:
        raise MediaError(f"a sound may have {MAX_SAMPLES} samples")
    if not np.isfinite(samples).all():  # of a file of floats
        raise MediaError("a sound has samples that are no finite numbers")
    if len(samples) and max(samples.max(), -samples.min()) > MAX_LOUDNESS:
        raise MediaError(
            f"a sound has samples over {MAX_LOUDNESS}: those of a file of floats are from -1 to 1"
        )
    return (len(samples),), samples.astype("<f4", copy=False).tobytes()
