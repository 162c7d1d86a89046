"""How long one tenant's new pictures wait beside another's that are slow to lay out, or to decode.

    python -m benchmarks.media_tenants

A server of the embedded model that sees, with two keys. One sends eight at a time: pictures of many pixels, each of
another size, for each of which the model's processor is asked anew; or progressive JPEG files of many scans. The
other asks about one small new picture after another. Seconds from request to answer.
"""

from __future__ import annotations

import argparse
import base64
import json
import platform
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

from benchmarks.siege.media_files import jpeg_of_many_scans, plain_png

SECONDS = 60.0
LOOPS = 8  # requests of the other tenant at the same time
OWN, OTHERS = "key-of-the-first-tenant", "key-of-the-second-tenant"


class Server:
    """A server of demo-vision with two keys, while the block runs."""

    def __enter__(self) -> Server:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "pagewire.cli.main", "serve", "demo-vision", "--port", str(port)]
        command += ["--api-key", OWN, "--api-key", OTHERS, "--kv-cache-memory-bytes", str(64 << 20)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while True:
            with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return self
            if self.process.poll() is not None:
                raise RuntimeError("the server has ended")
            time.sleep(0.5)

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()

    def ask(self, key: str, data: bytes, **fields: object) -> tuple[int, float]:
        """Ask about a picture; status and seconds."""
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, **fields}
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(), headers
        )
        begin = time.monotonic()
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                answer.read()
                return answer.status, time.monotonic() - begin
        except urllib.error.HTTPError as error:
            return error.code, time.monotonic() - begin


def beside(server: Server, make: Callable[[int], bytes] | None, numbers: count[int]) -> None:
    """Print how long the first tenant waits beside the second, which sends what `make` makes."""
    end = time.monotonic() + SECONDS
    statuses: Counter[int] = Counter()

    def attack() -> None:
        while make is not None and time.monotonic() < end:
            statuses[server.ask(OTHERS, make(next(numbers)))[0]] += 1

    threads = [threading.Thread(target=attack) for _ in range(LOOPS)]
    for thread in threads:
        thread.start()
    time.sleep(3.0 if make else 0.0)
    waits: list[float] = []
    own: Counter[int] = Counter()
    while not waits or (time.monotonic() < end and (make is not None or len(waits) < 20)):
        number = next(numbers)
        status, seconds = server.ask(OWN, plain_png(20 + number % 80, 20 + number // 80 % 80))
        own[status] += 1
        waits.append(seconds)
        time.sleep(0.2)
    for thread in threads:
        thread.join()
    waits.sort()
    median, longest = waits[len(waits) // 2], waits[-1]
    print(
        f"  {len(waits)} pictures, statuses {dict(own)}: median {median:.2f} s, longest {longest:.2f} s",
        end="",
    )
    print(f"; the other's statuses {dict(statuses)}" if statuses else "", flush=True)


def processor() -> str:
    """The processor's name."""
    with suppress(OSError):
        if found := re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()):
            return found[1]
    return platform.machine()


def main() -> None:
    """Run it."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(processor())
    jpeg = jpeg_of_many_scans()
    numbers = count(1)
    with Server() as server:
        server.ask(OWN, plain_png(9, 9))
        for name, make in (
            ("alone", None),
            ("beside pictures of many pixels", lambda number: plain_png(5000 + number, 5000)),
            ("beside JPEG files of many scans", lambda number: jpeg + b"%d" % number),
        ):
            print(name, flush=True)
            beside(server, make, numbers)


if __name__ == "__main__":
    main()
