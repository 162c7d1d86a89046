"""`LoRARequest`, where programs written for vLLM look for it."""

from pagewire.frontend.requests.lora import LoRARequest

__all__ = ["LoRARequest"]
