"""Real engines on the demo model, in float32: a core with a real worker, as a user would start them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagewire import LLM
from tests.end_to_end.http_server import Server

KV_BYTES = 64 << 20
"""Size of the KV cache. An idle core pre-faults the default size, which costs up to two seconds of a processor."""
SMALL_CORE = ("--dtype", "float32", "--kv-cache-memory-bytes", str(KV_BYTES))


class Daemon:
    """`pagewire core` as a process, with a small KV cache."""

    def __init__(self, address: str, *options: str) -> None:
        self.address = address
        command = [sys.executable, "-m", "pagewire.cli.main", "core", "--listen", address, *SMALL_CORE]
        self.process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"ready {address}\n"

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        self.process.terminate()
        return self.close()

    def close(self) -> int:
        """Wait for its end: the exit status."""
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait(60)


@pytest.fixture
def start_daemon(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Start a daemon: `start_daemon("--max-num-seqs", "4")`."""
    daemons: list[Daemon] = []

    def start(*options: str) -> Daemon:
        daemons.append(Daemon(f"ipc://{tmp_path}/core{len(daemons)}.sock", *options))
        return daemons[-1]

    yield start
    for daemon in daemons:
        if daemon.process.poll() is None:
            daemon.stop()


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One daemon for all tests that leave it as it was."""
    saves = ("--allowed-save-path", str(tmp_path_factory.getbasetemp()))
    daemon = Daemon(f"ipc://{tmp_path_factory.mktemp('core')}/core.sock", *saves)
    yield daemon.address
    assert daemon.stop() == 0


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """One engine for all tests that change nothing of it."""
    with LLM("demo", dtype="float32", kv_cache_memory_bytes=KV_BYTES, max_logprobs=50) as engine:
        yield engine


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start a server: `start_server("demo", "--port", "0")`."""
    servers: list[Server] = []

    def start(*options: str, **more: Any) -> Server:
        servers.append(Server(tmp_path, *options, **more))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with an engine of its own, for all tests that leave it as it was."""
    server = Server(
        tmp_path_factory.mktemp("server"),
        *("demo", "--port", "0", *SMALL_CORE),
        *("--enable-admin", "--served-model-name", "demo", "second-name"),
    )
    yield server
    assert server.stop() == 0
