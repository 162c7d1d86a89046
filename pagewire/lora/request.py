"""`LoRARequest`, where programs written for vLLM look for it."""

from pagewire.frontend.lora import LoRARequest

__all__ = ["LoRARequest"]
