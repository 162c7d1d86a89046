"""The part of a prompt that is about its media, and its errors; also where no media are taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagewire.ipc.errors import FieldValueError

KEYS = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")
NOT_TAKEN = "the model takes no pictures or sounds: give text, token ids or embeddings"


def has_media(prompt: Any) -> bool:
    """True for a prompt with pictures or sounds; those of an encoder-decoder are in its part for the encoder."""
    if not isinstance(prompt, Mapping):
        return False
    return bool(prompt.get(KEYS[0]) or prompt.get(KEYS[1])) or has_media(prompt.get("encoder_prompt"))


class MediaError(ValueError):
    """A picture or sound cannot be had; the request that brought it is refused, and no other."""


class MediaFieldError(MediaError, FieldValueError):
    """The same, of one that stands in a field of the request."""
