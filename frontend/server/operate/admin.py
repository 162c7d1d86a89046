"""Endpoints for operators, which are there if the server was started with `--enable-admin`.

A key needs the right `admin`, as those of `--api-key` have. A server on loopback may be without keys; requests then
need a header that no web page of another origin can send: a browser asks the server first, which does not allow it.

Most are a call of the engine: its arguments are read from the query, by the table in `pagewire.ipc.wire.calls`.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Annotated, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pagewire.frontend.client import AsyncLLM
from pagewire.frontend.server.http.body import Decoder, read_request
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.json_response import json_response
from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.http.query import Query, arguments_of, queries_of
from pagewire.frontend.server.http.tenants import require_admin
from pagewire.frontend.server.openai.models import card
from pagewire.frontend.server.openai.protocol import ModelCard
from pagewire.frontend.server.serving.service import Services, services_of
from pagewire.ipc.errors import EngineDeadError
from pagewire.ipc.wire.budget import MAX_NAME_CHARS
from pagewire.ipc.wire.lora import MAX_PATH_CHARS, AdapterName

Endpoint = Callable[[Request], Awaitable[Response]]


class AbortRequest(msgspec.Struct):
    """POST /abort. request_id: the `id` of one or several answers."""

    request_id: str | list[str]


class AbortResponse(msgspec.Struct):
    """The ids of the requests that were open, on this or another server of the engine, and were ended."""

    aborted: list[str]


class LoadAdapterRequest(msgspec.Struct):
    """POST /v1/load_lora_adapter.

    lora_name: by which clients address it. lora_path: its folder, below `--lora-root`.
    load_inplace: an adapter of this name is replaced; its requests finish with the old one.
    """

    lora_name: AdapterName
    lora_path: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PATH_CHARS)]
    load_inplace: bool = False


class UnloadAdapterRequest(msgspec.Struct):
    """POST /v1/unload_lora_adapter."""

    lora_name: AdapterName


class UpdateWeightsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """POST /update_weights.

    path: a safetensors file, or a folder of some, below the engine's `--weights-dir`.
    version: a name; by default the number of the update.
    requests: those that run finish first with the old weights, are recomputed with the new ones, or are ended.
    """

    path: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PATH_CHARS)]
    version: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)] = ""
    requests: Literal["finish", "recompute", "abort"] = "finish"


class UpdateWeightsResponse(msgspec.Struct):
    """The version of the weights that the model has now."""

    version: str


PROFILER_DIR = "PAGEWIRE_TORCH_PROFILER_DIR"
HEADER, VALUE = "X-Pagewire-Admin", "1"
MODEL = Query("model", str, "a name of the model that is meant; by default the first")
TO_ABORT = Decoder(AbortRequest)
TO_LOAD = Decoder(LoadAdapterRequest)
TO_UNLOAD = Decoder(UnloadAdapterRequest)
TO_UPDATE = Decoder(UpdateWeightsRequest)


def routes(services: Services) -> list[Operation]:
    """The endpoints; none unless `--enable-admin` is given."""
    return operations() if services.options.enable_admin else []


def operations() -> list[Operation]:
    """All endpoints."""
    return [
        operation("POST", "/pause", pause, "Hold new requests back.", "pause"),
        operation("POST", "/resume", resume, "Let requests run again.", "resume"),
        operation("GET", "/is_paused", is_paused, "Whether requests are held back.", "is_paused"),
        operation("POST", "/sleep", sleep, "Give memory back.", "sleep"),
        operation("POST", "/wake_up", wake_up, "Take the memory again.", "wake_up"),
        operation("GET", "/is_sleeping", is_sleeping, "Whether memory was given back.", "is_sleeping"),
        operation(
            "POST", "/reset_prefix_cache", reset_prefix_cache, "Forget cached prefixes.", "reset_prefix_cache"
        ),
        Operation(
            "POST",
            "/update_weights",
            guard_endpoint(update_weights),
            "Let the model have other weights.",
            query=(MODEL,),
            body=UpdateWeightsRequest,
            result=UpdateWeightsResponse,
        ),
        operation("POST", "/start_profile", start_profile, "Record traces of the workers.", "start_profile"),
        operation("POST", "/stop_profile", stop_profile, "Write the traces.", "stop_profile"),
        Operation(
            "POST", "/abort", guard_endpoint(abort), "End requests.", body=AbortRequest, result=AbortResponse
        ),
        Operation(
            "POST",
            "/v1/load_lora_adapter",
            guard_endpoint(load_adapter),
            "Serve one more LoRA adapter as a model.",
            body=LoadAdapterRequest,
            result=ModelCard,
        ),
        Operation(
            "POST",
            "/v1/unload_lora_adapter",
            guard_endpoint(unload_adapter),
            "Serve a LoRA adapter no more; its requests finish.",
            body=UnloadAdapterRequest,
            result=dict[str, bool],
        ),
    ]


def operation(method: str, path: str, endpoint: Endpoint, summary: str, call: str) -> Operation:
    """An endpoint that takes the arguments of a call in its query, and answers a truth value."""
    query = (*queries_of(call), MODEL)
    return Operation(method, path, guard_endpoint(endpoint), summary, query=query, result=dict[str, bool])


def guard_endpoint(endpoint: Endpoint) -> Endpoint:
    """An endpoint for tenants with the right `admin`; where no key is required, the header for operators is."""
    allowed = require_admin(endpoint)

    async def checked(request: Request) -> Response:
        if not services_of(request).options.keyed and request.headers.get(HEADER) != VALUE:
            message = f"send the header {HEADER}: {VALUE}, or start the server with --api-key"
            raise APIError(403, message, code="admin_header_missing")
        return await allowed(request)

    return checked


def engine_of(request: Request) -> AsyncLLM:
    """The engine that the query's `model` names, or the first.

    Raises:
        APIError: there is no such model, or it is not loaded.
    """
    name = request.query_params.get("model")
    service = services_of(request).of(name)
    service.check_known(name)
    return service.engine


async def pause(request: Request) -> Response:
    """POST /pause."""
    paused = await engine_of(request).pause_generation(**arguments_of(request, "pause"))
    return json_response({"paused": paused})


async def resume(request: Request) -> Response:
    """POST /resume."""
    await engine_of(request).resume_generation()
    return json_response({"paused": False})


async def is_paused(request: Request) -> Response:
    """GET /is_paused."""
    return json_response({"is_paused": await engine_of(request).is_paused()})


async def sleep(request: Request) -> Response:
    """POST /sleep."""
    await engine_of(request).sleep(**arguments_of(request, "sleep"))
    return json_response({"is_sleeping": True})


async def wake_up(request: Request) -> Response:
    """POST /wake_up."""
    await engine_of(request).wake_up(**arguments_of(request, "wake_up"))
    return await is_sleeping(request)


async def is_sleeping(request: Request) -> Response:
    """GET /is_sleeping."""
    return json_response({"is_sleeping": await engine_of(request).is_sleeping()})


async def reset_prefix_cache(request: Request) -> Response:
    """POST /reset_prefix_cache."""
    engine = engine_of(request)
    return json_response(
        {"reset": await engine.reset_prefix_cache(**arguments_of(request, "reset_prefix_cache"))}
    )


async def update_weights(request: Request) -> Response:
    """POST /update_weights."""
    engine = engine_of(request)
    fields = await read_request(request, TO_UPDATE, services_of(request).options)
    version = await engine.update_weights(fields.path, fields.version, fields.requests)
    return json_response(UpdateWeightsResponse(version))


async def start_profile(request: Request) -> Response:
    """POST /start_profile.

    Raises:
        APIError: the operator has named no folder for traces.
    """
    if not os.environ.get(PROFILER_DIR):
        where = f"set {PROFILER_DIR}, a folder for traces, where server and engine start"
        message = f"profiling is off by default: {where}"
        raise APIError(400, message, code="profiling_off")
    await await_profilers(engine_of(request).start_profile())
    return json_response({"profiling": True})


async def stop_profile(request: Request) -> Response:
    """POST /stop_profile."""
    await await_profilers(engine_of(request).stop_profile())
    return json_response({"profiling": False})


async def await_profilers(call: Awaitable[None]) -> None:
    """Wait for the workers' profilers.

    Raises:
        APIError: they run already, or do not run.
    """
    try:
        await call
    except EngineDeadError:
        raise
    except RuntimeError as error:
        raise APIError(400, str(error), code="profiler_state") from error


async def abort(request: Request) -> Response:
    """POST /abort."""
    services = services_of(request)
    ids = (await read_request(request, TO_ABORT, services.options)).request_id
    names = [ids] if isinstance(ids, str) else ids
    aborted = [name for name in names if services.abort(name) or await abort_any(services, name)]
    return json_response(AbortResponse(aborted))


async def abort_any(services: Services, name: str) -> bool:
    """End a request of another server on one of the engines; False if there is none."""
    for served in services.all:
        if await served.engine.abort_any(name):
            return True
    return False


async def load_adapter(request: Request) -> Response:
    """POST /v1/load_lora_adapter."""
    service = services_of(request).of(None)
    fields = await read_request(request, TO_LOAD, service.options)
    await service.adapters.load(fields.lora_name, fields.lora_path, fields.load_inplace)
    return json_response(card(service, fields.lora_name))


async def unload_adapter(request: Request) -> Response:
    """POST /v1/unload_lora_adapter."""
    service = services_of(request).of(None)
    await service.adapters.unload((await read_request(request, TO_UNLOAD, service.options)).lora_name)
    return json_response({"unloaded": True})
