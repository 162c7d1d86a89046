"""`LLM`, where programs written for vLLM look for it."""

from pagewire.frontend.api.llm import LLM

__all__ = ["LLM"]
