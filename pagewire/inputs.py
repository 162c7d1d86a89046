"""Types of prompts, where programs written for vLLM look for them."""

from pagewire.frontend.inputs import PromptType, SingletonPrompt, TextPrompt, TokensPrompt

__all__ = ["PromptType", "SingletonPrompt", "TextPrompt", "TokensPrompt"]
