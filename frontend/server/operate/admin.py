"""What an operator may do, if the server was started with `--enable-admin`."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pagewire.frontend.server.http.body import Decoder, read_request
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.json_response import json_response
from pagewire.frontend.server.http.openapi import Operation, Query
from pagewire.frontend.server.service import Service

TRUE, FALSE = ("true", "1", "yes"), ("false", "0", "no")


class AbortRequest(msgspec.Struct):
    """POST /abort. request_id: the `id` of one or several answers."""

    request_id: str | list[str]


class AbortResponse(msgspec.Struct):
    """Which of them were open, on this or another server of the engine, and are so no longer."""

    aborted: list[str]


TO_ABORT = Decoder(AbortRequest)


def routes(service: Service) -> list[Operation]:
    """The endpoints; none, unless they are enabled."""
    if not service.options.enable_admin:
        return []
    engine = service.engine

    async def pause(request: Request) -> Response:
        wait = flag(request, "wait_for_inflight_requests", False)
        await engine.pause_generation(wait, flag(request, "clear_cache", True))
        return json_response({"paused": True})

    async def resume(request: Request) -> Response:
        await engine.resume_generation()
        return json_response({"paused": False})

    async def is_paused(request: Request) -> Response:
        return json_response({"is_paused": await engine.is_paused()})

    async def sleep(request: Request) -> Response:
        level = request.query_params.get("level", "1")
        if level not in ("1", "2"):
            raise APIError(400, f"level must be 1 or 2, got {level!r}", param="level")
        await engine.sleep(int(level))
        return json_response({"is_sleeping": True})

    async def wake_up(request: Request) -> Response:
        await engine.wake_up(request.query_params.getlist("tags") or None)
        return json_response({"is_sleeping": await engine.is_sleeping()})

    async def is_sleeping(request: Request) -> Response:
        return json_response({"is_sleeping": await engine.is_sleeping()})

    async def reset_prefix_cache(request: Request) -> Response:
        done = await engine.reset_prefix_cache(flag(request, "reset_running_requests", False))
        return json_response({"reset": done})

    async def abort(request: Request) -> Response:
        asked = (await read_request(request, TO_ABORT, service.options)).request_id
        names = [asked] if isinstance(asked, str) else asked
        aborted = [name for name in names if service.abort(name) or await engine.abort_any(name)]
        return json_response(AbortResponse(aborted))

    answer = dict[str, bool]
    clear = Query("clear_cache", "boolean", "forget cached prefixes as well (default: true)")
    wait = Query("wait_for_inflight_requests", "boolean", "wait for those that run; else they are aborted")
    reset = Query("reset_running_requests", "boolean", "recompute those that use them")
    level = Query("level", "integer", "1: give the KV cache back; 2: the weights as well")
    tags = Query("tags", "string", "what to take again: weights, kv_cache (default: all)")
    return [
        Operation("POST", "/pause", pause, "Hold new requests back.", query=(wait, clear), result=answer),
        Operation("POST", "/resume", resume, "Let requests run again.", result=answer),
        Operation("GET", "/is_paused", is_paused, "Whether requests are held back.", result=answer),
        Operation("POST", "/sleep", sleep, "Give memory back.", query=(level,), result=answer),
        Operation("POST", "/wake_up", wake_up, "Take the memory again.", query=(tags,), result=answer),
        Operation("GET", "/is_sleeping", is_sleeping, "Whether memory was given back.", result=answer),
        Operation(
            "POST",
            "/reset_prefix_cache",
            reset_prefix_cache,
            "Forget cached prefixes.",
            query=(reset,),
            result=answer,
        ),
        Operation("POST", "/abort", abort, "End requests.", body=AbortRequest, result=AbortResponse),
    ]


def flag(request: Request, name: str, default: bool) -> bool:
    """A truth value in the query.

    Raises:
        APIError: it is none.
    """
    text = request.query_params.get(name, str(default)).lower()
    if text not in TRUE + FALSE:
        raise APIError(400, f"{name} must be true or false, got {text!r}", param=name)
    return text in TRUE
