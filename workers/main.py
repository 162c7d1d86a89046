"""The worker process.

    python -m pagewire.workers.main --connect ADDRESS --identity NAME --lifeline FD

It connects, says hello, and then does what the core says until it is told to stop or the core is gone.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from collections import deque
from typing import TYPE_CHECKING, Any

import zmq

from pagewire.ipc import logs
from pagewire.ipc.codec import Codec
from pagewire.ipc.lifeline import die_with_parent
from pagewire.ipc.messages import (
    PROTOCOL,
    LoadModel,
    Masks,
    Progress,
    Shutdown,
    StepPlan,
    ToWorker,
    WorkerCall,
    WorkerFailed,
    WorkerHello,
    WorkerReply,
)
from pagewire.ipc.sockets import connect_dealer, receive, send
from pagewire.kernels.cpu.arena import Reserve, weight_bytes

if TYPE_CHECKING:
    from pagewire.workers.runner import Runner

LINGER_MS = 2000
# A thread that waits for the others spins this long before it sleeps. The runtime's own default spins for
# milliseconds, and whenever any other process wants the CPU (the core, a frontend), the spinning threads keep
# it from the one thread they wait for: steps then take hundreds of times as long.
SPIN_COUNT = "100"


class Connection:
    """Messages from and to the core."""

    def __init__(self, address: str, identity: str) -> None:
        self._socket = connect_dealer(zmq.Context.instance(), address, identity.encode())
        self._codec: Codec[ToWorker] = Codec(ToWorker)
        self._early: deque[ToWorker] = deque()

    def send(self, message: Any) -> None:
        """Send to the core."""
        send(self._socket, self._codec.encode(message))

    def receive(self) -> ToWorker:
        """Wait for the core's next message."""
        return self._early.popleft() if self._early else self._codec.decode(receive(self._socket))

    def receive_masks(self, step_id: int) -> Masks | None:
        """Wait for the masks of a step; None if the core stops instead. Other messages keep for later."""
        while True:
            message = self._codec.decode(receive(self._socket))
            if isinstance(message, Masks) and message.step_id == step_id:
                return message
            self._early.append(message)
            if isinstance(message, Shutdown):
                return None

    def close(self) -> None:
        """Close, once what was sent is out."""
        self._socket.close(LINGER_MS)


def serve(connection: Connection) -> None:
    """Obey until told to stop.

    Raises:
        LoadError: the model cannot be loaded as asked. Others: a step failed.
    """
    connection.send(WorkerHello(PROTOCOL, os.getpid()))
    runner: Runner | None = None
    idle_since = time.monotonic()
    while True:
        message = connection.receive()
        if isinstance(message, LoadModel):
            runner = start(connection, message)
        elif isinstance(message, StepPlan):
            connection.send(step(connection, runner, message, idle_since))
        elif isinstance(message, WorkerCall):
            connection.send(answer(runner, message))
        else:
            return
        idle_since = time.monotonic()


def start(connection: Connection, load: LoadModel) -> Runner:
    """Load the model, and tell what was learned. Imports torch, so late; memory for weights is taken meanwhile."""
    reserve = reserve_weights(load)
    from pagewire.workers.runner import Runner

    def report(phase: str, seconds: float) -> None:
        connection.send(Progress(phase, seconds))

    runner, ready = Runner.start(load, report, reserve)
    connection.send(ready)
    return runner


def reserve_weights(load: LoadModel) -> Reserve | None:
    """Memory for the weights, where they will be packed on this machine."""
    size = weight_bytes(load.model_path) if load.device == "cpu" else 0
    try:
        return Reserve(size) if size else None
    except OSError:
        return None  # loading will say it better


def step(connection: Connection, runner: Runner | None, plan: StepPlan, idle_since: float) -> Any:
    """The outcome of a step."""
    from pagewire.workers.runner import timed_step

    if runner is None:
        raise RuntimeError("a plan came before a model")
    return timed_step(runner, plan, idle_since, lambda: connection.receive_masks(plan.step_id))


def answer(runner: Runner | None, call: WorkerCall) -> WorkerReply:
    """The outcome of a call; a caller's mistake must not end the worker."""
    try:
        if runner is None:
            raise RuntimeError("no model is loaded yet")
        return WorkerReply(call.call_id, runner.call(call.method, call.args, call.kwargs))
    except Exception as error:
        return WorkerReply(call.call_id, error=str(error), error_type=type(error).__name__)


def is_load_error(error: BaseException) -> bool:
    """A fault of the configuration: starting again would end the same way."""
    module = sys.modules.get("pagewire.workers.errors")
    return module is not None and isinstance(error, module.LoadError)


def main() -> int:
    """Run the process. Returns its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connect", required=True, metavar="ADDRESS")
    parser.add_argument("--identity", required=True, metavar="NAME")
    parser.add_argument("--lifeline", required=True, type=int, metavar="FD")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read when torch is imported
    die_with_parent(options.lifeline)
    logs.configure()
    connection = Connection(options.connect, options.identity)
    try:
        serve(connection)
    except Exception as error:
        fatal = is_load_error(error)
        cause = str(error) if fatal else f"{type(error).__name__}: {error}"
        connection.send(WorkerFailed(cause, "" if fatal else traceback.format_exc(), fatal))
        connection.close()
        return 1
    connection.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
