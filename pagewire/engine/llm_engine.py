"""`LLMEngine`, where programs written for vLLM look for it."""

from pagewire.frontend.api.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
