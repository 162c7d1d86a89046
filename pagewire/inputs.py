"""Types of prompts, where programs written for vLLM look for them."""

from typing import Any

from pagewire import _absent
from pagewire.frontend.text.prompts import (
    DataPrompt,
    EmbedsPrompt,
    ExplicitEncoderDecoderPrompt,
    PromptType,
    SingletonPrompt,
    TextPrompt,
    TokensPrompt,
    zip_enc_dec_prompts,
)

__all__ = [
    "DataPrompt",
    "EmbedsPrompt",
    "ExplicitEncoderDecoderPrompt",
    "PromptType",
    "SingletonPrompt",
    "TextPrompt",
    "TokensPrompt",
    "zip_enc_dec_prompts",
]


def __getattr__(name: str) -> Any:
    raise _absent(__name__, name, 2)
