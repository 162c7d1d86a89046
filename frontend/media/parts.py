"""Pictures and sounds among the parts of a conversation's messages.

{"type": "image_url", "image_url": {"url": ...}}  -->  {"type": "image"}, which chat templates know, and an item
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagewire.frontend.media.items import Decoded, MediaItem
from pagewire.frontend.media.keys import MediaError, MediaFieldError
from pagewire.frontend.media.objects import item_of
from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.media import MediaInfo

KINDS = {
    "image": "image",
    "image_pil": "image",
    "image_url": "image",
    "input_image": "image",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
}
"""The kind of media that a part has, by its type."""
NOT_TAKEN = {
    "image_embeds": "image_embeds: give embeddings by multi_modal_data, in Python",
    "file": "files: give their text, or their pages as pictures",
    "input_file": "files: give their text, or their pages as pictures",
    "video": "videos: give some of their pictures",
    "video_url": "videos: give some of their pictures",
}
"""Why parts of other types are refused."""
TYPES = KINDS.keys() | NOT_TAKEN.keys()
SOUND_FORMATS = ("wav", "mp3", "flac", "ogg")
MARKS = tuple({"type": kind} for kind in ("image", "audio"))
"""The parts that stand for media in a rendered conversation."""
MAX_SIDES = {"auto": 0, "high": 0, "low": 512}
"""Pixels that a side of a picture may have, by its `detail`, or it is made smaller; 0: any number."""
NAMES = {"image": "pictures", "audio": "sounds"}


def media_refusal(kind: str) -> str:
    """Why a model that takes only text is not given a part of this type."""
    if kind in NOT_TAKEN:
        return f"the model takes no {NOT_TAKEN[kind]}"
    return f"the model takes no {NAMES[KINDS[kind]]}: give text"


def take_media(
    messages: Sequence[Any], info: MediaInfo | None
) -> tuple[list[Any], list[MediaItem | Decoded]]:
    """Messages whose media are marks for the chat template (`MARKS`), and the media, in order.

    Nothing is fetched or decoded.

    Raises:
        MediaError: the model takes no such media, or not so many; or a part is malformed.
    """
    items: list[MediaItem | Decoded] = []
    taken: list[Any] = []
    counts: dict[str, int] = {}
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list) or not any(map(is_media, content)):
            taken.append(message)
            continue
        parts = []
        for number, part in enumerate(content):
            if is_media(part):
                place = place_of(part) or f"messages[{index}].content[{number}]"
                kind = check_media_kind(part["type"], info, counts, place)
                items.append(read_part(part, kind, info, place))
                part = {"type": kind}
            parts.append(part)
        taken.append({**message, "content": parts})
    return taken, items


def is_media(part: Any) -> bool:
    """True for a part that is a picture or sound, or something else that is not text."""
    kind = part.get("type") if isinstance(part, dict) else None
    return isinstance(kind, str) and kind in TYPES


def place_of(part: dict[str, Any]) -> str:
    """Where a request of another API has a part; "" if it is where the conversation has it."""
    item = part.get("image")
    return item.place if isinstance(item, MediaItem) else ""


def check_media_kind(name: str, info: MediaInfo | None, counts: dict[str, int], place: str) -> str:
    """The kind of media of a part, which is counted. name: its type.

    Raises:
        MediaError: the model takes none of this kind, or not so many.
    """
    kind = KINDS.get(name, "")
    if info is None or kind not in info.kinds:
        raise MediaFieldError(place, f": {media_refusal(name)}; got a part of type {quoted(name)}")
    counts[kind] = counts.get(kind, 0) + 1
    if counts[kind] > info.kinds[kind].limit:
        raise too_many(kind, info)
    return kind


def too_many(kind: str, info: MediaInfo) -> MediaError:
    """The error for more media of a kind than a prompt may have."""
    limit = info.kinds[kind].limit
    return MediaError(
        f"a prompt may have {limit} {NAMES[kind]}, and this one has more: the engine's limit_mm_per_prompt "
        f'(--limit-mm-per-prompt {{"{kind}": N}}) says how many'
    )


def read_part(part: dict[str, Any], kind: str, info: MediaInfo | None, place: str) -> MediaItem | Decoded:
    """The medium of one part.

    Raises:
        MediaError: it is malformed.
    """
    assert info is not None
    uuid = part.get("uuid") or ""
    if not isinstance(uuid, str):
        raise MediaFieldError(f"{place}.uuid", "must be a string")
    name = part["type"]
    if name == "input_audio":
        return MediaItem(kind, url=sound_url(part.get(name), place), uuid=uuid, place=place)
    value = part.get("image_url" if name == "input_image" else name)
    if name in ("image", "audio"):  # Hugging Face's form
        value = next((part[key] for key in (name, "url", "path") if part.get(key) is not None), None)
    elif isinstance(value, dict):
        value = value.get("url")
    max_side = max_side_of(part, place)
    if value is None and uuid:
        return MediaItem(kind, uuid=uuid, place=place)
    if isinstance(value, str) and value:
        return MediaItem(kind, url=value, max_side=max_side, uuid=uuid, place=place)
    if value is None or isinstance(value, str | dict | list):
        if name == "input_image" and part.get("file_id"):
            raise MediaFieldError(place, ": files are not kept (file_id): give image_url")
        raise MediaFieldError(place, f": a part of type {quoted(name)} needs a URL")
    return item_of(kind, value, info, place, uuid)


def max_side_of(part: dict[str, Any], place: str) -> int:
    """Pixels that a side of a part's picture may have, by its `detail`. Raises MediaError."""
    value = part.get(part["type"])
    detail = (value if isinstance(value, dict) else part).get("detail") or "auto"
    if not isinstance(detail, str) or detail not in MAX_SIDES:
        raise MediaFieldError(place, f": detail must be one of {', '.join(MAX_SIDES)}, got {quoted(detail)}")
    return MAX_SIDES[detail]


def sound_url(value: Any, place: str) -> str:
    """The sound of an `input_audio` part as a data: URL. Raises MediaError."""
    data = value.get("data") if isinstance(value, dict) else None
    if not isinstance(data, str) or not data:
        raise MediaFieldError(f"{place}.input_audio", "needs data, in base64")
    form = value.get("format", "wav")
    if form not in SOUND_FORMATS:
        raise MediaFieldError(
            f"{place}.input_audio.format", f"must be one of {', '.join(SOUND_FORMATS)}, got {quoted(form)}"
        )
    return f"data:audio/{form};base64,{data}"
