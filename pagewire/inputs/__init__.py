"""Types of prompts, where programs written for vLLM look for them."""

from typing import Any

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
from pagewire.ipc.compatibility import absent_name

PromptInputs = PromptType

__all__ = [
    "DataPrompt",
    "EmbedsPrompt",
    "ExplicitEncoderDecoderPrompt",
    "PromptInputs",
    "PromptType",
    "SingletonPrompt",
    "TextPrompt",
    "TokensPrompt",
    "zip_enc_dec_prompts",
]


def __getattr__(name: str) -> Any:
    raise absent_name(__name__, name)
