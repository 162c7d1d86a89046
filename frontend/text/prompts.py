"""The forms in which a prompt may be given."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, TypedDict


class TextPrompt(TypedDict, total=False):
    """A prompt as text. cache_salt: share prefix-cache entries only with prompts that have the same salt."""

    prompt: str
    multi_modal_data: Any
    multi_modal_uuids: Any
    mm_processor_kwargs: dict[str, Any] | None
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids. prompt: its text, if known. token_type_ids: for models that pool and have them."""

    prompt_token_ids: list[int]
    prompt: str
    token_type_ids: list[int] | None
    multi_modal_data: Any
    multi_modal_uuids: Any
    mm_processor_kwargs: dict[str, Any] | None
    cache_salt: str


class EmbedsPrompt(TypedDict, total=False):
    """A prompt as embeddings, for an engine with `enable_prompt_embeds`.

    prompt_embeds: float32, bfloat16 or float16 [number of tokens, size of the model's embeddings]: a tensor of
        PyTorch, an array of NumPy, or whatever gives its memory by the buffer protocol or `__array__`.
    """

    prompt_embeds: Any
    cache_salt: str


class DataPrompt(TypedDict):
    """Data in some format. Not supported yet."""

    data: Any
    data_format: str


class ExplicitEncoderDecoderPrompt(TypedDict, total=False):
    """Prompts of an encoder-decoder model. Not supported."""

    encoder_prompt: Any
    decoder_prompt: Any
    mm_processor_kwargs: dict[str, Any]


SingletonPrompt: TypeAlias = str | TextPrompt | TokensPrompt | EmbedsPrompt
ChatTemplateContentFormatOption: TypeAlias = Literal["auto", "string", "openai"]
PromptType: TypeAlias = SingletonPrompt | ExplicitEncoderDecoderPrompt | DataPrompt | list[int]


def text_of(prompt: PromptType) -> str | None:
    """Return the text of a prompt; None if it is given as token ids only."""
    given: Any = prompt
    if isinstance(given, str):
        return given
    return given.get("prompt") if isinstance(given, dict) else None
