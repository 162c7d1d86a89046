"""`ImageAsset`, where programs written for vLLM look for it."""

from pagewire.frontend.media.assets import ImageAsset

__all__ = ["ImageAsset"]
