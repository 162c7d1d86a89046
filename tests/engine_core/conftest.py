"""A whole core in a thread, with a fake worker process, and raw frontends that speak to it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from pagewire.engine_core.clients import clients
from pagewire.engine_core.clients.access import Access
from pagewire.engine_core.clients.clients import MAX_BACKLOG_BYTES, Clients
from pagewire.engine_core.config.config import EngineConfig
from pagewire.engine_core.serving import Serving
from pagewire.engine_core.wiring import open_core
from pagewire.engine_core.workers.group import WorkerGroup
from pagewire.engine_core.workers.launchers.interface import Launcher
from pagewire.engine_core.workers.launchers.local import LocalLauncher
from pagewire.ipc.host.gate import Gate
from pagewire.ipc.options.engine_args import EngineArgs
from pagewire.ipc.wire.codec import Codec
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.lora import AdapterSource
from pagewire.ipc.wire.messages import (
    PROTOCOL,
    Call,
    CallAnswer,
    Deltas,
    Hello,
    Ping,
    Pong,
    Submit,
    ToFrontend,
    Welcome,
)
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.requests import Request, TokenDelta
from pagewire.ipc.wire.sockets import bind_router, connect_dealer, receive, send

FAKE_WORKER = (sys.executable, str(Path(__file__).with_name("fake_worker.py")))
WAIT_MS = 20_000


class RawFrontend:
    """A frontend made of a socket and a codec: says exactly what a test wants said."""

    def __init__(self, context: zmq.Context[Any], address: str, name: str) -> None:
        self.socket = connect_dealer(context, address, name.encode())
        self.codec: Codec[ToFrontend] = Codec(ToFrontend)
        self.name = name
        self.outputs: dict[tuple[int, int], list[int]] = {}
        self.ends: dict[tuple[int, int], TokenDelta] = {}
        self.longest_delta = 0

    def say(self, message: Any) -> None:
        send(self.socket, self.codec.encode(message))

    def hear(self) -> ToFrontend:
        """The next message that is not a heartbeat."""
        while True:
            assert self.socket.poll(WAIT_MS), f"{self.name} waits in vain"
            message = self.codec.decode(receive(self.socket))
            if not isinstance(message, Pong):
                return message
            self.say(Ping())

    def attach(self) -> Welcome:
        self.say(Hello(PROTOCOL, "test", os.getpid(), self.name))
        welcome = self.hear()
        assert isinstance(welcome, Welcome), welcome
        return welcome

    def submit(
        self,
        key: int,
        prompt: list[int],
        seed: int = 7,
        adapter: AdapterSource | None = None,
        **params: Any,
    ) -> None:
        params.setdefault("max_tokens", 8)
        task = SamplingParams(**params)
        request = Request(key, f"r{key}", Prompt(prompt), task, seed, eos_token_id=999, adapter=adapter)
        self.say(Submit([request]))

    def take(self, message: ToFrontend) -> None:
        assert isinstance(message, Deltas), message
        for delta in message:
            place = (delta.key, delta.index)
            assert place not in self.ends, f"{delta} after the end"
            self.outputs.setdefault(place, []).extend(delta.token_ids)
            self.longest_delta = max(self.longest_delta, len(delta.token_ids))
            if delta.finish_reason is not None:
                self.ends[place] = delta

    def finish(self, *places: tuple[int, int]) -> None:
        """Read until all of `places` have ended."""
        while not all(place in self.ends for place in places):
            self.take(self.hear())

    def call(self, method: str, *args: Any, **kwargs: Any) -> CallAnswer:
        self.begin_call(1, method, *args, **kwargs)
        return self.answer()

    def begin_call(self, call_id: int, method: str, *args: Any, **kwargs: Any) -> None:
        self.say(Call(call_id, method, list(args), kwargs))

    def answer(self) -> CallAnswer:
        """The next answer to a call; deltas before it are taken."""
        while not isinstance(message := self.hear(), CallAnswer):
            self.take(message)
        return message

    def status(self) -> dict[str, Any]:
        result = self.call("status").result
        assert isinstance(result, dict)
        return result

    def kill_worker(self) -> None:
        """Kill the worker, or the next one if it is about to be replaced."""
        while (pid := self.status()["worker_pid"]) is None:
            pass
        os.kill(pid, signal.SIGKILL)

    def wait_for_start(self, number: int) -> None:
        """Wait until the worker was started `number` times; an idle one may be replaced after all requests."""
        while self.status()["worker_starts"] < number:
            pass


class RunningCore:
    """A core in a thread, and the frontends made for it."""

    def __init__(
        self,
        address: str,
        args: EngineArgs,
        worker_options: list[str],
        silence: float,
        folder: Path,
        access: Access | None,
        max_backlog_bytes: int,
        launcher: Launcher | None = None,
        first_adapter: AdapterSource | None = None,
    ) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.address = address
        self.gate = None if access is None else Gate(self.context, access.admit)
        if self.gate is not None:
            self.gate.start()
        queues = {"receive_queue": clients.RECEIVE_QUEUE, "send_queue": clients.SEND_QUEUE}
        socket = bind_router(self.context, address, guarded=access is not None, **queues)
        self.clients = Clients(socket, silence, access, max_backlog_bytes)
        config = EngineConfig(args, folder, {}, 999, first_adapter=first_adapter)
        command = [*FAKE_WORKER, *worker_options]
        self.workers = WorkerGroup(config.worker_config(), launcher or LocalLauncher(self.context, command))
        self.core = open_core(config, self.workers, self.clients)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.core.run()
        except BaseException as error:
            self.error = error

    @property
    def serving(self) -> Serving:
        """What runs requests, for which this waits until the workers are ready."""
        deadline = time.monotonic() + WAIT_MS / 1000
        while self.core.serving is None:
            assert self.thread.is_alive() and time.monotonic() < deadline
            time.sleep(0.005)
        return self.core.serving

    def frontend(self, name: str = "test") -> RawFrontend:
        return RawFrontend(self.context, self.address, name)

    def stop(self) -> None:
        self.core.stop(0.0)
        self.core.stop(0.0)
        self.thread.join(WAIT_MS / 1000)
        assert not self.thread.is_alive()
        if self.gate is not None:
            self.gate.stop()
        self.context.destroy(0)


@pytest.fixture
def start_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RunningCore]]:
    """Start a core: `start_core(worker_options=[...], silence=30, folder=..., num_workers=1, **engine options)`.

    access: with it, only peers that it admits can attach. launcher: of the workers; default: as processes of this
    one. first_adapter: that the core loads at its start.
    """
    monkeypatch.setattr("pagewire.engine_core.workers.restarts.FIRST_PAUSE_SECONDS", 0.02)
    cores: list[RunningCore] = []

    def start(
        worker_options: list[str] | None = None,
        silence: float = 30.0,
        folder: Path = Path("/nowhere"),
        num_workers: int = 1,
        access: Access | None = None,
        max_backlog_bytes: int = MAX_BACKLOG_BYTES,
        launcher: Launcher | None = None,
        first_adapter: AdapterSource | None = None,
        **options: Any,
    ) -> RunningCore:
        args = EngineArgs(**({"max_model_len": 128, "disable_log_stats": True} | options))
        args.tensor_parallel_size = num_workers
        address = f"ipc://{tmp_path}/core{len(cores)}.sock"
        place = (address, args, worker_options or [], silence, folder, access, max_backlog_bytes)
        cores.append(RunningCore(*place, launcher, first_adapter))
        return cores[-1]

    yield start
    for core in cores:
        core.stop()
