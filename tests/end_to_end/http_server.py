"""`pagewire serve` as a process, with curl's means: sockets and `http.client`."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PATIENCE = 60


class Server:
    """A server that runs. url: where; log: its standard error. module: what to run in place of a command."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        environment: dict[str, str] | None = None,
        command: str = "serve",
        module: str = "",
    ) -> None:
        self._log = folder / f"serve-{len(list(folder.glob('serve-*')))}.log"
        program = [module] if module else ["pagewire.cli.main", command]
        arguments = [sys.executable, "-m", *program, *options]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                arguments, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | (environment or {})
            )
        assert self.process.stdout is not None
        ready, _, self.url = self.process.stdout.readline().strip().partition(" ")
        assert ready == "ready", self.log

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_for_log(self, text: str, times: int = 1) -> None:
        """Wait until something stands in the log so many times: it is written after the answer."""
        while self.log.count(text) < times:
            assert self.process.poll() is None
            time.sleep(0.01)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def connect(self) -> http.client.HTTPConnection:
        """A connection."""
        if not self.url.startswith("unix:"):
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        connection = http.client.HTTPConnection("localhost", timeout=PATIENCE)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(self.url.removeprefix("unix:"))
        return connection

    def begin(self, method: str, path: str, body: Any = None, **headers: str) -> http.client.HTTPResponse:
        """A request; its response as far as the headers."""
        connection = self.connect()
        kind = {} if body is None else {"content-type": "application/json"}
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, kind | {k.replace("_", "-"): v for k, v in headers.items()})
        return connection.getresponse()

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Status, and the JSON of the answer."""
        with self.begin(method, path, body, **headers) as response:
            text = response.read()
            return response.status, json.loads(text) if text else None

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        if self.process.poll() is None:
            self.process.terminate()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait(PATIENCE)
