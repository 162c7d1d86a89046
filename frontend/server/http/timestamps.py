"""Times as Anthropic's and Ollama's APIs write them."""

from __future__ import annotations

import time


def timestamp(seconds: float) -> str:
    """Return a time, in seconds since the epoch, as ISO 8601 in UTC."""
    whole = int(seconds)
    text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole))
    return f"{text}.{int((seconds - whole) * 1e6):06d}Z"
