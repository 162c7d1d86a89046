"""Prompts that are embeddings: conversion of tensors of other libraries, without importing any, and checks.

A tensor of PyTorch or JAX, a NumPy array, or whatever gives its memory by the buffer protocol or `__array__`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from pagewire.frontend.text.length import ContextLengthError
from pagewire.ipc.errors import FieldValueError
from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.embeddings import check_embeddings
from pagewire.ipc.wire.messages import EngineInfo

EMBEDS_KEY = "prompt_embeds"
FORMATS = {"f": "float32", "e": "float16", "d": "float64"}  # dtypes by the buffer protocol's formats
NO_TOKENS = "a prompt of embeddings has no tokens"


def embeddings_of(prompt: Any, info: EngineInfo) -> Tensor | None:
    """The embeddings [T, E] of a prompt, checked and copied; None if it is no prompt of embeddings.

    Raises:
        ValueError: the engine does not take them, they do not fit its model, or the prompt has tokens, too.
        ContextLengthError: they are more than the model's context length.
        TypeError: they are no tensor.
    """
    value = prompt.get(EMBEDS_KEY) if isinstance(prompt, Mapping) else None
    if value is None:
        return None
    if not info.embeddings.prompts:
        raise FieldValueError(
            EMBEDS_KEY,
            ": this engine takes no embeddings as a prompt: start it with enable_prompt_embeds=True "
            "(--enable-prompt-embeds)",
        )
    for name in ("prompt", "prompt_token_ids"):
        if prompt.get(name) is not None:
            raise ValueError(f"give {EMBEDS_KEY} or {name}, not both: they are two prompts")
    embeddings = as_tensor(value)
    if len(embeddings.shape) == 3 and embeddings.shape[0] == 1:  # a batch of one prompt
        embeddings = Tensor(embeddings.dtype, embeddings.shape[1:], embeddings.data)
    check_embeddings(EMBEDS_KEY, embeddings, info.embeddings.size)
    if (num_tokens := embeddings.shape[0]) > info.max_model_len:
        raise ContextLengthError(info.max_model_len, f"the prompt has {num_tokens} embeddings")
    return embeddings


def check_embeds_params(prompt_logprobs: int | None, truncate_prompt_tokens: int | None) -> None:
    """Refuse parameters that are about the tokens of a prompt; raises ValueError."""
    given = {"prompt_logprobs": prompt_logprobs, "truncate_prompt_tokens": truncate_prompt_tokens}
    for name, value in given.items():
        if value is not None:
            raise FieldValueError(name, f"does not go with {EMBEDS_KEY}: {NO_TOKENS}")


def as_tensor(value: Any) -> Tensor:
    """A copy of a tensor of any library, in memory of its own.

    Raises:
        TypeError: it is no tensor of numbers.
    """
    if isinstance(value, Tensor):
        return value
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_torch(torch, value)
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError):  # no memory, or a dtype without a format, such as bfloat16
        view = _of_array(value)
    return _of_view(view, str(getattr(value, "dtype", "")))


def _of_torch(torch: Any, value: Any) -> Tensor:
    name = str(value.dtype).removeprefix("torch.")
    if name not in (*FORMATS.values(), "bfloat16") or value.layout is not torch.strided:
        raise _no_tensor(f"a tensor of {name}")
    value = value.detach().cpu().contiguous()
    data = value.reshape(-1).view(torch.uint8).numpy().tobytes()
    return Tensor(name, tuple(value.shape), data)


def _of_array(value: Any) -> memoryview:
    """The memory of what has `__array__`."""
    if not hasattr(value, "__array__"):
        raise _no_tensor(type(value).__name__)
    array = value.__array__()
    if str(array.dtype) == "bfloat16":
        array = array.view("uint16")
    return memoryview(array)


def _of_view(view: memoryview, dtype: str) -> Tensor:
    name = dtype if dtype == "bfloat16" else FORMATS.get(view.format.lstrip("@=<"))
    if name is None or (sys.byteorder == "big" and view.itemsize > 1):
        raise _no_tensor(f"an array of {view.format}")
    return Tensor(name, view.shape or (), view.tobytes())


def _no_tensor(got: str) -> TypeError:
    return TypeError(
        f"{EMBEDS_KEY} must be a tensor or array of float32, bfloat16 or float16 [number of tokens, size of an "
        f"embedding], got {quoted(got)}"
    )
