"""LoRA adapters as programs name them, and as a session sends their names to the core.

LoRARequest --AdapterBook.use--> UsedAdapter (AdapterSource, tokenizer) --> Request.adapter
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pagewire.frontend.text.tokenizer import Tokenizer
from pagewire.ipc.bounds import check_int
from pagewire.ipc.compatibility import KnowsArguments
from pagewire.ipc.errors import FieldTypeError, FieldValueError
from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.lora import MAX_ADAPTER_ID, AdapterSource


class LoRARequest(msgspec.Struct, metaclass=KnowsArguments, frozen=True):
    """A LoRA adapter for a request.

    Attributes:
        lora_name: a name for people, metrics and other frontends of the engine.
        lora_int_id: a number of the adapter's own, at least 1.
        lora_path: its folder, or its repository on the Hugging Face hub; empty: the adapter that was added to the
            engine under this name (`add_lora`, `--lora-modules`).
        lora_local_path: older spelling of `lora_path`.
        base_model_name: the model that it is for; if given, it must be one of the engine's.

    Raises:
        ValueError, TypeError: a bad value.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    lora_local_path: str | None = None
    base_model_name: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("lora_name", self.lora_name), ("lora_path", self.lora_path)):
            if not isinstance(value, str):
                raise FieldTypeError(name, f"must be a string, got {quoted(value)}")
        if not self.lora_name:
            raise FieldValueError("lora_name", "must not be empty")
        check_int("lora_int_id", self.lora_int_id, 1, MAX_ADAPTER_ID)
        if self.lora_local_path is not None:
            if self.lora_path not in ("", self.lora_local_path):
                raise FieldValueError(
                    "lora_path", "and lora_local_path contradict each other: give lora_path"
                )
            msgspec.structs.force_setattr(self, "lora_path", self.lora_local_path)

    @property
    def name(self) -> str:
        """The same as `lora_name`."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """The same as `lora_int_id`."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """The same as `lora_path`."""
        return self.lora_path

    @property
    def local_path(self) -> str:
        """The same as `lora_path`."""
        return self.lora_path


class UsedAdapter(msgspec.Struct, frozen=True):
    """The adapter of one request, as the program and the core name it, and its tokenizer if it has its own."""

    lora_request: LoRARequest
    source: AdapterSource
    tokenizer: Tokenizer | None
    num_extra_tokens: int


def for_each(lora_request: Any, num_prompts: int) -> list[LoRARequest | None]:
    """One `LoRARequest` or None for each prompt, given one for all, none, or a list.

    Raises:
        ValueError: the list has another length. TypeError: a value is no `LoRARequest`.
    """
    if lora_request is None or isinstance(lora_request, LoRARequest):
        return [lora_request] * num_prompts
    if not isinstance(lora_request, Sequence) or isinstance(lora_request, (str, bytes)):
        raise FieldTypeError(
            "lora_request", f"must be a LoRARequest or a list of them, got {quoted(lora_request)}"
        )
    requests = list(lora_request)
    for request in requests:
        if not (request is None or isinstance(request, LoRARequest)):
            raise FieldTypeError(
                "lora_request", f"must be a LoRARequest or a list of them, got {quoted(request)}"
            )
    if len(requests) != num_prompts:
        raise ValueError(f"{num_prompts} prompts, but {len(requests)} lora_requests")
    return requests
