"""The server under siege, its core and their workers: started on loopback, watched, ended."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import zmq.auth

from pagewire.ipc.host.lifeline import OWN_GROUP

MODEL, EMBEDDER, PICTURES = "demo", "embedder", "pictures"  # the models' names
WEB_NETWORK = "127.0.0.1/32"  # from where pictures may be fetched: `pictures.web_port`
GOOD_KEY, EVIL_KEY = "key-of-the-good", "key-of-the-others"
OPEN_FILES = 512  # descriptors that server and core may have: fewer than the attackers' connections
KV_BYTES = 64 << 20
STOP_SECONDS = 60.0  # for a server or a core to end after SIGTERM
SERVE = ["--port", "0", "--api-key", GOOD_KEY, "--api-key", EVIL_KEY, "--trust-request-chat-template"]
SERVE += ["--max-log-len", "100", "--drain-seconds", "5"]
ENGINE = ["--kv-cache-memory-bytes", str(KV_BYTES)]
GENERATES = ("--enable-prompt-embeds",)
POOLS = ("--runner", "pooling", "--served-model-name", EMBEDDER)
# Who has a CURVE certificate for the cores' sockets, and what they may do: `--target curve`.
ALL = "read, generate, events, blocks, control"
RIGHTS = {"server": ALL, "attacker": ALL, "reader": "read"}
PR_SET_PDEATHSIG = 1

JOB = "job"  # a process that server and core may end and start again at any time
# What a process of the engine is, by the first of these parts that its command has.
ROLES = {
    "pagewire.cli.main serve": "server",
    "pagewire.cli.main core": "core",
    "pagewire.engine_core.": JOB,  # a program beside the core: the prover of grammars, the processor of media
    "pagewire.engine_core": "core",
    "pagewire.workers.process.main": "worker",
}


class Fortress:
    """A server that runs. url: where it listens. address: of its core's socket, if that has one of its own, beside
    which there is a core of a model that pools.

    target: "own": the server has a core of its own; "core": it is attached to one over ipc; "curve": over TCP, with
        certificates in the folder `keys`, which is empty else.
    processes: those that were started here, by role: they must end with status 0 when they are asked to.
    pictures: folder of a model that takes pictures, which the server has as well, with a core of its own.
    """

    def __init__(self, target: str, folder: Path, stack: ExitStack, pictures: str = "") -> None:
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.logs = {role: folder / f"{role}.log" for role in ("core", EMBEDDER, "server")}
        self.address: str | None = None
        self.keys = str(folder) if target == "curve" else ""
        stack.callback(self.kill)
        engine = [MODEL, *ENGINE, *GENERATES]
        if target != "own":
            listen, engine = certificates(folder) if self.keys else ([], [])
            for role, options in ((EMBEDDER, POOLS), ("core", GENERATES)):
                self.address = (
                    f"tcp://127.0.0.1:{free_port()}" if self.keys else f"ipc://{folder}/{role}.sock"
                )
                self._start(
                    role, "core", "--listen", self.address, *listen, "--model", MODEL, *ENGINE, *options
                )
                engine = ["--attach", self.address, *engine]
        if pictures:
            more = {"model": pictures, "served_model_name": PICTURES, "allowed_media_domains": [WEB_NETWORK]}
            engine += ["--also", json.dumps(more | {"kv_cache_memory_bytes": KV_BYTES})]
        self.url = self._start("server", "serve", *engine, *SERVE)
        self.pids = {role: pids[0] for role, pids in self.roles().items() if role != JOB}

    @property
    def port(self) -> int:
        """The port of the server."""
        return int(self.url.rpartition(":")[2])

    def roles(self) -> dict[str, list[int]]:
        """The ids of all processes that run, by role; those of the model that pools are "embedder"."""
        found: dict[str, list[int]] = {}
        for started in self.processes:
            for process in self._tree(started):
                try:
                    command = " ".join(process.cmdline())
                    if process.status() != psutil.STATUS_ZOMBIE:
                        role = next((role for part, role in ROLES.items() if part in command), JOB)
                        found.setdefault(EMBEDDER if started == EMBEDDER else role, []).append(process.pid)
                except psutil.Error:
                    pass  # it has ended meanwhile
        return found

    def memory(self) -> dict[str, float]:
        """Resident memory in MiB by role: of jobs their sum.

        Server, core and worker are one process each; a second one is a fork that is about to run another program,
        and shares its memory.
        """
        sizes = {role: [resident(pid) for pid in pids] for role, pids in self.roles().items()}
        return {role: sum(held) if role == JOB else max(held) for role, held in sizes.items()}

    def stop(self) -> list[str]:
        """Ask the server to end, then the cores. Returns what went wrong."""
        wrong, others = [], self._tree()
        for role in ("server", "core", EMBEDDER):
            if role not in self.processes:
                continue
            process = self.processes[role]
            process.terminate()
            try:
                if status := process.wait(STOP_SECONDS):
                    wrong.append(f"the {role} ended with status {status}")
            except subprocess.TimeoutExpired:
                wrong.append(f"the {role} did not end within {STOP_SECONDS:g} s of SIGTERM")
        _, alive = psutil.wait_procs(others, 10)
        wrong += [f"process {process.pid} was left behind" for process in alive]
        self.kill()
        return wrong

    def kill(self) -> None:
        """End all that still runs."""
        for process in self._tree():
            try:
                process.kill()
            except psutil.Error:
                pass
        for started in self.processes.values():
            started.kill()
            started.wait()
            if started.stdout is not None:
                started.stdout.close()

    def log_tail(self, lines: int = 15) -> list[str]:
        """The last lines that server and core have logged."""
        tails = []
        for role, path in self.logs.items():
            if path.exists():
                with path.open("rb") as file:
                    file.seek(max(0, path.stat().st_size - 20_000))
                    text = file.read().decode("utf-8", "replace").splitlines()[-lines:]
                tails += [f"{role}: {line[:300]!r}" for line in text]
        return tails

    def _tree(self, *roles: str) -> list[psutil.Process]:
        """The processes that were started in these roles, and their descendants; without roles: in all."""
        processes: dict[int, psutil.Process] = {}
        for started in map(self.processes.__getitem__, roles or self.processes):
            try:
                root = psutil.Process(started.pid)
                processes |= {process.pid: process for process in (root, *root.children(recursive=True))}
            except psutil.Error:
                pass
        return list(processes.values())

    def _start(self, role: str, *arguments: str) -> str:
        """Start a command and wait until it is ready; what it says of where it listens.

        Raises:
            RuntimeError: it did not start.
        """
        with self.logs[role].open("w") as log:
            self.processes[role] = process = subprocess.Popen(
                [sys.executable, "-m", "pagewire.cli.main", *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                preexec_fn=_confine,
                **OWN_GROUP,  # and the session of the client: Linux divides processors among sessions first
            )
        assert process.stdout is not None
        ready, _, where = process.stdout.readline().strip().partition(" ")
        if ready != "ready":
            raise RuntimeError(f"the {role} did not start:\n{self.logs[role].read_text()[-2000:]}")
        return where


def resident(pid: int) -> float:
    """Resident memory of a process in MiB; 0 if it has ended."""
    try:
        return float(psutil.Process(pid).memory_info().rss) / 2**20
    except psutil.Error:
        return 0.0


def _confine() -> None:
    """In the child: end with the siege, however that ends, and have few descriptors."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))


def free_port() -> int:
    """A TCP port of loopback on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def certificates(folder: Path) -> tuple[list[str], list[str]]:
    """Make certificates, and a file of `RIGHTS`; the options of a core and of a server that use them."""
    clients = folder / "clients"
    clients.mkdir()
    zmq.auth.create_certificates(folder, "core")
    for name in RIGHTS:
        public, _ = zmq.auth.create_certificates(folder, name)
        shutil.copy(public, clients)
    rights = folder / "rights.yaml"
    rights.write_text("".join(f"curve:{name}: [{given}]\n" for name, given in RIGHTS.items()))
    own = ["--curve-secret", str(folder / "core.key_secret"), "--curve-clients", str(clients)]
    return [*own, "--rights", str(rights)], [
        *("--curve-secret", str(folder / "server.key_secret")),
        *("--curve-server", str(folder / "core.key")),
    ]


@contextmanager
def besieged(target: str, pictures: str = "") -> Iterator[Fortress]:
    """A server on the demo model for the length of a block. target, pictures: as `Fortress` has them."""
    with tempfile.TemporaryDirectory(prefix="siege-") as folder, ExitStack() as stack:
        os.environ.pop("PAGEWIRE_API_KEY", None)
        yield Fortress(target, Path(folder), stack, pictures)
