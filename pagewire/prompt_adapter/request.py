"""`PromptAdapterRequest`, where programs written for vLLM look for it."""

from pagewire.frontend.requests.prompt_adapters import PromptAdapterRequest

__all__ = ["PromptAdapterRequest"]
