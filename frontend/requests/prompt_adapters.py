"""Prompt adapters: embeddings that PEFT has learned, before a prompt.

They are read in the frontend (`learned_prompts.py`) and go with each request, mostly some hundred kilobytes; the
core keeps one copy, and their keys and values are in the prefix cache by the name of their content. So the second
request with an adapter computes nothing for its full blocks.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pagewire.ipc.bounds import check_int
from pagewire.ipc.errors import FieldTypeError, FieldValueError
from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.embeddings import PLACEHOLDER
from pagewire.ipc.wire.items import Media, Prompt


class PromptAdapterRequest(msgspec.Struct, frozen=True):
    """A prompt adapter for a request: a folder that PEFT's `save_pretrained` has written.

    prompt_adapter_name, prompt_adapter_id: what the caller calls it; they need not differ between adapters, since
        what is cached is named by its content.
    prompt_adapter_local_path: the folder. prompt_adapter_num_virtual_tokens: embeddings in it; 0: as it says.

    Raises:
        TypeError, ValueError: a value of a wrong type, or an empty or negative one.
    """

    prompt_adapter_name: str
    prompt_adapter_id: int
    prompt_adapter_local_path: str
    prompt_adapter_num_virtual_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("prompt_adapter_name", "prompt_adapter_local_path"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise FieldTypeError(name, f"must be a string, got {quoted(value)}")
            if not value:
                raise FieldValueError(name, "must not be empty")
        check_int("prompt_adapter_id", self.prompt_adapter_id, 1)
        check_int("prompt_adapter_num_virtual_tokens", self.prompt_adapter_num_virtual_tokens, 0)

    @property
    def name(self) -> str:
        """`prompt_adapter_name`."""
        return self.prompt_adapter_name


class PromptAdapter(msgspec.Struct, frozen=True):
    """A prompt adapter that has been read: its embeddings, as media at the beginning of a prompt."""

    media: tuple[Media, ...]
    num_virtual_tokens: int

    def before(self, prompt: Prompt) -> Prompt:
        """A prompt behind the adapter's virtual tokens."""
        num_tokens = self.num_virtual_tokens
        later = [msgspec.structs.replace(medium, start=num_tokens + medium.start) for medium in prompt.media]
        token_ids = [PLACEHOLDER] * num_tokens + prompt.token_ids
        return msgspec.structs.replace(prompt, token_ids=token_ids, media=[*self.media, *later])


def refuse_adapter(request: Any) -> None:
    """Refuse a prompt adapter with a prompt that is pooled; raises ValueError."""
    if request is not None:
        raise FieldValueError(
            "prompt_adapter_request",
            "is for requests that generate: a pooled result would be one of the virtual tokens, too",
        )
