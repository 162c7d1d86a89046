"""`pagewire serve` as a process that can be looked into."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

JSON = [(b"content-type", b"application/json")]
ROOT = Path(__file__).parents[2]
INSPECTION = "/inspect"
INSPECTION_CLASS = "tests.end_to_end.server_process.Inspection"  # the server runs in the root folder


class Inspection:
    """ASGI middleware: answers /inspect with the number of tasks on the server's event loop."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass on."""
        if scope.get("path") != INSPECTION:
            await self.app(scope, receive, send)
            return
        gc.collect()
        body = json.dumps({"tasks": len(asyncio.all_tasks())}).encode()
        await send({"type": "http.response.start", "status": 200, "headers": JSON})
        await send({"type": "http.response.body", "body": body})


class ServerProcess:
    """A server that is attached to a core. url: where it listens."""

    def __init__(self, address: str, *options: str) -> None:
        command = [sys.executable, "-m", "pagewire.cli.main", "serve", "--attach", address, "--port", "0"]
        command += ["--middleware", INSPECTION_CLASS, "--disable-log-requests", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self.process.stdout is not None
        ready = self.process.stdout.readline()
        assert ready.startswith("ready http"), ready
        self.url = ready.split()[1]

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        self.process.terminate()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait(60)
