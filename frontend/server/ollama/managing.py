"""Ollama's calls that manage models: /api/pull and /api/delete; the others are refused with what to do instead."""

from __future__ import annotations

from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagewire.frontend.server.http.api_shapes import api_shape
from pagewire.frontend.server.http.body import ClientLeftError, Decoder, read_request
from pagewire.frontend.server.http.errors import APIError, api_error
from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.http.response import HttpResponse
from pagewire.frontend.server.http.warnings import warn_client
from pagewire.frontend.server.ollama.protocol import DeleteRequest, PullRequest, PullStatus
from pagewire.frontend.server.operate.admin import Endpoint, guard_endpoint
from pagewire.frontend.server.serving.exchange import while_connected
from pagewire.frontend.server.serving.service import Services
from pagewire.frontend.server.shelf.pulled_shelf import PulledShelf
from pagewire.frontend.server.shelf.services import ShelvedServices
from pagewire.ipc.files.hub_names import HubName, hub_name
from pagewire.ipc.files.pull import PullProgress
from pagewire.ipc.quoting import quoted

TO_PULL, TO_DELETE = Decoder(PullRequest), Decoder(DeleteRequest)
ELSEWHERE = {
    ("POST", "/api/push"): "write to the hub with its own program: hf upload",
    ("POST", "/api/create"): "give a model options of its own in a file: pagewire serve --models FILE",
    ("POST", "/api/copy"): "give a model another name in a file: pagewire serve --models FILE",
    ("POST", "/api/blobs/{digest}"): "put files into a folder: pagewire serve --models-dir FOLDER",
}
"""Calls that are refused, and what to do instead."""


def routes(services: Services) -> list[Operation]:
    """Return the routes of these calls."""
    needs = "start the server with --pulled and --enable-admin"
    refused = [
        Operation(method, path, refusing(advice), "Refused: it would manage models.", failures=["400"])
        for (method, path), advice in ELSEWHERE.items()
    ]
    shelf = (
        services.pulled if isinstance(services, ShelvedServices) and services.options.enable_admin else None
    )

    async def pull(request: Request) -> Response:
        fields = await read_request(request, TO_PULL, services.options)
        given = parse_model_name(fields.model or fields.name)
        if fields.insecure:
            warn_client("insecure has no effect: the hub is the one of HF_ENDPOINT")
        assert shelf is not None
        return PullResponse(shelf, given, fields.stream is not False)

    async def delete(request: Request) -> Response:
        fields = await read_request(request, TO_DELETE, services.options)
        assert shelf is not None
        await shelf.delete(parse_model_name(fields.model or fields.name))
        return Response()

    return [
        Operation(
            "POST",
            "/api/pull",
            refusing(needs) if shelf is None else guard_endpoint(pull),
            "Download a model of the hub, and serve it (--pulled, --enable-admin).",
            body=PullRequest,
            result=PullStatus,
            streams=PullStatus,
        ),
        Operation(
            "DELETE",
            "/api/delete",
            refusing(needs) if shelf is None else guard_endpoint(delete),
            "Remove a model that was pulled (--pulled, --enable-admin).",
            body=DeleteRequest,
        ),
        *refused,
    ]


def refusing(advice: str) -> Endpoint:
    """Return an endpoint that refuses its call."""

    async def refuse(request: Request) -> Response:
        raise APIError(400, f"{quoted(request.url.path)} is not served: {advice}")

    return refuse


def parse_model_name(name: str | None) -> HubName:
    """Return the model of the hub that a request names.

    Raises:
        APIError: it names none.
    """
    if name is None:
        raise APIError(400, "model is required", param="model")
    if (given := hub_name(name)) is None:
        message = f"{quoted(name)} is no model of the Hugging Face hub: write hf:owner/repository:Q4_K_M"
        raise APIError(400, message, param="model")
    return given


class PullResponse(Response):
    """The steps of a pull as lines of JSON, or its end. Once the client has left, it follows the pull no more."""

    def __init__(self, shelf: PulledShelf, given: HubName, streams: bool) -> None:
        super().__init__()
        self._shelf, self._given, self._streams = shelf, given, streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        response = HttpResponse(send, api_shape(scope))
        try:
            await while_connected(self._follow(response), receive)
        except ClientLeftError:
            pass
        except Exception as error:
            await response.fail(api_error(error))

    async def _follow(self, response: HttpResponse) -> None:
        async with aclosing(self._shelf.pull(self._given)) as steps:
            async for step in steps:
                if self._streams and not response.streaming:
                    await response.begin_stream({})
                if self._streams:
                    await response.stream(msgspec.json.encode(pull_status(step)) + b"\n")
        if self._streams:
            await response.end()
        else:
            await response.send_json(200, msgspec.json.encode(PullStatus("success")))


def pull_status(step: PullProgress) -> PullStatus:
    """Return a step as Ollama's clients read it."""
    if not step.digest:
        return PullStatus(step.status)
    return PullStatus(step.status, step.digest, step.total, step.completed)
