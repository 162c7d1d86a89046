"""`AsyncLLM`, where programs written for vLLM look for it."""

from pagewire.frontend.api.async_llm import AsyncLLM

__all__ = ["AsyncLLM"]
