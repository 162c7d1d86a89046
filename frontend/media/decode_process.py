"""Decodes pictures and sounds, in processes that may be lost.

What decodes them is C code that reads a stranger's bytes. Each content has a process of its own, forked for it,
with limits of time and memory: one that crashes or fills its decoder ends alone, and sees nothing of others.
Pillow, soundfile and soxr are imported in them and nowhere else.
"""

from __future__ import annotations

import argparse
from functools import cache

import msgspec

from pagewire.frontend.media.keys import MediaError
from pagewire.frontend.media.limits import MIN_SPEECH_SECONDS
from pagewire.frontend.media.picture import decode_picture, load_pillow
from pagewire.frontend.media.sound import convert_samples, decode_sound, load_sound_libraries
from pagewire.frontend.media.spectrum import log_peak
from pagewire.ipc.host.confined import Confined, JobKilledError, JobTimeoutError, Limits
from pagewire.ipc.host.job_server import Handler, serve
from pagewire.ipc.tenants import current_tenant
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.sources import Spectrum

SECONDS = 15.0  # of wall-clock time for one content
CPU_SECONDS = 5.0  # of processor time
MEMORY_BYTES = 1 << 30
NUM_PARALLEL = 3  # contents that are decoded at the same time; others wait, tenants in turn
NUM_RESERVED = 1  # of these, for a tenant of which nothing is decoded: another's may take all of their time
LIMITS = Limits(SECONDS, CPU_SECONDS, MEMORY_BYTES, answer_bytes=1 << 28)
# 25 minutes of stereo MP3 took 4.2 s of a processor to decode and resample, and 1.4 s to be searched for the peak.
SPEECH_LIMITS = Limits(2 * SECONDS, 3 * CPU_SECONDS, MEMORY_BYTES, answer_bytes=1 << 28)
NAMES = {"image": "picture", "audio": "sound", "samples": "sound"}


class EncodedMedia(msgspec.Struct, array_like=True):
    """A picture or sound as a file has it; or, of the kind "samples", a sound as float32 numbers.

    rate: samples a second that a sound is to have; 0: as it is. own_rate: those of "samples".
    max_side: pixels that a side of a picture may have, or it is made smaller; 0: any number.
    spectrum: of a sound whose peak is needed.
    """

    kind: str
    data: bytes
    rate: int = 0
    own_rate: int = 0
    max_side: int = 0
    spectrum: Spectrum | None = None


class DecodedBytes(msgspec.Struct, array_like=True):
    """The result of a job: the parts of a `Tensor`, or why the content is refused, in our own words.

    peak: of a sound's spectrogram, if it is needed.
    """

    dtype: str = "uint8"
    shape: tuple[int, ...] = (0,)
    data: memoryview = memoryview(b"")
    refusal: str = ""
    peak: float = 0.0


def decode(kind: str, data: bytes, rate: int = 0, own_rate: int = 0, max_side: int = 0) -> Tensor:
    """The content of a file. Blocks for up to `SECONDS`, or as long while others are decoded; in any thread.

    kind: "image": PNG, JPEG, WebP or GIF (its first picture), as uint8 [height, width, 3] in RGB, upright as its
        EXIF data say. "audio": WAV, FLAC, OGG or MP3, as float32 [samples], channels averaged. "samples": data
        are such samples already, `own_rate` a second.
    rate: samples a second to which sound is resampled; 0: its own. max_side: see `EncodedMedia`.

    Raises:
        MediaError: it cannot be decoded within the limits. The text repeats nothing of the decoder's.
        EngineBusyError: others take too long.
    """
    decoded = decode_confined(EncodedMedia(kind, data, rate, own_rate, max_side))
    return Tensor(decoded.dtype, decoded.shape, decoded.data)


def decode_speech(data: bytes, rate: int, spectrum: Spectrum) -> tuple[Tensor, float]:
    """A sound that is longer than a model hears at a time, and the peak of its spectrogram (`log_peak`).

    Arguments and errors as for `decode`, within `SPEECH_LIMITS`. Less than `MIN_SPEECH_SECONDS` are refused.
    """
    decoded = decode_confined(EncodedMedia("audio", data, rate, spectrum=spectrum))
    return Tensor(decoded.dtype, decoded.shape, decoded.data), decoded.peak


def decode_confined(encoded: EncodedMedia) -> DecodedBytes:
    """Decode one content in a process that may be lost, in the turn of `current_tenant`. Raises as `decode`."""
    name = NAMES[encoded.kind]
    try:
        limits = LIMITS if encoded.spectrum is None else SPEECH_LIMITS
        answer = decode_processes().run(msgspec.msgpack.encode(encoded), limits, current_tenant.get())
    except JobTimeoutError:
        raise MediaError(f"a {name} takes too long to decode") from None
    except JobKilledError:
        raise MediaError(f"a {name} cannot be decoded: its decoder failed or ran out of memory") from None
    decoded = msgspec.msgpack.decode(answer, type=DecodedBytes)
    if decoded.refusal:
        raise MediaError(decoded.refusal)
    return decoded


@cache
def decode_processes() -> Confined:
    """The processes of this frontend that decode; the first content starts them."""
    return Confined(__name__, num_parallel=NUM_PARALLEL, num_reserved=NUM_RESERVED)


def decoder() -> Handler:
    """The function that decodes one content, in a process forked for it."""
    load_pillow()
    load_sound_libraries()

    def run(job: bytes) -> bytes:
        encoded = msgspec.msgpack.decode(job, type=EncodedMedia)
        try:
            if encoded.kind == "image":
                shape, data = decode_picture(encoded.data, encoded.max_side)
                decoded = DecodedBytes("uint8", shape, memoryview(data))
            elif encoded.kind == "audio":
                shape, data = decode_sound(encoded.data, encoded.rate)
                decoded = DecodedBytes("float32", shape, memoryview(data), peak=peak_of(data, encoded))
            else:
                shape, data = convert_samples(encoded.data, encoded.own_rate, encoded.rate)
                decoded = DecodedBytes("float32", shape, memoryview(data))
        except MediaError as error:
            decoded = DecodedBytes(refusal=str(error))
        return msgspec.msgpack.encode(decoded)

    return run


def peak_of(data: bytes, encoded: EncodedMedia) -> float:
    """The peak of a decoded sound's spectrogram; 0 if it is not needed. Raises MediaError."""
    if encoded.spectrum is None:
        return 0.0
    if len(data) < 4 * MIN_SPEECH_SECONDS * encoded.rate:
        raise MediaError(f"a sound has less than {MIN_SPEECH_SECONDS:g} s: there is nothing to hear")
    return log_peak(data, encoded.rate, encoded.spectrum)


def warm_up_decoders(run: Handler) -> None:
    """Decode a small picture, so that the memory which all decoding uses is there."""
    import struct
    import zlib

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0))
    png = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(4))) + chunk(b"IEND", b"")
    run(msgspec.msgpack.encode(EncodedMedia("image", png)))


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(
        description="pagewire process that decodes pictures and sounds (started by a frontend)"
    )
    parser.add_argument("--control", type=int, required=True)
    parser.add_argument("--lifeline", type=int, required=True)
    options = parser.parse_args()
    serve(options.control, options.lifeline, decoder, warm_up_decoders)


if __name__ == "__main__":
    main()
