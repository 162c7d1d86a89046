"""Request bodies that are forms (multipart/form-data): read within limits, and converted to structs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

import msgspec
from msgspec import Meta
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from pagewire.frontend.server.http.body import IncomingBodies, receive_within, shorten_names
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.frontend.server.http.warnings import warn_client
from pagewire.ipc.quoting import quoted

T = TypeVar("T")

MEDIA_TYPE = "multipart/form-data"
MAX_PARTS = 64
MAX_FIELD_BYTES = 64 << 10  # of a field that is no file
MAX_CONTENT_TYPE = 512  # characters of the header
MAX_BOUNDARY = 70  # characters (RFC 2046)

FormFile: TypeAlias = Annotated[Any, Meta(extra_json_schema={"type": "string", "format": "binary"})]
"""An uploaded file, as bytes. JSON schemas would say of the type `bytes` that it is in base64."""


class FilePart(bytes):
    """The bytes of a part that is a file, with the name that its sender gave it."""

    filename: str


class FormDecoder(Generic[T]):
    """Reads forms into one struct type. Fields of the type `FormFile` are files; those that end in [] are lists.

    refused: reasons by the names of fields that are not served. Other unknown fields are ignored, and named in a
        warning. bodies: counts the forms that arrive.

    Attributes:
        fields: names of the struct's fields.
    """

    def __init__(self, kind: type[T], refused: Mapping[str, str], bodies: IncomingBodies) -> None:
        self._kind, self._refused, self._bodies = kind, refused, bodies
        fields = msgspec.structs.fields(kind)  # type: ignore[arg-type]
        self.fields: tuple[str, ...] = tuple(field.encode_name for field in fields)
        self._files = {field.encode_name for field in fields if field.type == FormFile}

    async def read(self, scope: Scope, receive: Receive, options: ServerOptions) -> T:
        """Read and convert a request's body.

        Raises:
            APIError: it is too large, too slow, of another type or malformed, or a field is not served.
            msgspec.ValidationError: a field is missing, or of another type.
        """
        boundary = boundary_of(Headers(scope=scope).get("content-type", ""))
        with self._bodies.body() as body:
            await receive_within(scope, receive, options, options.max_upload_bytes, self._bodies, body)
            async with self._bodies.turn(len(body)):
                parts = await asyncio.to_thread(form_parts, body, boundary)
        return self.convert(parts)

    def convert(self, parts: list[tuple[str, bytes]]) -> T:
        """The struct of a form's parts, by name. Raises as `read`."""
        values: dict[str, Any] = {}
        for name, data in parts:
            if name in self._refused:
                raise APIError(400, f"{name}: {self._refused[name]}", param=name)
            value = data if name in self._files else field_text(name, data)
            if name.endswith("[]"):
                values.setdefault(name, []).append(value)
            elif name in values:
                raise APIError(400, f"{quoted(name)} is there twice")
            else:
                values[name] = value
        if unknown := values.keys() - set(self.fields):
            warn_client(f"unknown fields are ignored: {shorten_names(unknown)}")
        return msgspec.convert(values, self._kind, strict=False)


def boundary_of(content_type: str) -> bytes:
    """The boundary between the parts of a form.

    Raises:
        APIError: the content type is another one, or names none.
    """
    if len(content_type) > MAX_CONTENT_TYPE:  # the parser takes seconds for a long one
        raise APIError(400, f"the content type has over {MAX_CONTENT_TYPE} characters")
    kind, parameters = parse_options_header(content_type)
    if kind.decode("latin-1") != MEDIA_TYPE:
        raise APIError(
            415, f"the body must be a form: Content-Type: {MEDIA_TYPE}, got {quoted(content_type or 'none')}"
        )
    boundary = parameters.get(b"boundary", b"")
    if not 1 <= len(boundary) <= MAX_BOUNDARY:
        raise APIError(
            400, f"the content type {MEDIA_TYPE} needs a boundary of 1 to {MAX_BOUNDARY} characters"
        )
    return boundary


def form_parts(body: bytes | bytearray, boundary: bytes) -> list[tuple[str, bytes]]:
    """The names and contents of a form's parts, in order.

    Raises:
        APIError: it is malformed, or has too many parts.
    """
    # The parser is slow where a boundary stands, and fast between them.
    if body.count(b"--" + boundary) > MAX_PARTS + 1:
        raise APIError(413, f"the form has more than {MAX_PARTS} parts", code="request_too_large")
    reader = PartReader()
    parser = MultipartParser(boundary, reader.callbacks())  # type: ignore[arg-type]
    try:
        parser.write(bytes(body))
        parser.finalize()
    except MultipartParseError as error:
        raise APIError(400, f"the form is malformed: {error}") from None
    if not reader.ended:
        raise APIError(400, "the form is malformed: it has no end")
    return reader.parts


class PartReader:
    """Takes the parts of a form from the parser.

    Attributes:
        parts: names and contents. ended: the form is complete.
    """

    def __init__(self) -> None:
        self.parts: list[tuple[str, bytes]] = []
        self.ended = False
        self._header, self._value, self._name = b"", b"", ""
        self._filename: bytes | None = None
        self._data: list[bytes] = []

    def callbacks(self) -> dict[str, Any]:
        """The functions that the parser calls."""
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._add_header,
            "on_header_value": self._add_value,
            "on_header_end": self._end_header,
            "on_part_data": self._add_data,
            "on_part_end": self._end,
            "on_end": self._finish,
        }

    def _begin(self) -> None:
        self._name, self._filename, self._data = "", None, []
        self._header = self._value = b""

    def _add_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, parameters = parse_options_header(self._value)
            self._name = parameters.get(b"name", b"").decode("utf-8", "replace")
            self._filename = parameters.get(b"filename")
        self._header = self._value = b""

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        self._data.append(data[start:end])

    def _end(self) -> None:
        data = b"".join(self._data)
        if self._filename is not None:
            data = FilePart(data)
            data.filename = self._filename.decode("utf-8", "replace")
        self.parts.append((self._name, data))

    def _finish(self) -> None:
        self.ended = True


def field_text(name: str, data: bytes) -> str:
    """The text of a field.

    Raises:
        APIError: it is too long, or no text.
    """
    if len(data) > MAX_FIELD_BYTES:
        raise APIError(413, f"{quoted(name)} has more than {MAX_FIELD_BYTES} bytes", code="request_too_large")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise APIError(400, f"{quoted(name)} is no text in UTF-8") from None
