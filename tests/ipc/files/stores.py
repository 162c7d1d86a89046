"""Servers on loopback that speak as much of S3, of ModelScope and of the Hugging Face hub as a download needs."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlparse
from xml.sax.saxutils import escape

PATIENCE = 60


class Store:
    """Files, and how they were asked for.

    reads: each file that was asked for, with the first byte. key: what clients must show; None: nothing.
    breaks: the number of bytes after which the connection breaks off, for the next answers in turn.
    gates: the number of bytes after which an answer waits for an event, for the next answers in turn.
    """

    def __init__(self, files: Mapping[str, bytes], key: str | None = None) -> None:
        self.files, self.key = dict(files), key
        self.reads: list[tuple[str, int]] = []
        self.breaks: list[int] = []
        self.gates: list[tuple[int, threading.Event]] = []
        self.address = ""

    @contextmanager
    def serving(self, handler: type[StoreHandler]) -> Iterator[Store]:
        """Answer requests at `address` meanwhile."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (handler,), {"store": self}))
        self.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class StoreHandler(BaseHTTPRequestHandler):
    """What both have: files by ranges, and connections that break off."""

    protocol_version = "HTTP/1.1"
    store: ClassVar[Store]

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def is_allowed(self) -> bool:
        key = self.store.key
        return key is None or key in self.headers.get("Authorization", "")

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.store.gates and headers:
            first, gate = self.store.gates.pop(0)
            self.wfile.write(body[:first])
            self.wfile.flush()
            gate.wait(PATIENCE)
            body = body[first:]
        if self.store.breaks and headers:
            self.wfile.write(body[: self.store.breaks.pop(0)])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)
            return
        with suppress(ConnectionError):  # a client that has left
            self.wfile.write(body)

    def send_file(self, name: str) -> None:
        content = self.store.files[name]
        given = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first = int(given[1]) if given else 0
        self.store.reads.append((name, first))
        last = len(content) - 1
        headers = {"ETag": etag(content), "Last_Modified": "Wed, 01 Jan 2025 00:00:00 GMT"}
        if self.headers.get("If-Match", headers["ETag"]) != headers["ETag"]:
            self.answer(412, b"")
            return
        if given:
            headers["Content_Range"] = f"bytes {first}-{last}/{len(content)}"
        self.answer(206 if given else 200, content[first:], **headers)


class S3Handler(StoreHandler):
    """S3: lists of a bucket, and objects. A bucket is `bucket`."""

    def do_GET(self) -> None:
        url = urlparse(self.path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        if not self.is_allowed():
            self.answer(403, b"<Error><Code>AccessDenied</Code></Error>")
        elif bucket != "bucket" or (key and key not in self.store.files):
            self.answer(404, b"<Error><Code>NoSuchBucket</Code></Error>")
        elif key:
            self.send_file(key)
        else:
            self.answer(200, self.listed(parse_qs(url.query).get("prefix", [""])[0]).encode())

    def listed(self, prefix: str) -> str:
        entries = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(content)}</Size><ETag>{escape(etag(content))}</ETag>"
            "<LastModified>2025-01-01T00:00:00.000Z</LastModified></Contents>"
            for name, content in sorted(self.store.files.items())
            if name.startswith(prefix)
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"


class ModelScopeHandler(StoreHandler):
    """ModelScope: the files of the repository `owner/model`, in every revision the same."""

    def do_GET(self) -> None:
        url = urlparse(self.path)
        query = parse_qs(url.query)
        if not self.is_allowed():
            self.answer(403, json.dumps({"Code": 403, "Message": "denied"}).encode())
        elif not url.path.startswith("/api/v1/models/owner/model/repo"):
            self.answer(404, json.dumps({"Code": 404, "Message": "not found"}).encode())
        elif "FilePath" in query:
            self.send_file(query["FilePath"][0])
        else:
            files = [
                {
                    "Path": name,
                    "Name": name.rpartition("/")[2],
                    "Type": "blob",
                    "Size": len(content),
                    "Sha256": hashlib.sha256(content).hexdigest(),
                }
                for name, content in self.store.files.items()
            ]
            self.answer(200, json.dumps({"Code": 200, "Success": True, "Data": {"Files": files}}).encode())


def etag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


class HubHandler(StoreHandler):
    """The Hugging Face hub: repositories at their last commit. A file is `owner/repository/path`.

    Files of over `LARGE` bytes are as those of Git LFS, which have a sha256; others have the digest of a Git blob.
    """

    LARGE = 1000

    def do_GET(self) -> None:
        path = unquote(urlparse(self.path).path).strip("/")
        parts = path.split("/")
        name = "/".join(parts[2:4] if parts[:2] == ["api", "models"] else parts[:2])
        files = {file: body for file, body in self.store.files.items() if file.startswith(f"{name}/")}
        if not self.is_allowed():
            self.answer(401, b"{}", X_Error_Code="RepoNotFound")
        elif not files:
            self.answer(404, b"{}", X_Error_Code="RepoNotFound")
        elif parts[0] != "api":
            self.send_of_hub("/".join([name, *parts[4:]]), commit_of(files))
        elif "tree" in parts:
            listed = [
                {"type": "file", "path": file} | self.described(body, "oid", "oid")
                for file, body in self.without(name, files).items()
            ]
            self.answer(200, json.dumps(listed).encode())
        else:
            listed = [
                {"rfilename": file} | self.described(body, "blobId", "sha256")
                for file, body in self.without(name, files).items()
            ]
            info = {"id": name, "sha": commit_of(files), "siblings": listed, "tags": [], "downloads": 0}
            self.answer(200, json.dumps(info | {"private": False}).encode())

    def do_HEAD(self) -> None:
        self.do_GET()

    def without(self, name: str, files: Mapping[str, bytes]) -> dict[str, bytes]:
        return {file.removeprefix(f"{name}/"): body for file, body in files.items()}

    def described(self, body: bytes, blob: str, digest: str) -> dict[str, object]:
        given: dict[str, object] = {"size": len(body), blob: blob_of(body)}
        if len(body) > self.LARGE:
            given["lfs"] = {digest: sha256_of(body), "size": len(body), "pointerSize": 130}
        return given

    def send_of_hub(self, file: str, commit: str) -> None:
        if (body := self.store.files.get(file)) is None:
            self.answer(404, b"", X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
            return
        first = int(found[1]) if (found := re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))) else 0
        if self.command == "GET":
            self.store.reads.append((file, first))
        tag = sha256_of(body) if len(body) > self.LARGE else blob_of(body)
        headers = {"ETag": f'"{tag}"', "X_Repo_Commit": commit, "X_Linked_Size": str(len(body))}
        if found:
            headers["Content_Range"] = f"bytes {first}-{len(body) - 1}/{len(body)}"
        self.answer(206 if found else 200, body[first:], **headers)


@lru_cache(16)
def sha256_of(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


@lru_cache(16)
def blob_of(body: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


def commit_of(files: Mapping[str, bytes]) -> str:
    listed = sorted((name, blob_of(body)) for name, body in files.items())
    return hashlib.sha1(repr(listed).encode()).hexdigest()
