"""Files of pictures and sounds that are larger than they look, broken, or slow to decode; and plain small ones.

They are made byte by byte, without a library of pictures or sounds: none would write them.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

HUGE = 60_000  # pixels of a side: 3.6 billion in all
SIDE = 16_000  # of a picture whose sides alone are allowed


def chunk(name: bytes, data: bytes) -> bytes:
    """A chunk of a PNG file."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, rows: bytes, *more: bytes) -> bytes:
    """A PNG file in RGB. rows: compressed. more: chunks before them."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(more) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def plain_png(width: int, height: int, color: tuple[int, int, int] = (200, 30, 40)) -> bytes:
    """A PNG file of one colour."""
    return png(width, height, zlib.compress((b"\0" + bytes(color) * width) * height))


def png_of_many_pixels() -> bytes:
    """Its header names 3.6 billion pixels; 3 kB of zeros compressed follow."""
    return png(HUGE, HUGE, zlib.compress(bytes(3 << 20), 9))


def png_with_long_text() -> bytes:
    """A text of 64 MiB, compressed to 64 kB, beside a picture of one pixel."""
    compressor = zlib.compressobj(1)
    text = b"".join(compressor.compress(bytes(1 << 20)) for _ in range(64)) + compressor.flush()
    return png(1, 1, zlib.compress(bytes(4)), chunk(b"zTXt", b"a\0\0" + text))


def png_with_more_rows() -> bytes:
    """A picture of one pixel, whose rows are those of a large one."""
    return png(1, 1, zlib.compress(bytes(64 << 20), 9))


def jpeg_of_many_pixels() -> bytes:
    """A JPEG file that ends after a header of 3.6 billion pixels."""
    frame = struct.pack(">BHHBBBBBBBBBB", 8, HUGE, HUGE, 3, 1, 0x22, 0, 2, 0x11, 1, 3, 0x11, 1)
    return b"\xff\xd8\xff\xc0" + struct.pack(">H", 2 + len(frame)) + frame + b"\xff\xd9"


def jpeg_of_many_scans() -> bytes:
    """A progressive JPEG file of 5,000 x 5,000 pixels in 3,000 scans, each of which is a pass over all of it."""
    size = 5000
    tables = b"\xff\xdb\x00\x43\x00" + bytes([1] * 64)
    frame = struct.pack(">BHHBBBB", 8, size, size, 1, 1, 0x11, 0)
    frame = b"\xff\xc2" + struct.pack(">H", 2 + len(frame)) + frame
    # One code of one bit: in a DC scan "no change", in an AC scan "the block has ended".
    codes = b"".join(
        b"\xff\xc4" + struct.pack(">HB", 20, place) + b"\x01" + bytes(15) + b"\x00" for place in (0x00, 0x10)
    )
    first = b"\xff\xda\x00\x08\x01\x01\x00\x00\x00\x01" + bytes((size // 8 + 1) ** 2 // 8)
    refining = b"\xff\xda\x00\x08\x01\x01\x00\x00\x00\x10" + bytes(64)
    return b"\xff\xd8" + tables + frame + codes + first + refining * 3000 + b"\xff\xd9"


def gif_of_many_pixels() -> bytes:
    """A GIF file whose screen and only frame have 3.6 billion pixels."""
    screen = struct.pack("<HHBBB", HUGE, HUGE, 0x80, 0, 0) + bytes(6)
    frame = b"," + struct.pack("<HHHHB", 0, 0, HUGE, HUGE, 0) + b"\x02\x02\x4c\x01\x00"
    return b"GIF89a" + screen + frame + b";"


def gif_with_large_frame() -> bytes:
    """A GIF file with a screen of one pixel and a frame of 3.6 billion."""
    screen = struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6)
    frame = b"," + struct.pack("<HHHHB", 0, 0, HUGE, HUGE, 0) + b"\x02\x02\x4c\x01\x00"
    return b"GIF89a" + screen + frame + b";"


def webp_of_many_pixels() -> bytes:
    """A WebP file with a canvas of 256 million pixels."""
    side = (SIDE - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + side + side + b"VP8L" + struct.pack("<I", 5)
    body += b"\x2f" + bytes(4) + b"\0"
    return b"RIFF" + struct.pack("<I", len(body)) + body


def lossless_webp_of_many_pixels() -> bytes:
    """A WebP file without a canvas, whose picture has 256 million pixels."""
    side = SIDE - 1
    head = b"\x2f" + (side | side << 14).to_bytes(4, "little") + bytes(3)
    body = b"WEBPVP8L" + struct.pack("<I", len(head)) + head
    return b"RIFF" + struct.pack("<I", len(body)) + body


def flac_of_many_samples() -> bytes:
    """A FLAC file that names 2 ** 36 - 1 samples, 18 days of them, and has none."""
    rate, channels, bits, samples = 44_100, 2, 16, 2**36 - 1
    packed = rate << 44 | (channels - 1) << 41 | (bits - 1) << 36 | samples
    info = struct.pack(">HH", 4096, 4096) + bytes(6) + packed.to_bytes(8, "big") + bytes(16)
    return b"fLaC\x80" + len(info).to_bytes(3, "big") + info


def crc(data: bytes, polynomial: int, bits: int) -> int:
    """A cyclic redundancy check of FLAC."""
    value, top = 0, 1 << (bits - 1)
    for byte in data:
        value ^= byte << (bits - 8)
        for _ in range(8):
            value = (value << 1 ^ polynomial if value & top else value << 1) & ((1 << bits) - 1)
    return value


def flac_without_end() -> bytes:
    """A FLAC file of silence: 40 minutes of 8 kHz, in 4,700 frames of 14 bytes that name no total."""
    rate, block = 8000, 4096
    packed = rate << 44 | 15 << 36  # one channel, 16 bits, a number of samples that is not known
    info = struct.pack(">HH", block, block) + bytes(6) + packed.to_bytes(8, "big") + bytes(16)
    frames = [b"fLaC\x80" + len(info).to_bytes(3, "big") + info]
    for number in range(rate * 2400 // block):
        code = bytes([number]) if number < 0x80 else chr(number).encode("utf-8", "surrogatepass")
        head = b"\xff\xf8\xc4\x08" + code  # 4,096 samples at 8 kHz, one channel, 16 bits
        head += bytes([crc(head, 0x07, 8)])
        frame = head + b"\x00\x00\x00"  # a constant sub-frame: zero
        frames.append(frame + crc(frame, 0x8005, 16).to_bytes(2, "big"))
    return b"".join(frames)


def wav(num_samples: int, rate: int = 8000, channels: int = 1, named: int | None = None) -> bytes:
    """A WAV file of silence, 16 bits. named: bytes of samples that its header names, if other than it has."""
    data = bytes(2 * num_samples * channels)
    size = len(data) if named is None else named
    form = struct.pack("<HHIIHH", 1, channels, rate, 2 * rate * channels, 2 * channels, 16)
    head = b"RIFF" + struct.pack("<I", min(36 + size, 2**32 - 1)) + b"WAVEfmt " + struct.pack("<I", 16)
    return head + form + b"data" + struct.pack("<I", size) + data


BOMBS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "png of many pixels": ("image", png_of_many_pixels),
    "png with a long text": ("image", png_with_long_text),
    "jpeg of many pixels": ("image", jpeg_of_many_pixels),
    "jpeg of many scans": ("image", jpeg_of_many_scans),
    "gif of many pixels": ("image", gif_of_many_pixels),
    "gif with a large frame": ("image", gif_with_large_frame),
    "webp of many pixels": ("image", webp_of_many_pixels),
    "lossless webp of many pixels": ("image", lossless_webp_of_many_pixels),
    "flac of many samples": ("audio", flac_of_many_samples),
    "flac without end": ("audio", flac_without_end),
}
"""By name: the kind, and what makes the file. None of them may be decoded."""
