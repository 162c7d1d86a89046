"""Pictures and sounds by name, where programs written for vLLM look for them."""
