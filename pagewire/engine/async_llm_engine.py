"""`AsyncLLMEngine`, where programs written for vLLM look for it."""

from pagewire.frontend.api.async_llm import AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
