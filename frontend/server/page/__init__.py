"""The page at `/`: a chat and a live view of the engine, as plain files that a browser runs as they are."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}

# Only what this server ships is loaded and run, and nothing is parsed as HTML at run time.
HEADERS = {
    "Content-Security-Policy": "; ".join(
        [
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self' data:",  # pictures that a user attaches, which the request has as data: URLs
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
    ),
    "Cache-Control": "no-cache",  # keep it, but check each time whether it has changed
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def read_page_files(folder: Path, path: str) -> dict[str, tuple[str, bytes]]:
    """The files of a folder and of those in it, by path on the server: content type and bytes."""
    pages: dict[str, tuple[str, bytes]] = {}
    for file in folder.iterdir():
        _, dot, suffix = file.name.rpartition(".")
        if file.is_dir():
            pages |= read_page_files(file, f"{path}{file.name}/")
        elif (content_type := CONTENT_TYPES.get(dot + suffix)) is not None:
            pages["/" if file.name == "index.html" else path + file.name] = (content_type, file.read_bytes())
    return pages


FILES = read_page_files(Path(__file__).parent, "/page/")
PATHS = frozenset(FILES)  # exact paths, which need no key: the files hold nothing of the engine


def page_routes() -> list[Route]:
    """One route per file of the page."""
    return [
        Route(path, serve_page(content_type, body), methods=["GET"], include_in_schema=False)
        for path, (content_type, body) in FILES.items()
    ]


def serve_page(content_type: str, body: bytes) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint of a file: 304 for a browser that has it already."""
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {**HEADERS, "ETag": etag}

    async def endpoint(request: Request) -> Response:
        known = [
            tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")
        ]
        if etag in known or known == ["*"]:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=content_type, headers=headers)

    return endpoint
