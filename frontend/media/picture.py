"""Decoding of pictures with Pillow, which is imported in the process that decodes only (`decode_process.py`)."""

from __future__ import annotations

import warnings
from importlib import import_module
from io import BytesIO
from typing import TYPE_CHECKING

from pagewire.frontend.media.keys import MediaError
from pagewire.frontend.media.limits import MAX_PIXELS, MAX_SIDE

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ["PNG", "JPEG", "WEBP", "GIF"]
NAMED = "PNG, JPEG, WebP and GIF"
PLUGINS = ("Png", "Jpeg", "WebP", "Gif")


def load_pillow() -> None:
    """Import Pillow with the decoders of `FORMATS` alone, and let it refuse pictures of too many pixels."""
    from PIL import Image

    for name in PLUGINS:
        import_module(f"PIL.{name}ImagePlugin")  # which registers the decoder
    Image.MAX_IMAGE_PIXELS = MAX_PIXELS
    warnings.simplefilter("error", Image.DecompressionBombWarning)


def decode_picture(data: bytes, max_side: int = 0) -> tuple[tuple[int, ...], bytes]:
    """Decode a picture: its shape [height, width, 3], and its RGB bytes.

    An animation is its first picture. It is turned upright as its EXIF data say, and converted by `convert("RGB")`,
    as transformers does both. max_side: pixels that a side may have, or it is made smaller; 0: any number.

    Raises:
        MediaError: it is of another format, damaged, or too large.
    """
    from PIL import Image, UnidentifiedImageError

    check_webp_size(data)
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as picture:
            check_picture_size(*picture.size)
            picture.load()
            check_picture_size(*picture.size)
            rgb = upright(picture).convert("RGB")
            if max_side:
                rgb.thumbnail((max_side, max_side))
            return (rgb.height, rgb.width, 3), rgb.tobytes()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise picture_too_large() from None
    except UnidentifiedImageError:
        raise MediaError(f"a picture has none of the formats {NAMED}") from None
    except MemoryError:
        raise
    except MediaError:
        raise
    except Exception:  # of any type, by what is wrong with its bytes
        raise MediaError("a picture is damaged or truncated") from None


def upright(picture: Image.Image) -> Image.Image:
    """The picture, turned as its EXIF data say; as it is if they are damaged."""
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(picture)
    except MemoryError:
        raise
    except Exception:
        return picture


def check_picture_size(width: int, height: int) -> None:
    """Check the size that a picture says it has, before it is decoded.

    Raises:
        MediaError: it is too large, or empty.
    """
    if width < 1 or height < 1:
        raise MediaError("a picture is damaged or truncated")
    if width > MAX_SIDE or height > MAX_SIDE or width * height > MAX_PIXELS:
        raise picture_too_large()


def picture_too_large() -> MediaError:
    """The error for a picture of too many pixels."""
    return MediaError(f"a picture may have {MAX_PIXELS} pixels, and {MAX_SIDE} a side: scale it down")


def check_webp_size(data: bytes) -> None:
    """Check the canvas of a WebP file: its decoder allocates it when the file is opened. Raises MediaError."""
    if data[:4] == b"RIFF" and data[8:16] == b"WEBPVP8X" and len(data) >= 30:
        width, height = (1 + int.from_bytes(data[start : start + 3], "little") for start in (24, 27))
        check_picture_size(width, height)
