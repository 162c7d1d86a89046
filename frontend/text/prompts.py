"""The forms in which a prompt may be given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias, TypedDict

import msgspec

from pagewire.ipc.wire.items import Retention


class TextPrompt(TypedDict, total=False):
    """A prompt as text.

    cache_salt: share prefix-cache entries only with prompts that have the same salt.
    cache_retention: how long its prefix is to stay cached, whatever others need.
    """

    prompt: str
    multi_modal_data: Any
    multi_modal_uuids: Any
    mm_processor_kwargs: dict[str, Any] | None
    cache_salt: str
    cache_retention: Retention | list[Retention]


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids. prompt: its text, if known. token_type_ids: for models that pool and have them."""

    prompt_token_ids: list[int]
    prompt: str
    token_type_ids: list[int] | None
    multi_modal_data: Any
    multi_modal_uuids: Any
    mm_processor_kwargs: dict[str, Any] | None
    cache_salt: str
    cache_retention: Retention | list[Retention]


class EmbedsPrompt(TypedDict, total=False):
    """A prompt as embeddings, for an engine with `enable_prompt_embeds`.

    prompt_embeds: float32, bfloat16 or float16 [number of tokens, size of the model's embeddings]: a tensor of
        PyTorch, an array of NumPy, or whatever gives its memory by the buffer protocol or `__array__`.
    """

    prompt_embeds: Any
    cache_salt: str
    cache_retention: Retention | list[Retention]


class TextPair(msgspec.Struct, frozen=True):
    """Two texts that a cross-encoder scores together."""

    first: str
    second: str
    cache_salt: str | None = None


class DataPrompt(TypedDict):
    """Data in some format. A prompt of this form is refused, with what to give instead."""

    data: Any
    data_format: str


class ExplicitEncoderDecoderPrompt(TypedDict, total=False):
    """The prompts of an encoder-decoder model.

    encoder_prompt: a text, a `TextPrompt` or a `TokensPrompt`; of a model that hears, with `multi_modal_data`.
    decoder_prompt: how the answer begins, likewise; None: with the model's start token alone.
    """

    encoder_prompt: Any
    decoder_prompt: Any
    mm_processor_kwargs: dict[str, Any]


def zip_enc_dec_prompts(
    encoder_prompts: Iterable[Any],
    decoder_prompts: Iterable[Any],
    mm_processor_kwargs: Iterable[dict[str, Any]] | None = None,
) -> list[ExplicitEncoderDecoderPrompt]:
    """The prompts of an encoder-decoder model, given the parts of each.

    Raises:
        ValueError: the parts are not as many.
    """
    pairs = zip(encoder_prompts, decoder_prompts, strict=True)
    prompts = [ExplicitEncoderDecoderPrompt(encoder_prompt=e, decoder_prompt=d) for e, d in pairs]
    if mm_processor_kwargs is not None:
        for prompt, arguments in zip(prompts, mm_processor_kwargs, strict=True):
            prompt["mm_processor_kwargs"] = arguments
    return prompts


SingletonPrompt: TypeAlias = str | TextPrompt | TokensPrompt | EmbedsPrompt
ChatTemplateContentFormatOption: TypeAlias = Literal["auto", "string", "openai"]
PromptType: TypeAlias = SingletonPrompt | ExplicitEncoderDecoderPrompt | DataPrompt | list[int]


def text_of(prompt: PromptType) -> str | None:
    """Return the text of a prompt; None if it is given as token ids only."""
    given: Any = prompt
    if isinstance(given, str):
        return given
    return given.get("prompt") if isinstance(given, dict) else None
