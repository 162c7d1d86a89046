"""Parameters of pooling, where programs written for vLLM look for them."""

from pagewire.ipc.wire.pooling import PoolingParams

__all__ = ["PoolingParams"]
