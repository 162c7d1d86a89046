"""Names of media in prompts, where programs written for vLLM look for them."""

from __future__ import annotations

from typing import Any, TypeAlias

from pagewire import _absent

MultiModalDataDict: TypeAlias = dict[str, Any]
"""`multi_modal_data`: a picture or sound, or a list of them, by "image" or "audio"."""

__all__ = ["MultiModalDataDict"]


def __getattr__(name: str) -> Any:
    raise _absent(__name__, name, 2)
