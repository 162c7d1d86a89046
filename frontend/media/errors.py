"""Errors of pictures and sounds."""

from __future__ import annotations


class MediaError(ValueError):
    """A picture or sound cannot be had; the request that brought it is refused, and no other."""
