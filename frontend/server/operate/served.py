"""The endpoint /page/models: what the page at `/` shows of the served models, and what it offers for each."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pagewire.frontend.server.http.json_response import json_response
from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.serving.service import ModelEntry, Service, Services
from pagewire.ipc.wire.model_figures import ModelFigures

# The parameters that the page has a field for.
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")


class ServedModel(msgspec.Struct, kw_only=True):
    """A name of a served model, or an adapter.

    parent: of an adapter, the model's name. root: folder or id of the model.
    tasks: how it pools ("embed", "classify", ...); empty: it generates. takes: kinds of media: "image", "audio".
    tools, reasoning: its calls and thoughts are told apart from its text. chats: it has a chat template.
    defaults: sampling parameters that the page sends where a person gives none.
    max_logprobs: most alternatives of a token; -1: any number.
    max_model_len: tokens of prompt and output; null: the model is loaded at the first request for it, and the
    other properties are not known either: it is taken for one that chats.
    max_num_seqs, max_num_batched_tokens: of a step.
    num_blocks: of the KV cache, each for `block_size` tokens. ranks: worker processes that run it together.
    figures: sizes of its weights, in bytes; null: unknown.
    """

    name: str
    root: str
    parent: str | None
    architecture: str
    device: str
    dtype: str
    tasks: list[str]
    takes: list[str]
    tools: bool
    reasoning: bool
    chats: bool
    defaults: dict[str, Any]
    max_logprobs: int
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    ranks: int
    figures: ModelFigures | None


def routes(services: Services) -> list[Operation]:
    """Return the route of the endpoint."""

    async def models(request: Request) -> Response:
        models = [describe_served(own, name) for own in services.all for name in own.all_names]
        loaded = {model.name for model in models}
        models += [not_loaded(entry) for entry in services.entries if entry.name not in loaded]
        return json_response(models)

    return [
        Operation(
            "GET",
            "/page/models",
            models,
            "What the page shows of the served models.",
            result=list[ServedModel],
        )
    ]


def not_loaded(entry: ModelEntry) -> ServedModel:
    """Return the description of a model that is not loaded."""
    return ServedModel(
        name=entry.name,
        root=entry.model,
        parent=None,
        architecture="known once the model is loaded",
        device="",
        dtype="",
        tasks=[],
        takes=[],
        tools=False,
        reasoning=False,
        chats=True,
        defaults={},
        max_logprobs=0,
        max_model_len=None,
        max_num_seqs=0,
        max_num_batched_tokens=0,
        block_size=0,
        num_blocks=0,
        ranks=1,
        figures=None,
    )


def describe_served(service: Service, name: str) -> ServedModel:
    """Return the description of a model under one of its names, or of an adapter."""
    info = service.info
    return ServedModel(
        name=name,
        root=info.model,
        parent=None if name in service.names else service.names[0],
        architecture=info.architecture,
        device=info.device,
        dtype=info.dtype,
        tasks=[] if info.pooling is None else info.pooling.tasks,
        takes=[] if info.media is None else sorted(info.media.kinds),
        tools=service.formats.auto,
        reasoning=service.formats.reasoning is not None,
        chats=service.has_template,
        defaults={field: getattr(service.local, field) for field in SAMPLING},
        max_logprobs=info.max_logprobs,
        max_model_len=info.max_model_len,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        ranks=info.tensor_parallel_size * info.pipeline_parallel_size,
        figures=info.figures,
    )
