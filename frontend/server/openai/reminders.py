"""Instructions that come after a conversation has begun, as agents send them.

Many chat templates refuse messages of the system there, so they become text of the user, between tags that say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BEGIN, END = "<system-reminder>\n", "\n</system-reminder>"


def has_conversation_begun(messages: Sequence[dict[str, Any]]) -> bool:
    """Return True if there are other messages than those of the system."""
    return any(message["role"] != "system" for message in messages[:2]) or len(messages) > 2


def reminder(parts: Sequence[Any]) -> list[Any]:
    """Return parts of a message of the system as parts of one of the user."""
    return [
        {**part, "text": f"{BEGIN}{part['text']}{END}"}
        if isinstance(part, dict) and isinstance(part.get("text"), str)
        else part
        for part in parts
    ]
