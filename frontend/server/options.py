"""Options of the HTTP server. One definition, from which the command line and the YAML file are made."""

# ruff: noqa: RUF009 (`option` is a dataclass field)

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Literal

from pagewire.frontend.server.parsing.choice import PARSERS
from pagewire.frontend.server.parsing.reasoning import BEGUN
from pagewire.ipc.bounds import check_int, check_number
from pagewire.ipc.options import check_types, option

LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
TOOL_PARSERS = tuple(PARSERS)
REASONING_PARSERS = tuple(BEGUN)
CERTIFICATE = (0, 1, 2)  # of a client: not asked for, asked for, required (as in `ssl`)


@dataclass(frozen=True)
class ServerOptions:
    """Options of the server.

    Raises:
        ValueError, TypeError: by `check`, for a value out of range or a contradiction.
    """

    # fmt: off
    host: str = option("127.0.0.1", "HTTP", "address to listen on; 0.0.0.0: all")
    port: int = option(8000, "HTTP", "0: any that is free")
    uds: str | None = option(None, "HTTP", "path of a Unix socket to listen on instead")
    root_path: str = option("", "HTTP", "path that a proxy serves this server under, such as /llm")
    ssl_keyfile: str | None = option(None, "HTTP", "file of TLS's private key")
    ssl_certfile: str | None = option(None, "HTTP", "file of TLS's certificate")
    ssl_ca_certs: str | None = option(None, "HTTP", "file of authorities that client certificates are checked by")
    ssl_cert_reqs: int = option(0, "HTTP", "client certificates: 0 not asked for, 1 optional, 2 required",
        choices=CERTIFICATE)
    allow_credentials: bool = option(False, "HTTP", "of CORS: cookies and authorization")
    allowed_origins: list[str] = option(None, "HTTP", "of CORS (default: *)", make=lambda: ["*"])
    allowed_methods: list[str] = option(None, "HTTP", "of CORS (default: *)", make=lambda: ["*"])
    allowed_headers: list[str] = option(None, "HTTP", "of CORS (default: *)", make=lambda: ["*"])
    middleware: list[str] = option(None, "HTTP", "import path of an ASGI middleware class, or of a function"
        " (request, call_next)", make=list)
    max_request_bytes: int = option(16 << 20, "HTTP", "largest body of a request; over it: 413")
    body_seconds: float = option(60.0, "HTTP", "time for a request's body to arrive; over it: 408")
    stall_seconds: float = option(120.0, "HTTP", "a TCP client that reads nothing for so long is dropped")
    drain_seconds: float = option(30.0, "HTTP", "time for open requests after SIGTERM; a second signal cuts it")

    api_key: list[str] = option(None, "Access", "key(s) that clients must show, on every path but /health and the"
        " page's files; also PAGEWIRE_API_KEY", make=list)
    enable_admin: bool = option(False, "Access", "serve /pause, /resume, /sleep, /wake_up, /abort, ...")

    chat_template: str | None = option(None, "Chat", "template, file, or name of one of the model's")
    chat_template_content_format: Literal["auto", "string", "openai"] = option(
        "auto", "Chat", "what the template is given as content", choices=("auto", "string", "openai"))
    trust_request_chat_template: bool = option(False, "Chat", "take chat templates from requests")
    response_role: str = option("assistant", "Chat", "role of the answers")
    enable_auto_tool_choice: bool = option(False, "Chat", "let the model choose tools (tool_choice: auto)")
    reasoning_parser: str | None = option(None, "Chat", "how the model marks what it thinks first",
        choices=REASONING_PARSERS)
    prompt_unused_tools: bool = option(False, "Chat", "tell the model of its tools even with tool_choice: none")
    tool_call_parser: str | None = option(None, "Chat", "how the model writes tool calls", choices=TOOL_PARSERS)

    return_tokens_as_token_ids: bool = option(False, "Answers", "in log probabilities, tokens as 'token_id:ID'")
    response_store_bytes: int = option(64 << 20, "Answers", "memory for answers of /v1/responses, so that they can"
        " be continued and fetched; those used longest ago go first; 0: none is kept")
    restarts: int = option(0, "Answers", "how often to replace an engine core that dies (not with --attach)")
    reattach_timeout: float = option(30.0, "Answers", "with --attach: seconds to wait for another core"
        " there, should it die; open requests go on with that one")

    uvicorn_log_level: str = option("warning", "Server log", "of the HTTP library", choices=LOG_LEVELS)
    disable_log_requests: bool = option(False, "Server log", "no line per request")
    max_log_len: int = option(0, "Server log", "characters (or token ids) of each prompt in its line; -1: all")
    log_format: Literal["text", "json"] | None = option(None, "Server log", "of every line, those of the engine too"
        " (default: text)", choices=("text", "json"))
    # fmt: on

    def check(self) -> None:
        """Raise ValueError or TypeError for the first bad value."""
        check_types(self)
        check_int("port", self.port, 0, 65535)
        check_int("max_request_bytes", self.max_request_bytes, 1)
        check_int("response_store_bytes", self.response_store_bytes, 0)
        check_int("max_log_len", self.max_log_len, -1)
        check_int("restarts", self.restarts, 0)
        for name in ("body_seconds", "stall_seconds", "drain_seconds", "reattach_timeout"):
            check_number(name, getattr(self, name), 0.0, math.inf)
        if self.root_path and not self.root_path.startswith("/"):
            raise ValueError(f"root_path must begin with '/', got {self.root_path!r}")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("TLS needs both ssl_keyfile and ssl_certfile")
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ValueError("enable_auto_tool_choice needs tool_call_parser")

    def keys(self) -> list[str]:
        """The keys of which clients must show one; none: everybody is let in."""
        return [key for key in [*self.api_key, os.environ.get("PAGEWIRE_API_KEY", "")] if key]
