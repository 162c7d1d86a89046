"""The field `prompt_embeds`: prompts that are embeddings, in safetensors files, in base64."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from pagewire.frontend.client import off_loop, read_tensors
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.openai.protocol import CompletionRequest
from pagewire.frontend.server.serving.service import Service
from pagewire.ipc.wire.budget import MAX_PROMPTS
from pagewire.ipc.wire.codec import Tensor

KEY = "prompt_embeds"  # of a request, and of a prompt


async def embeds_in(service: Service, request: CompletionRequest) -> list[Any]:
    """Return the prompts of the field, in order; none if it is not given.

    Raises:
        APIError: this server takes none, they cannot be read, or another field is about the tokens of a prompt.
    """
    given = request.prompt_embeds
    if given is None:
        return []
    texts = [given] if isinstance(given, str) else given
    if not service.info.embeddings.prompts:
        raise _wrong(
            "this server takes no embeddings as a prompt: it must be started with --enable-prompt-embeds"
        )
    if not texts:
        raise _wrong(f"there must be 1 to {MAX_PROMPTS} prompts, got 0")
    if request.echo:
        raise APIError(400, f"echo does not go with {KEY}: embeddings have no text", param="echo")
    if request.use_beam_search:
        message = f"use_beam_search does not go with {KEY}, which have no tokens: sample with best_of instead"
        raise APIError(400, message, param="use_beam_search")
    tensors = await off_loop(sum(map(len, texts)), lambda: [decode_tensor(text) for text in texts])
    return [{KEY: tensor} for tensor in tensors]


def decode_tensor(text: str) -> Tensor:
    """Return the tensor of a safetensors file in base64.

    Raises:
        APIError: it is none, or it has not one tensor.
    """
    try:
        tensors = read_tensors(KEY, base64.b64decode(text, validate=True))
    except binascii.Error as error:
        raise _wrong(f"{KEY} is not base64: {error}") from None
    except ValueError as error:
        raise _wrong(str(error)) from None
    if len(tensors) != 1:
        raise _wrong(f"{KEY}: the safetensors file must have one tensor, but it has {len(tensors)}")
    (tensor,) = tensors.values()
    return tensor


def _wrong(message: str) -> APIError:
    return APIError(400, message, param=KEY)
