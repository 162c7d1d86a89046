"""Prompts of encoder-decoders: what the encoder reads, and how the decoder begins.

A prompt alone is the encoder's, and the decoder begins with its start token. Where the model hears, the sound is
the encoder's and the prompt the decoder's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from pagewire.frontend.text.prompts import PromptType
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.sources import SOUND, SourceInfo, sound_source, text_source, with_source

if TYPE_CHECKING:
    from pagewire.frontend.media.items import Decoded

Tokenize = Callable[[PromptType, bool], tuple[list[int], str | None]]
"""Token ids and text of a prompt; False: without the tokens that a tokenizer puts around texts."""
Hear = Callable[[Mapping[str, Any]], "list[Decoded]"]
"""The sounds of a prompt, fetched and decoded."""
HEARD = ("multi_modal_data", "multi_modal_uuids", "cache_salt", "cache_retention")
ENCODER, DECODER, MEDIA = "encoder_prompt", "decoder_prompt", "multi_modal_data"


class SourceText(msgspec.Struct, frozen=True):
    """The source of an encoder, as outputs show it. text: None if it was given as token ids, or is a sound."""

    token_ids: list[int]
    text: str | None


class SourcedPrompt(msgspec.Struct, frozen=True):
    """A prompt with its source. text: of the decoder's part, if known."""

    prompt: Prompt
    source: SourceText
    text: str | None

    @property
    def num_source_tokens(self) -> int:
        """The tokens before the decoder's own."""
        return self.prompt.media[0].num_tokens


def is_explicit(prompt: Any) -> bool:
    """True for a prompt with parts for the encoder and the decoder."""
    return isinstance(prompt, Mapping) and (ENCODER in prompt or DECODER in prompt)


def make_sourced(
    prompt: Any, info: SourceInfo, block_size: int, tokenize: Tokenize, hear: Hear, salt: str | None
) -> SourcedPrompt:
    """A prompt of an encoder-decoder.

    Raises:
        ValueError, TypeError: a part is missing, too long or of another kind than the model takes.
    """
    encoder, decoder = source_parts(prompt, info)
    ids, text = start_of(decoder, info, tokenize)
    target = Prompt(ids, cache_salt=salt)
    if info.kind == SOUND:
        sound = source_sound(encoder, info, hear)
        source = sound_source(sound.data, info, block_size, sound.excerpt)
        return SourcedPrompt(with_source(source, [], target), SourceText([], None), text)
    if encoder is None:
        raise ValueError(f"the prompt of an encoder-decoder needs an {ENCODER!r}")
    source_ids, source_text = tokenize(encoder, True)
    if len(source_ids) > info.max_tokens:
        raise ValueError(
            f"the encoder's prompt has {len(source_ids)} tokens, and this model's maximum context length for it is "
            f"{info.max_tokens}"
        )
    source = text_source(source_ids, block_size)
    return SourcedPrompt(with_source(source, source_ids, target), SourceText(source_ids, source_text), text)


def source_parts(prompt: Any, info: SourceInfo) -> tuple[Any, Any]:
    """The prompts of the encoder and of the decoder; None: there is none."""
    if is_explicit(prompt):
        unknown = set(prompt) - {ENCODER, DECODER, "mm_processor_kwargs"}
        if unknown or prompt.get("mm_processor_kwargs"):
            raise ValueError(f"a prompt of an encoder-decoder has {ENCODER!r} and {DECODER!r} alone")
        return prompt.get(ENCODER), prompt.get(DECODER)
    if info.kind != SOUND:
        return prompt, None
    if not isinstance(prompt, Mapping):
        return None, prompt
    heard = {name: value for name, value in prompt.items() if name in HEARD}
    return heard, {name: value for name, value in prompt.items() if name not in HEARD}


def start_of(prompt: Any, info: SourceInfo, tokenize: Tokenize) -> tuple[list[int], str | None]:
    """The tokens with which the decoder begins, the first of which is its start token; and their text, if known.

    In the prompt of a model that hears, earlier text may stand before the start token.
    """
    if prompt is None or prompt == "" or prompt == {} or prompt == {"prompt": ""}:
        return list(info.start_ids), None
    ids, text = tokenize(prompt, False)
    begins = info.start_ids[0] in (ids if info.kind == SOUND else ids[:1])
    return ids if begins else [info.start_ids[0], *ids], text


def source_sound(prompt: Any, info: SourceInfo, hear: Hear) -> Decoded:
    """The sound of a prompt at the engine's sampling rate, float32 [samples].

    Raises:
        ValueError: it has none, or several, or it is too long. And as `MediaIntake.contents`.
    """
    if not isinstance(prompt, Mapping) or not prompt.get(MEDIA):
        raise ValueError(f"this model hears: give one sound as {MEDIA}={{'audio': (array, sampling rate)}}")
    if others := {name for name, value in prompt.items() if value and name not in HEARD}:
        raise ValueError(f"the encoder hears, and takes no {', '.join(sorted(map(str, others)))}")
    (sound,) = hear(prompt)
    if not sound.excerpt and (number := sound.data.shape[0]) > info.max_samples:
        seconds = info.max_samples / info.sampling_rate
        raise ValueError(
            f"the sound has {number / info.sampling_rate:.1f} seconds, and this model takes {seconds:g}: cut it, "
            "or use /v1/audio/transcriptions, which does"
        )
    return sound
