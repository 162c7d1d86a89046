"""Pictures and sounds as Python objects: of Pillow, NumPy or PyTorch, none of which is imported here."""

from __future__ import annotations

import sys
from typing import Any

from pagewire.frontend.media.items import Decoded, MediaItem
from pagewire.frontend.media.keys import MediaError, MediaFieldError
from pagewire.frontend.media.limits import MAX_PIXELS, MAX_SIDE
from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.embeddings import check_embeddings
from pagewire.ipc.wire.media import MediaInfo

PICTURES = "a PIL image, an array uint8 [height, width, 3], or the bytes of a PNG, JPEG, WebP or GIF file"
SOUNDS = "a pair of float samples [n] and their number a second, or the bytes of a WAV, FLAC, OGG or MP3 file"


def item_of(kind: str, value: Any, info: MediaInfo, place: str, uuid: str = "") -> MediaItem | Decoded:
    """A picture or sound that a caller gives as an object. place: where, for errors.

    Raises:
        MediaError: it is none, or its values are not of the kind that is taken.
    """
    if isinstance(value, MediaItem | Decoded):
        return value
    if value is None and uuid:
        return MediaItem(kind, uuid=uuid, place=place)
    if isinstance(value, bytes | bytearray):
        return MediaItem(kind, data=bytes(value), uuid=uuid, place=place)
    if kind == "audio":
        return read_sound_object(value, info, place, uuid)
    if (embeddings := media_embeddings(value, info, place)) is not None:
        return Decoded(kind, embeddings, embeddings=True, uuid=uuid, place=place)
    return Decoded(kind, picture_of(value, place), uuid=uuid, place=place)


def picture_of(value: Any, place: str) -> Tensor:
    """The pixels of a PIL image or an array: uint8 [height, width, 3]. Raises MediaError."""
    pillow = sys.modules.get("PIL.Image")
    if pillow is not None and isinstance(value, pillow.Image):
        check_pixels(value.height, value.width, place)
        rgb = value.convert("RGB")
        return Tensor("uint8", (rgb.height, rgb.width, 3), rgb.tobytes())
    array = array_of(value)
    shape = () if array is None else tuple(array.shape)
    if array is None or str(array.dtype) != "uint8" or len(shape) != 3 or 3 not in (shape[0], shape[2]):
        raise MediaFieldError(place, f"must be {PICTURES}; got {describe_value(value, array)}")
    if shape[2] != 3:  # [3, height, width]
        array = array.transpose(1, 2, 0)
    check_pixels(array.shape[0], array.shape[1], place)
    return Tensor("uint8", tuple(array.shape), array.tobytes())


def check_pixels(height: int, width: int, place: str) -> None:
    """Check the size of a picture. Raises MediaError."""
    if not (0 < height <= MAX_SIDE and 0 < width <= MAX_SIDE and height * width <= MAX_PIXELS):
        raise MediaFieldError(place, f": a picture may have {MAX_PIXELS} pixels, and {MAX_SIDE} a side")


def read_sound_object(value: Any, info: MediaInfo, place: str, uuid: str) -> MediaItem | Decoded:
    """Samples with their rate, or at the engine's; where sounds are decoded, they are resampled.

    Raises:
        MediaError: they are none.
    """
    rate: Any = info.sampling_rate
    samples = value
    if isinstance(value, tuple) and len(value) == 2:
        samples, rate = value
    array = array_of(samples)
    if array is None or array.dtype.kind != "f" or len(array.shape) != 1 or not array.shape[0]:
        raise MediaFieldError(place, f"must be {SOUNDS}; got {describe_value(samples, array)}")
    if not hasattr(rate, "__int__") or isinstance(rate, str) or rate < 1 or rate != int(rate):
        raise MediaFieldError(place, ": the number of samples a second must be a positive integer")
    data = array.astype("<f4").tobytes()
    return MediaItem("audio", data=data, samples=int(rate), uuid=uuid, place=place)


def media_embeddings(value: Any, info: MediaInfo, place: str) -> Tensor | None:
    """Embeddings in place of a picture, float [number of tokens, E] or [1, ...]; None if it is something else.

    Raises:
        MediaError: the model takes none, or they do not fit it.
    """
    array = array_of(value)
    if array is None or array.dtype.kind not in "fV" or len(array.shape) not in (2, 3):
        return None
    if len(array.shape) == 3 and array.shape[0] != 1:
        return None
    if not info.embedding_size:
        raise MediaFieldError(place, f": the model takes no embeddings in place of pictures; give {PICTURES}")
    rows = array.reshape(array.shape[-2:])
    name = {"float64": "float32", "float32": "float32", "float16": "float16"}[str(array.dtype)]
    tensor = Tensor(name, tuple(rows.shape), rows.astype(name).tobytes())
    try:
        check_embeddings(place, tensor, info.embedding_size)
    except ValueError as error:
        raise MediaError(str(error)) from None
    return tensor


def array_of(value: Any) -> Any:
    """A value as a NumPy array; None if it is no array of NumPy or PyTorch."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    if numpy is not None and isinstance(value, numpy.ndarray):
        return value
    return None


def describe_value(value: Any, array: Any) -> str:
    """A description of a value, for errors."""
    if array is None:
        return quoted(type(value).__name__)
    return f"an array of {array.dtype} {quoted(list(array.shape))}"
