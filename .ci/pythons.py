"""Installs a wheel for one Python after another, in clean environments without a compiler, and uses it.

    .ci/pythons.py WHEEL 3.10 3.10:torch==2.6.0,transformers==5.17.0 /usr/bin/python3.13

A Python is a version or a path that uv knows. Requirements after a colon are installed with the wheel; without them
all is the newest. `uv` must be on PATH: environments share their files, so each takes seconds once all is fetched.
The table that is printed has the versions, the seconds from the start of `pagewire serve demo` with an empty cache
to the first token, and which kernels served. The first command that fails ends the script, with its output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

PROMPT = 'The "with" statement is used to'
TEXT = " wrap the execution of a block with methods defined by a"  # of the demo model, greedily
GREEDY = ("--temperature", "0", "--max-tokens", "12")
SMALL = ("--dtype", "float32", "--kv-cache-memory-bytes", str(64 << 20))
VERSIONS = """
import platform
from importlib.metadata import version
print(platform.python_version(), *map(version, ("torch", "transformers", "numpy")))
"""


class CleanEnvironment:
    """A clean environment with the wheel, whose commands see no other program and begin with an empty cache.

    python: as uv names it. requirements: what is installed with the wheel.

    Raises:
        subprocess.CalledProcessError: there is no such Python, or the requirements cannot be met.
    """

    def __init__(self, folder: Path, python: str, wheel: Path, requirements: list[str]) -> None:
        self.folder = folder
        self.bin = folder / "venv" / "bin"
        uv = ["uv", "--quiet"]
        subprocess.run([*uv, "venv", "--python", python, str(folder / "venv")], check=True)
        install = [*uv, "pip", "install", "--python", str(self.bin / "python"), "--only-binary", ":all:"]
        subprocess.run([*install, str(wheel), *requirements], check=True)
        self.variables = {"PATH": str(self.bin), "PAGEWIRE_CACHE_ROOT": str(folder / "cache")}

    def output(self, *command: str) -> str:
        """What a command prints on standard output.

        Raises:
            subprocess.CalledProcessError: it failed; its messages are on standard error.
        """
        done = subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            **self._place(),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return done.stdout

    @contextmanager
    def started(self, *command: str) -> Iterator[str]:
        """The address of a server or core that runs in this context.

        Raises:
            RuntimeError: it does not get ready, or ends with another status than 0.
        """
        process = subprocess.Popen(
            [str(self.bin / "pagewire"), *command], **self._place(), stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        try:
            ready = process.stdout.readline().split()
            if ready[:1] != ["ready"]:
                raise RuntimeError(f"pagewire {command[0]} does not get ready")
            yield ready[1]
        finally:
            process.terminate()
            process.stdout.close()
            if status := process.wait(120):
                raise RuntimeError(f"pagewire {command[0]} ended with status {status}")

    def _place(self) -> dict[str, object]:
        return {"cwd": self.folder, "env": self.variables, "stdin": subprocess.DEVNULL}


def first_token(environment: CleanEnvironment) -> float:
    """The seconds from the start of a server to the first token that it streams.

    Raises:
        RuntimeError: the server writes another text. See `CleanEnvironment.started`.
    """
    begin = time.perf_counter()
    with environment.started("serve", "demo", "--port", "0", *SMALL) as url:
        body = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 12, "stream": True}
        headers = {"Content-Type": "application/json"}
        texts, seconds = [], 0.0
        with urlopen(
            Request(f"{url}/v1/completions", json.dumps(body).encode(), headers), timeout=120
        ) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    seconds = seconds or time.perf_counter() - begin
                    texts += [choice["text"] for choice in json.loads(line[6:])["choices"]]
    check("serve", "".join(texts))
    return seconds


def check(command: str, text: str) -> None:
    """Check the text of the demo model.

    Raises:
        RuntimeError: it is another one.
    """
    if text.strip() != TEXT.strip():
        raise RuntimeError(f"pagewire {command} wrote {text!r}")


def try_out(environment: CleanEnvironment) -> str:
    """Use all of the wheel's ways in, and return the line of the table.

    Raises:
        subprocess.CalledProcessError, RuntimeError: one does not work.
    """
    seconds = first_token(environment)
    check("generate", environment.output("pagewire", "generate", PROMPT, *GREEDY, *SMALL))
    address = f"ipc://{environment.folder}/core"
    with environment.started("core", "--model", "demo", "--listen", address, *SMALL):
        check("--attach", environment.output("pagewire", "generate", PROMPT, *GREEDY, "--attach", address))
    versions = environment.output("python", "-c", VERSIONS).split()
    [kernels] = [
        line.split(maxsplit=1)[1]
        for line in environment.output("pagewire", "--version").splitlines()
        if line.startswith("kernels")
    ]
    python, torch, transformers, numpy = versions
    return f"{python:9} {torch:16} {transformers:13} {numpy:8} {seconds:7.1f}  {kernels}"


def main() -> None:
    """Try the wheel with each Python of the command line."""
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    wheel = Path(sys.argv[1]).resolve()
    print(f"{'Python':9} {'torch':16} {'transformers':13} {'numpy':8} {'token, s':>8} kernels", flush=True)
    for each in sys.argv[2:]:
        python, _, requirements = each.partition(":")
        with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
            environment = CleanEnvironment(
                Path(name), python, wheel, requirements.split(",") if requirements else []
            )
            print(try_out(environment), flush=True)


if __name__ == "__main__":
    main()
