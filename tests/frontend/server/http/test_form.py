"""Forms: what is in them, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pagewire.frontend.server.http.body import IncomingBodies
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.form import (
    MAX_FIELD_BYTES,
    MAX_PARTS,
    FormDecoder,
    FormFile,
    boundary_of,
    form_parts,
)
from tests.frontend.server.client import Client

PATH = "/v1/audio/transcriptions"
FORM = {"content-type": "multipart/form-data; boundary=edge"}


def form(*parts: tuple[str, bytes], end: bytes = b"--edge--\r\n") -> bytes:
    made = b"".join(
        b'--edge\r\nContent-Disposition: form-data; name="%s"; filename="x"\r\n'
        b"Content-Type: application/octet-stream\r\n\r\n%s\r\n" % (name.encode(), data)
        for name, data in parts
    )
    return made + end


class Filled(msgspec.Struct):
    file: FormFile
    number: float = 1.0
    yes: bool = False
    names: list[str] = msgspec.field(name="names[]", default_factory=list)


DECODER = FormDecoder(Filled, {"old": "it is not served"}, IncomingBodies(1 << 20))


def test_parts_become_fields() -> None:
    data = b"\r\n--edg\r\n--edge\0 \xff" + bytes(range(256))
    parts = form_parts(
        form(
            ("file", data[:9]),
            ("number", b"2.5"),
            ("yes", b"true"),
            ("names[]", b"a"),
            ("names[]", "ü".encode()),
        ),
        b"edge",
    )
    assert DECODER.convert(parts) == Filled(data[:9], 2.5, True, ["a", "ü"])
    awkward = b"\r\n--edg\r\n-\r\n--edgd" + bytes(range(256)) * 100
    assert form_parts(form(("file", awkward), ("number", b"")), b"edge") == [
        ("file", awkward),
        ("number", b""),
    ]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no form",
        b"--other--\r\n",
        form(("file", b"x"), end=b""),
        form(("file", b"x"), end=b"--edge"),
        b"--edge\r\nContent-Disposition form-data\r\n\r\nx\r\n--edge--\r\n",
        b"--edge\r\n" + b"a: b\r\n" * 100 + b"\r\nx\r\n--edge--\r\n",
        b"--edge\r\na: " + b"b" * 10_000 + b"\r\n\r\nx\r\n--edge--\r\n",
    ],
)
def test_malformed_forms(body: bytes) -> None:
    with pytest.raises(APIError, match="the form is malformed") as caught:
        form_parts(body, b"edge")
    assert caught.value.status == 400


def test_forms_of_too_many_parts_and_boundaries() -> None:
    assert len(form_parts(form(*[("a", b"")] * MAX_PARTS), b"edge")) == MAX_PARTS
    for body in (form(*[("a", b"")] * (MAX_PARTS + 1)), b"--edge" * (1 << 20)):
        with pytest.raises(APIError, match=f"more than {MAX_PARTS} parts") as caught:
            form_parts(body, b"edge")
        assert caught.value.status == 413


def test_fields_that_are_refused() -> None:
    file = ("file", b"x")
    refused: list[tuple[list[tuple[str, bytes]], str, int]] = [
        ([file, ("old", b"1")], "old: it is not served", 400),
        ([file, file], "'file' is there twice", 400),
        ([file, ("number", b"\xff")], "'number' is no text in UTF-8", 400),
        ([file, ("number", b"1" * (MAX_FIELD_BYTES + 1))], "'number' has more than", 413),
    ]
    for parts, reason, status in refused:
        with pytest.raises(APIError, match=reason) as caught:
            DECODER.convert(parts)
        assert caught.value.status == status
    for parts in ([], [file, ("number", b"many")], [file, ("yes", b"perhaps")]):
        with pytest.raises(msgspec.ValidationError):
            DECODER.convert(parts)


def test_boundaries() -> None:
    assert boundary_of('multipart/form-data; boundary="a b"') == b"a b"
    assert boundary_of("Multipart/Form-Data; boundary=x") == b"x"
    for kind in ("", "application/json", "multipart/mixed; boundary=x", "multipart/form-data2; boundary=x"):
        with pytest.raises(APIError) as caught:
            boundary_of(kind)
        assert caught.value.status == 415
    for piece in (";", "; a=b", '; a="'):  # for which the parser takes time that grows with their square
        with pytest.raises(APIError, match="over 512 characters") as caught:
            boundary_of("multipart/form-data" + piece * (60_000 // len(piece)))
        assert caught.value.status == 400
    for kind in ("multipart/form-data", f"multipart/form-data; boundary={'x' * 71}"):
        with pytest.raises(APIError, match="needs a boundary") as caught:
            boundary_of(kind)
        assert caught.value.status == 400


def test_a_model_that_does_not_hear(client: Client) -> None:
    answer = client.post(PATH, form(("file", b"RIFF")), **FORM)
    assert answer.status == 400 and "does not transcribe" in answer.error["message"]


def test_a_form_of_a_server(serve: Callable[..., Client]) -> None:
    client = serve(max_upload_bytes=1000, api_key=["k"])
    keyed: dict[str, Any] = FORM | {"authorization": "Bearer k"}
    assert client.post(PATH, b"x" * 2000, **FORM).status == 401
    assert client.post(PATH, b"x" * 2000, **keyed).status == 413
    assert client.post(PATH, b"{}", **keyed | {"content-type": "application/json"}).status == 415
    missing = client.post(PATH, form(("model", b"m")), **keyed)
    assert missing.status == 422 and missing.error["param"] == "file"
    unknown = client.post(PATH, form(("file", b"x"), ("colour", b"red")), **keyed)
    assert "unknown fields are ignored: 'colour'" in unknown.headers["warning"]


def test_what_the_document_says(client: Client) -> None:
    document = client.get("/openapi.json").json
    body = document["paths"][PATH]["post"]["requestBody"]["content"]
    assert list(body) == ["multipart/form-data"]
    answers = document["paths"][PATH]["post"]["responses"]["200"]["content"]
    assert list(answers) == ["application/json", "text/event-stream", "text/plain"]
    schema = document["components"]["schemas"]["TranscriptionRequest"]["properties"]
    assert schema["file"] == {"type": "string", "format": "binary"}
    assert "timestamp_granularities[]" in schema
