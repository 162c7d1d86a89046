"""The rules by which Whisper's timestamps stand among the tokens of an output."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from pagewire.ipc.bounds import check_fields

TimestampToken: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class TimestampRules(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Output begins with a timestamp; others come in pairs, and none goes back in time.

    A timestamp comes next where all of them together are likelier than any other token. So decode
    `ApplyTimestampRules` of openai/whisper, and `WhisperTimeStampLogitsProcessor` of transformers.

    first: the token of 0.00 seconds; all tokens from it on are timestamps.
    end: the token that ends an output; those before it are text.
    max_initial: the latest timestamp with which an output may begin, counted from `first`; None: any.
    """

    first: TimestampToken
    end: TimestampToken
    max_initial: TimestampToken | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.first <= self.end:
            raise ValueError(f"timestamps: they come after the end of text, got {self.first} and {self.end}")
