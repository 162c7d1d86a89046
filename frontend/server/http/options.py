"""Options of the HTTP server; the command line and the YAML file are generated from this definition."""

# ruff: noqa: RUF009 (`option` is a dataclass field)

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from typing import Literal

from pagewire.frontend.client import MAX_SOURCE_BYTES
from pagewire.frontend.server.http.limits import connection_limits
from pagewire.frontend.server.parsing import dialects, reasoning_marks
from pagewire.frontend.server.parsing.detection import OFF
from pagewire.frontend.server.parsing.response_template import NAME
from pagewire.ipc.bounds import check_int, check_number
from pagewire.ipc.environment import env_flag
from pagewire.ipc.options.option import check_types, option
from pagewire.ipc.wire.budget import MAX_HTTP_LOGPROBS, MAX_HTTP_SEQUENCES, MAX_HTTP_TOKENS
from pagewire.ipc.wire.sockets import is_loopback

LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
TOOL_PARSERS = (*sorted({*dialects.DIALECTS, *dialects.ALIASES, NAME}), OFF)
REASONING_PARSERS = (*sorted({*reasoning_marks.REASONING, *reasoning_marks.ALIASES, NAME}), OFF)
MODE = re.compile(r"[0-7]{3}")
ORIGIN = re.compile(r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^/]*")
CERTIFICATE = (0, 1, 2)  # client certificates: ssl.CERT_NONE, ssl.CERT_OPTIONAL, ssl.CERT_REQUIRED


@dataclass(frozen=True)
class ServerOptions:
    """Options of the HTTP server. `check` validates them."""

    host: str = option("127.0.0.1", "HTTP", "address to listen on; 0.0.0.0: all interfaces")
    port: int = option(8000, "HTTP", "port to listen on; 0: any free port")
    uds: str | None = option(None, "HTTP", "path of a Unix socket to listen on instead of host and port")
    uds_mode: str | None = option(
        None, "HTTP", "permissions of the Unix socket in octal, such as 660 (default: those of the umask)"
    )
    uds_group: str | None = option(
        None, "HTTP", "group of the Unix socket, by name or number (default: that of the server)"
    )
    root_path: str = option("", "HTTP", "path prefix under which a proxy exposes this server, such as /llm")
    ssl_keyfile: str | None = option(None, "HTTP", "TLS: file with the private key")
    ssl_certfile: str | None = option(None, "HTTP", "TLS: file with the certificate")
    ssl_ca_certs: str | None = option(
        None, "HTTP", "TLS: file with the authorities that sign client certificates"
    )
    ssl_cert_reqs: int = option(
        0, "HTTP", "TLS: client certificates are 0 not requested, 1 optional, 2 required", choices=CERTIFICATE
    )
    allow_credentials: bool = option(False, "HTTP", "CORS: allow cookies and the Authorization header")
    allowed_hosts: list[str] = option(
        None,
        "HTTP",
        "host names of this server, beside localhost and IP"
        " addresses; *.NAME: all below it; *: any (default: any, but on loopback without an API key none)",
        make=list,
    )
    allowed_origins: list[str] = option(
        None,
        "HTTP",
        "web pages of other origins that may use this server, such"
        " as https://chat.example; *: all pages (default: only the server's own)",
        make=list,
    )
    allowed_methods: list[str] = option(None, "HTTP", "CORS: methods (default: *)", make=lambda: ["*"])
    allowed_headers: list[str] = option(None, "HTTP", "CORS: headers (default: *)", make=lambda: ["*"])
    middleware: list[str] = option(
        None,
        "HTTP",
        "import path of an ASGI middleware class, or of a function (request, call_next)",
        make=list,
    )
    max_request_bytes: int = option(
        16 << 20, "HTTP", "largest request body in bytes; a larger one gets status 413"
    )
    max_upload_bytes: int = option(
        MAX_SOURCE_BYTES["audio"],
        "HTTP",
        "largest body with an uploaded recording in bytes; a larger one gets status 413",
    )
    max_connections: int | None = option(
        None,
        "HTTP",
        "most open connections; over it, one without a request"
        " is closed, or a new one gets status 503 (default: as many as the limit of open files leaves)",
    )
    max_connections_per_address: int | None = option(
        None, "HTTP", "most of them from one IP address (default: half)"
    )
    head_seconds: float = option(
        30.0, "HTTP", "seconds for a request's line and headers to arrive, and for a TLS handshake"
    )
    body_seconds: float = option(
        60.0, "HTTP", "seconds for a request's body to arrive; a slower one gets status 408"
    )
    stall_seconds: float = option(
        120.0, "HTTP", "seconds after which a TCP client that reads nothing is disconnected"
    )
    drain_seconds: float = option(
        30.0,
        "HTTP",
        "seconds for open requests to finish after SIGTERM; a second signal ends the server at once",
    )

    api_key: list[str] = option(
        None,
        "Access",
        "API key(s), one of which clients must send, except to"
        " /health, /ready and the page's files; also read from $PAGEWIRE_API_KEY",
        make=list,
    )
    api_key_file: str | None = option(
        None,
        "Access",
        "file with a line NAME KEY [RIGHTS] per API key, for this"
        " user's eyes only (mode 600); read again when it changes; `pagewire keys --api` adds a line",
    )
    cache_salt_by_key: bool | None = option(
        None,
        "Access",
        "share cached prefixes only between requests with the"
        " same key's name; if not, clients do not see how much was cached (default: with several keys or a key"
        " file)",
    )
    enable_admin: bool = option(
        False,
        "Access",
        "serve /pause, /resume, /sleep, /wake_up, /abort, ...; without an"
        " API key only on loopback, and to requests with the header X-Pagewire-Admin: 1",
    )
    lora_root: str | None = option(
        None, "Access", "with --enable-admin: folder below which /v1/load_lora_adapter may load adapters"
    )

    chat_template: str | None = option(
        None,
        "Chat",
        "chat template: the template itself, a file, or the name of one of the model's templates",
    )
    chat_template_content_format: Literal["auto", "string", "openai"] = option(
        "auto",
        "Chat",
        "form in which the template gets message content",
        choices=("auto", "string", "openai"),
    )
    trust_request_chat_template: bool = option(False, "Chat", "allow requests to bring a chat template")
    response_role: str = option("assistant", "Chat", "role of generated messages")
    enable_auto_tool_choice: bool | None = option(
        None,
        "Chat",
        "let the model decide whether to call tools (tool_choice: auto; default: if it has a chat template)",
    )
    reasoning_parser: str | None = option(
        None,
        "Chat",
        "format in which the model marks its reasoning (default: found from its files and type)",
        choices=REASONING_PARSERS,
    )
    enable_in_reasoning: bool = option(
        False,
        "Chat",
        "constrain structured output from its first token on, so"
        " that the model cannot reason before it (default: the constraint begins after the reasoning)",
    )
    prompt_unused_tools: bool = option(False, "Chat", "keep tools in the prompt even with tool_choice: none")
    tool_call_parser: str | None = option(
        None,
        "Chat",
        "format in which the model writes tool calls (default: found from its files and type)",
        choices=TOOL_PARSERS,
    )
    constrain_auto_tools: bool = option(
        True,
        "Chat",
        "with tool_choice: auto, a call that the model has begun follows its schema; if not, only with `strict`",
    )

    strict_tools: bool = option(
        False,
        "Chat",
        "refuse requests with tools that only OpenAI's or Anthropic's servers run, such as"
        " web_search (default: these are left out, with a warning)",
    )

    any_model_name: bool | None = option(
        None,
        "Models",
        "serve requests for unknown models by the only model that there is, with a warning, if it generates text"
        " and may have no adapters (default: where only this machine can connect)",
    )
    lora_modules: list[str] = option(
        None,
        "Models",
        "adapters (LoRA) that clients address as models:"
        " name=path, or JSON of name, path and base_model_name",
        make=list,
    )
    prompt_adapters: list[str] = option(
        None,
        "Models",
        "NAME=FOLDER of a prompt adapter, which requests name as"
        " their model; the engine needs --enable-prompt-adapter",
        make=list,
    )

    return_tokens_as_token_ids: bool = option(
        False, "Answers", "write tokens as 'token_id:ID' in log probabilities"
    )
    response_store_bytes: int = option(
        64 << 20,
        "Answers",
        "bytes of memory for responses of"
        " /v1/responses, which can then be continued and retrieved; the least recently used are dropped first;"
        " 0: keep none",
    )
    max_request_sequences: int = option(
        MAX_HTTP_SEQUENCES, "Answers", "most sequences that a request may ask for: prompts times n"
    )
    max_request_tokens: int = option(
        MAX_HTTP_TOKENS,
        "Answers",
        "most tokens that a request for several sequences may ask for: prompts times n times max_tokens",
    )
    max_request_logprobs: int = option(
        MAX_HTTP_LOGPROBS,
        "Answers",
        "most log probabilities (tokens times"
        " candidates) that are kept for a request; those that a stream has sent no longer count",
    )
    restarts: int = option(0, "Answers", "how often a spawned engine core that dies is replaced")
    reattach_timeout: float = option(
        30.0,
        "Answers",
        "with --attach: seconds to wait for another core at the"
        " address after the core has died; open requests continue on it",
    )
    keep_alive_on_engine_death: bool = option(
        False,
        "Answers",
        "when the engine core is lost for good, go on and"
        " answer 503 (default: exit with status 1 once open requests have their error); also"
        " $PAGEWIRE_KEEP_ALIVE_ON_ENGINE_DEATH=1",
    )

    batch_dir: str | None = option(
        None,
        "Batches",
        "folder for what /v1/files and /v1/batches keep, also after a restart (default: they are not served)",
    )
    batch_dir_bytes: int = option(
        1 << 30, "Batches", "with --batch-dir: most bytes of files that are kept for each API key's name"
    )

    uvicorn_log_level: str = option(
        "warning", "Server log", "log level of the HTTP library (uvicorn)", choices=LOG_LEVELS
    )
    disable_log_requests: bool = option(False, "Server log", "do not log a line per request")
    max_log_len: int = option(
        0, "Server log", "characters (or token ids) of the prompt to log with each request; -1: all"
    )
    log_format: Literal["text", "json"] | None = option(
        None,
        "Server log",
        "format of log lines, including a spawned engine's (default: text)",
        choices=("text", "json"),
    )

    def check(self) -> None:
        """Check all values.

        Raises:
            ValueError, TypeError: a value is out of range, of the wrong type, or contradictory.
        """
        check_types(self)
        check_int("port", self.port, 0, 65535)
        check_int("max_request_bytes", self.max_request_bytes, 1)
        check_int("max_upload_bytes", self.max_upload_bytes, 1, MAX_SOURCE_BYTES["audio"])
        check_int("response_store_bytes", self.response_store_bytes, 0)
        check_limits(self)
        self._check_access()
        check_int("max_log_len", self.max_log_len, -1)
        check_int("restarts", self.restarts, 0)
        for name in ("head_seconds", "body_seconds", "stall_seconds", "drain_seconds", "reattach_timeout"):
            check_number(name, getattr(self, name), 0.0, math.inf)
        self.keeps_alive()
        check_listening(self)
        if self.lora_root is not None and not self.enable_admin:
            raise ValueError("lora_root needs enable_admin: it is for /v1/load_lora_adapter")
        if self.enable_auto_tool_choice and self.tool_call_parser == OFF:
            raise ValueError("enable_auto_tool_choice needs a tool_call_parser")

    def _check_access(self) -> None:
        if any(not key.strip() for key in [*self.api_key, os.environ.get("PAGEWIRE_API_KEY", "-")]):
            raise ValueError("api_key and $PAGEWIRE_API_KEY must not be empty: give a key, or unset them")
        for origin in self.allowed_origins:
            if ORIGIN.fullmatch(origin) is None:
                raise ValueError(f"allowed_origins must be like https://chat.example or *, got {origin!r}")
        if self.enable_admin and not self.keyed:
            if not self.is_local():
                raise ValueError(
                    f"enable_admin needs an api_key where other machines can connect: host is {self.host!r}"
                )
            if "*" in self.allowed_origins:
                raise ValueError(
                    "enable_admin needs an api_key where all web pages may connect: allowed_origins *"
                )
        connection_limits(self.max_connections, self.max_connections_per_address)

    def is_local(self) -> bool:
        """Return True if only this machine can connect: by loopback or a Unix socket."""
        return self.uds is not None or is_loopback(self.host)

    def keeps_alive(self) -> bool:
        """Return True if the server goes on without its engine core."""
        return self.keep_alive_on_engine_death or env_flag("PAGEWIRE_KEEP_ALIVE_ON_ENGINE_DEATH")

    @property
    def keyed(self) -> bool:
        """True if clients must send an API key."""
        return bool(self.keys()) or self.api_key_file is not None

    def keys(self) -> list[str]:
        """Return the accepted API keys; without any, no key is required."""
        return [key for key in [*self.api_key, os.environ.get("PAGEWIRE_API_KEY", "")] if key]


def check_listening(options: ServerOptions) -> None:
    """Check what the options say of sockets, TLS and paths.

    Raises:
        ValueError: a value is malformed, or needs another one.
    """
    if options.uds is None and (options.uds_mode is not None or options.uds_group is not None):
        raise ValueError("uds_mode and uds_group need uds: they are for a Unix socket")
    if options.uds_mode is not None and MODE.fullmatch(options.uds_mode) is None:
        raise ValueError(f"uds_mode must be three octal digits, such as 660, got {options.uds_mode!r}")
    if options.root_path and not options.root_path.startswith("/"):
        raise ValueError(f"root_path must begin with '/', got {options.root_path!r}")
    if (options.ssl_keyfile is None) != (options.ssl_certfile is None):
        raise ValueError("TLS needs both ssl_keyfile and ssl_certfile")


def check_limits(options: ServerOptions) -> None:
    """Check that limits leave something; raises ValueError or TypeError."""
    for name in ("max_request_sequences", "max_request_tokens", "max_request_logprobs", "batch_dir_bytes"):
        check_int(name, getattr(options, name), 1)
    for name in ("max_connections", "max_connections_per_address"):
        if getattr(options, name) is not None:
            check_int(name, getattr(options, name), 1)
