"""Errors of pictures and sounds."""

from __future__ import annotations

from pagewire.ipc.errors import FieldValueError


class MediaError(ValueError):
    """A picture or sound cannot be had; the request that brought it is refused, and no other."""


class MediaFieldError(MediaError, FieldValueError):
    """The same, of one that stands in a field of the request."""
