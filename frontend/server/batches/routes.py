"""The endpoints /v1/files and /v1/batches, of a server with a folder for them (--batch-dir)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from pagewire.frontend.server.batches.folder import BatchFolder
from pagewire.frontend.server.batches.protocol import (
    REFUSED,
    BatchList,
    BatchObject,
    BatchRequest,
    DeletedFile,
    FileList,
    FileObject,
    FileUpload,
)
from pagewire.frontend.server.batches.runner import BatchRunner, check_input_file
from pagewire.frontend.server.http.body import LARGE_BODIES, Decoder, IncomingBodies, read_request
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.form import MEDIA_TYPE, FormDecoder
from pagewire.frontend.server.http.json_response import json_response
from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.http.query import ORDER, Query, newest_first, read_number
from pagewire.frontend.server.http.tenants import tenant_of
from pagewire.frontend.server.serving.service import Services
from pagewire.ipc.quoting import quoted

FILES, BATCHES = "/v1/files", "/v1/batches"
PATHS = (FILES, BATCHES)
WINDOW_SECONDS = 24 * 3600
MAX_RUNNING = 100  # batches of a tenant that wait or run
LIMIT = Query("limit", Annotated[int, msgspec.Meta(ge=1, le=10_000)], "how many, at most (default: 20)")
AFTER = Query("after", str, "those after the one with this id")
PURPOSE = Query("purpose", str, "only files with this purpose")
BATCH_REQUEST = Decoder(BatchRequest)


class HasId(Protocol):
    """An object that can be listed."""

    id: str


Listed = TypeVar("Listed", bound=HasId)


def routes(services: Services) -> list[Operation]:
    """Return the routes of the endpoints; none without a folder."""
    options = services.options
    if options.batch_dir is None:
        return []
    endpoints = BatchEndpoints(services, BatchFolder(Path(options.batch_dir), options.batch_dir_bytes))
    file, batch = FILES + "/{file_id}", BATCHES + "/{batch_id}"
    listed = (LIMIT, AFTER)
    rows: list[tuple[str, str, Any, str, dict[str, Any]]] = [
        (
            "POST",
            FILES,
            endpoints.upload,
            "Keep a file for batches.",
            {"body": FileUpload, "result": FileObject},
        ),
        (
            "GET",
            FILES,
            endpoints.list_files,
            "List files.",
            {"query": (*listed, PURPOSE, ORDER), "result": FileList},
        ),
        ("GET", file, endpoints.show_file, "Describe a file.", {"result": FileObject}),
        ("DELETE", file, endpoints.delete_file, "Delete a file.", {"result": DeletedFile}),
        ("GET", file + "/content", endpoints.content, "Get a file.", {"media": "application/jsonl"}),
        ("POST", BATCHES, endpoints.create, "Run a batch.", {"body": BatchRequest, "result": BatchObject}),
        ("GET", BATCHES, endpoints.list_batches, "List batches.", {"query": listed, "result": BatchList}),
        ("GET", batch, endpoints.show, "Describe a batch.", {"result": BatchObject}),
        ("POST", batch + "/cancel", endpoints.cancel, "End a batch.", {"result": BatchObject}),
    ]
    operations = [Operation(method, path, run, text, **more) for method, path, run, text, more in rows]
    operations[0].body_media = MEDIA_TYPE
    return operations


class BatchEndpoints:
    """The endpoints of one server. Each sees what the tenant of its request has, and nothing of others."""

    def __init__(self, services: Services, folder: BatchFolder) -> None:
        self._options, self._folder, self._runner = services.options, folder, BatchRunner(folder)
        uploads = IncomingBodies(LARGE_BODIES * services.options.max_upload_bytes)
        self._form = FormDecoder(FileUpload, REFUSED, uploads)

    async def upload(self, request: Request) -> Response:
        """POST /v1/files."""
        form = await self._form.read(request.scope, request.receive, self._options)
        if form.purpose != "batch":
            message = f"purpose must be batch, as files are for batches here, got {quoted(form.purpose)}"
            raise APIError(400, message, param="purpose")
        if not isinstance(form.file, bytes):
            raise APIError(400, "file must be a file", param="file")
        name = getattr(form.file, "filename", "") or "input.jsonl"
        try:
            file = await self._folder.add_file(tenant_of(request.scope).name, name, form.file)
        except OSError as error:
            raise APIError(503, f"the file cannot be kept: {error.strerror}", code="storage_full") from error
        return json_response(file)

    async def list_files(self, request: Request) -> Response:
        """GET /v1/files."""
        purpose = request.query_params.get("purpose")
        files = self._folder.files(tenant_of(request.scope).name)
        found = [file for file in files if purpose in (None, file.purpose)]
        page, more = page_of(request, found if newest_first(request) else found[::-1])
        return json_response(
            FileList(data=page, has_more=more, first_id=first_of(page), last_id=first_of(page[::-1]))
        )

    async def show_file(self, request: Request) -> Response:
        """GET /v1/files/{file_id}."""
        return json_response(self._file(request))

    async def delete_file(self, request: Request) -> Response:
        """DELETE /v1/files/{file_id}."""
        name = request.path_params["file_id"]
        self._folder.delete_file(tenant_of(request.scope).name, name)
        return json_response(DeletedFile(name))

    async def content(self, request: Request) -> Response:
        """GET /v1/files/{file_id}/content."""
        path = self._folder.path(self._file(request).id)
        return FileResponse(path, media_type="application/jsonl")

    async def create(self, request: Request) -> Response:
        """POST /v1/batches."""
        fields = await read_request(request, BATCH_REQUEST, self._options)
        fields.check()
        tenant, now = tenant_of(request.scope), int(time.time())
        check_input_file(self._folder, tenant.name, fields.input_file_id)
        self._folder.check_room(tenant.name, 0)
        if sum(batch.running for batch in self._folder.batches(tenant.name)) >= MAX_RUNNING:
            raise APIError(429, f"{MAX_RUNNING} of your batches wait or run", code="rate_limit_exceeded")
        batch = BatchObject(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=fields.endpoint,
            input_file_id=fields.input_file_id,
            completion_window=fields.completion_window,
            created_at=now,
            expires_at=now + WINDOW_SECONDS,
            metadata=fields.metadata,
        )
        self._folder.put_batch(tenant.name, batch)
        self._runner.start(request.app, tenant, batch)
        return json_response(batch)

    async def list_batches(self, request: Request) -> Response:
        """GET /v1/batches."""
        page, more = page_of(request, self._folder.batches(tenant_of(request.scope).name))
        return json_response(
            BatchList(data=page, has_more=more, first_id=first_of(page), last_id=first_of(page[::-1]))
        )

    async def show(self, request: Request) -> Response:
        """GET /v1/batches/{batch_id}."""
        return json_response(self._batch(request))

    async def cancel(self, request: Request) -> Response:
        """POST /v1/batches/{batch_id}/cancel."""
        batch = self._batch(request)
        if not batch.running:
            raise APIError(409, f"the batch is {batch.status}", code="not_running")
        self._runner.cancel(tenant_of(request.scope).name, batch)
        return json_response(batch)

    def _file(self, request: Request) -> FileObject:
        return self._folder.file(tenant_of(request.scope).name, request.path_params["file_id"])

    def _batch(self, request: Request) -> BatchObject:
        return self._folder.batch(tenant_of(request.scope).name, request.path_params["batch_id"])


def page_of(request: Request, listed: Sequence[Listed]) -> tuple[list[Listed], bool]:
    """Return the part of a list that a request asks for, and whether there is more.

    Raises:
        APIError: there is nothing with the id in `after`, or `limit` is no number in its bounds.
    """
    start, after = 0, request.query_params.get("after")
    if after is not None:
        place = next((index for index, item in enumerate(listed) if item.id == after), None)
        if place is None:
            raise APIError(404, f"there is no {quoted(after)}", param="after", code="not_found")
        start = place + 1
    end = start + read_number(request, LIMIT, 20)
    return list(listed[start:end]), end < len(listed)


def first_of(page: Sequence[HasId]) -> str | None:
    """The id of the first of a page; None for an empty one."""
    return page[0].id if page else None
