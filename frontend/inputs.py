"""Prompts and parameters at the door: checked, tokenized, and made into requests for the core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict

from pagewire.frontend.tokenizer import Tokenizer
from pagewire.ipc.messages import EngineInfo, SubmitRequest
from pagewire.ipc.params import SamplingParams


class TextPrompt(TypedDict, total=False):
    """A prompt as text."""

    prompt: str
    multi_modal_data: Any
    mm_processor_kwargs: dict[str, Any] | None
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids; `prompt` is its text, if it is known."""

    prompt_token_ids: list[int]
    prompt: str
    multi_modal_data: Any
    mm_processor_kwargs: dict[str, Any] | None
    cache_salt: str


class EmbedsPrompt(TypedDict, total=False):
    """A prompt as embeddings. Not supported yet."""

    prompt_embeds: Any
    cache_salt: str


class DataPrompt(TypedDict):
    """Data of some format for pooling models. Not supported yet."""

    data: Any
    data_format: str


class ExplicitEncoderDecoderPrompt(TypedDict, total=False):
    """Prompts of an encoder-decoder model. Not supported."""

    encoder_prompt: Any
    decoder_prompt: Any
    mm_processor_kwargs: dict[str, Any]


SingletonPrompt: TypeAlias = str | TextPrompt | TokensPrompt | EmbedsPrompt
PromptType: TypeAlias = SingletonPrompt | ExplicitEncoderDecoderPrompt | list[int]


@dataclass(frozen=True)
class Prepared:
    """A request as it goes to the core, and the text of its prompt, if that is known."""

    request: SubmitRequest
    prompt_text: str | None


class Intake:
    """Makes prompts and parameters into requests, or refuses them.

    salt: sets this frontend's stream of seeds apart from others'; with the same engine seed and salt, the same
        sequence of requests gets the same seeds.
    """

    def __init__(self, info: EngineInfo, tokenizer: Tokenizer | None, salt: int = 0) -> None:
        self.info, self.tokenizer = info, tokenizer

    def prepare(
        self,
        prompt: PromptType,
        params: SamplingParams | None,
        request_id: str,
        key: int,
        priority: int = 0,
    ) -> Prepared:
        """Check one prompt and its parameters (None: the default ones), and make the request.

        Raises:
            ValueError, TypeError: what is wrong with it.
        """
        raise NotImplementedError

    def prompt_token_ids(self, prompt: PromptType) -> list[int]:
        """The token ids of one prompt, checked but not truncated.

        Raises:
            ValueError, TypeError: what is wrong with it.
        """
        raise NotImplementedError


def prompts_of(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
    """One prompt or many, as a list: a str, a list of ints and a dict are one.

    Raises:
        TypeError: neither.
    """
    raise NotImplementedError


def params_for(
    params: SamplingParams | Sequence[SamplingParams] | None, n: int, default: SamplingParams
) -> list[SamplingParams]:
    """One per prompt: the same for all, or as many as there are prompts.

    Raises:
        ValueError: another number of parameters than of prompts. TypeError: not parameters.
    """
    raise NotImplementedError


def default_sampling_params(info: EngineInfo) -> SamplingParams:
    """The model's own defaults, out of its generation config."""
    raise NotImplementedError


def is_tokens_prompt(prompt: Any) -> bool:
    """True for a dict with `prompt_token_ids`."""
    return isinstance(prompt, dict) and "prompt_token_ids" in prompt and "prompt_embeds" not in prompt


def is_embeds_prompt(prompt: Any) -> bool:
    """True for a dict with `prompt_embeds`."""
    return isinstance(prompt, dict) and "prompt_embeds" in prompt and "prompt_token_ids" not in prompt
