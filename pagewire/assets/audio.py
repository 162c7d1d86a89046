"""`AudioAsset`, where programs written for vLLM look for it."""

from pagewire.frontend.media.assets import AudioAsset

__all__ = ["AudioAsset"]
