"""Wishes in prompts that their prefixes stay cached, and how long."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pagewire.ipc.bounds import check_fields
from pagewire.ipc.errors import FieldTypeError, FieldValueError
from pagewire.ipc.wire.items import MAX_RETENTIONS, Retention

KEY = "cache_retention"


def retention_of(prompt: Any) -> list[Retention]:
    """Checked copies of a prompt's `cache_retention`: one `Retention`, or several; empty if it has none.

    Raises:
        TypeError: it is something else. ValueError: a value is out of its bounds, or there are too many.
    """
    given = prompt.get(KEY) if isinstance(prompt, Mapping) else None
    if given is None:
        return []
    wishes = [given] if isinstance(given, Retention) else given
    if not isinstance(wishes, list) or not all(isinstance(wish, Retention) for wish in wishes):
        raise FieldTypeError(KEY, f"must be a Retention or a list of them, got {type(given).__name__}")
    if len(wishes) > MAX_RETENTIONS:
        raise FieldValueError(KEY, f": at most {MAX_RETENTIONS} are taken, got {len(wishes)}")
    copies = [msgspec.structs.replace(wish) for wish in wishes]
    for copy in copies:
        check_fields(copy)
    return copies


def refuse_retention(prompt: Any, what: str) -> None:
    """Refuse a prompt that is to stay cached where nothing keeps it; raises ValueError.

    what: has no use for it.
    """
    if isinstance(prompt, Mapping) and prompt.get(KEY) is not None:
        raise FieldValueError(KEY, f"does not go with {what}: leave it out")
