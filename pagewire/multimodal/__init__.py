"""Names of media in prompts, where programs written for vLLM look for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, Union

from pagewire.ipc.compatibility import absent_name

if TYPE_CHECKING:
    import torch

MultiModalDataDict: TypeAlias = dict[str, Any]
"""`multi_modal_data`: a picture or sound, or a list of them, by "image" or "audio"."""
NestedTensors: TypeAlias = Union["torch.Tensor", list["torch.Tensor"], list["NestedTensors"]]
"""A tensor, or tensors of several shapes in lists."""
BatchedTensorInputs: TypeAlias = dict[str, NestedTensors]
"""A model's inputs of several media, by name."""


class MultiModalDataBuiltins(TypedDict, total=False):
    """`multi_modal_data` as a type: what pictures and sounds may be, docs/media.md says."""

    image: Any
    audio: Any


__all__ = ["BatchedTensorInputs", "MultiModalDataBuiltins", "MultiModalDataDict", "NestedTensors"]


def __getattr__(name: str) -> Any:
    raise absent_name(__name__, name)
