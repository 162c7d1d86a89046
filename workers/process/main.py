"""The worker process.

    python -m pagewire.workers.process.main --connect ADDRESS --identity NAME --lifeline FD [--key FILE]

The process connects to the core, loads the model and runs steps, until it gets `Shutdown` or the core has ended.
With `--identity-from FD` it first imports all that it will need, and waits there for its name.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from pagewire.ipc import logs
from pagewire.ipc.errors import error_text, error_type
from pagewire.ipc.host.heap import release_spare_memory
from pagewire.ipc.host.lifeline import die_with_parent
from pagewire.ipc.host.priority import take_usual_turns
from pagewire.ipc.join.group_key import GroupKey
from pagewire.ipc.wire.calls import CALLS
from pagewire.ipc.wire.codec import MAX_MESSAGE_BYTES, Codec
from pagewire.ipc.wire.lora import DropAdapter, LoadAdapter
from pagewire.ipc.wire.sockets import CurveKeys, connect_dealer, receive, send
from pagewire.ipc.wire.tier_messages import ForgetBlocks, MoveBlocks
from pagewire.ipc.wire.worker_messages import (
    Loading,
    Masks,
    Progress,
    Shutdown,
    StepPlan,
    ToWorker,
    WorkerCall,
    WorkerConfig,
    WorkerFailed,
    WorkerReply,
)
from pagewire.kernels.cpu.library import expected_isa
from pagewire.workers.checkpoint.headers import WITHOUT_HEADERS, read_headers
from pagewire.workers.checkpoint.read_progress import WEIGHTS
from pagewire.workers.device.machine import machine_memory, runs_on_cpu
from pagewire.workers.errors import LoadError, LostRankError, MemoryShortageError
from pagewire.workers.estimate.figures import Footprint
from pagewire.workers.estimate.fit import check_fit, model_figures, summary
from pagewire.workers.module.registered import take_registrations
from pagewire.workers.process.engine_import import bytes_taken_ahead, import_engine, import_engine_ahead
from pagewire.workers.process.loading_line import LoadingLine
from pagewire.workers.process.progress_signs import ProgressSigns
from pagewire.workers.ranks.introduction import introduce
from pagewire.workers.weight_cache.ahead import WeightsAhead

if TYPE_CHECKING:
    from pagewire.workers.adapters.interface import WorkerAdapters
    from pagewire.workers.run.runner import Runner
    from pagewire.workers.run.step import FinishedStep, RunningStep
    from pagewire.workers.tiers.interface import WorkerTier

logger = logging.getLogger("pagewire.worker")

LINGER_MS = (
    2000  # how long closing the socket may take to send the last message, such as the cause of a failure
)
QUIET_MS = 10  # silence after which spare work begins; the time between two steps is shorter
IDLE_MS = 10_000  # silence after which freed memory is given back, which the next step has to get again
_NOTHING: Iterator[int] = iter(())
# A thread that waits for the others spins this long before it sleeps. The runtime's own default spins for
# milliseconds, and whenever any other process wants the CPU (the core, a frontend), the spinning threads keep
# it from the one thread they wait for: steps then take hundreds of times as long.
SPIN_COUNT = "100"
TIMES_READ = 2  # of a checkpoint's weights: for logits to compare with, and to be packed


class CoreSession:
    """The socket to the core."""

    def __init__(self, address: str, identity: str, curve: CurveKeys | None = None) -> None:
        self.address = address
        self._socket = connect_dealer(zmq.Context.instance(), address, identity.encode(), curve)
        self._codec: Codec[ToWorker] = Codec(ToWorker, trusts=True)
        self._early: deque[ToWorker] = deque()
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._alarm, zmq.POLLIN)
        self._lock = threading.Lock()  # while the model is loaded, two threads send, and none receives

    def send(self, message: Any) -> None:
        """Send a message to the core.

        Raises:
            TypeError, ValueError, OverflowError, RecursionError: the message cannot be encoded, or is too large;
                nothing was sent.
        """
        with self._lock:
            frames = self._codec.encode(message)
            if (size := sum(map(len, frames))) > MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of {size:,} bytes is over the limit of {MAX_MESSAGE_BYTES:,}")
            send(self._socket, frames)

    def wake(self) -> None:
        """Make `receive` return None; for any thread."""
        os.eventfd_write(self._alarm, 1)

    def receive(
        self,
        until: Callable[[], bool] | None = None,
        spare: Iterator[int] = _NOTHING,
        advance: Callable[[], bool] = lambda: False,
    ) -> ToWorker | None:
        """The core's next message, or None after `wake`, or once `until` returns true. Runs `spare` work meanwhile.

        `until` is polled in a busy loop, as a device cannot wake this thread and a step takes milliseconds. Spare
        work begins after `QUIET_MS` without a message, and goes on after as many milliseconds as it yields.
        advance: does a few milliseconds of other work, and returns true while there is more; called once before
        each message, and then until one comes.
        """
        more = advance()
        quiet: int | None = QUIET_MS if until is None else 0
        while not self._early:
            ready = dict(self._poller.poll(0 if more else quiet))
            if self._socket in ready:
                return self._codec.decode(receive(self._socket))
            if ready:
                os.eventfd_read(self._alarm)
                return None
            if until is not None and until():
                return None
            if more:
                more = advance()
                continue
            quiet = next(spare, None) if until is None else 0
        return self._early.popleft()

    def is_quiet(self) -> bool:
        """True if neither a message nor a call of `wake` waits."""
        return not self._early and not self._poller.poll(0)

    @property
    def descriptors(self) -> list[int]:
        """File descriptors of which one becomes readable when it is no longer quiet, if it was when last asked."""
        return [int(self._socket.getsockopt(zmq.FD)), self._alarm]

    def receive_masks(self, step_id: int) -> Masks | None:
        """The masks of a step; None if the core sends `Shutdown` first. Keeps other messages for `receive`."""
        while True:
            message = self._codec.decode(receive(self._socket))
            if isinstance(message, Masks) and message.step_id == step_id:
                return message
            self._early.append(message)
            if isinstance(message, Shutdown):
                return None

    def close(self) -> None:
        """Close the socket after sending what is queued."""
        self._socket.close(LINGER_MS)


def serve(connection: CoreSession, draws: bool = False) -> None:
    """Handle the core's messages until `Shutdown`. draws: see `start`.

    Raises:
        LoadError: the model cannot be loaded with this configuration. Other exceptions: a step failed.
    """
    hello, listener = introduce(connection.address)
    connection.send(hello)
    runner: Runner | None = None
    steps: Pipeline | None = None
    while True:
        if runner is None or steps is None:
            message = connection.receive()
        elif steps.running:
            message = connection.receive(until=steps.reached, advance=runner.load_more)
        else:
            message = connection.receive(spare=idle_work(runner.spare_work), advance=runner.load_more)
        if runner is not None:
            take_adapters(connection, runner.adapters, message)
            take_reports(connection, runner.tier)
        if isinstance(message, WorkerConfig):
            runner = start(connection, message, listener, draws)
            steps = Pipeline(connection, runner)
        elif isinstance(message, StepPlan):
            if steps is None:
                raise RuntimeError("a StepPlan arrived before WorkerConfig")
            steps.launch(message)
        elif steps is not None and steps.running and (message is not None or steps.reached()):
            steps.finish()
        if runner is not None and isinstance(message, MoveBlocks | ForgetBlocks):
            move_blocks(runner.tier, message)
        elif isinstance(message, WorkerCall):
            reply(connection, runner, message)
        elif isinstance(message, Shutdown):
            if runner is not None:
                runner.tier.close()
            return


def idle_work(spare_work: Iterator[None]) -> Iterator[int]:
    """What a worker does while there is nothing to run; yields the milliseconds to wait for a message meanwhile.

    At last it gives back memory: steps leave what they free with malloc, for the next ones (`keep_memory`), and the
    largest may have been much larger than the others.
    """
    for _ in spare_work:
        yield 0
    yield IDLE_MS
    release_spare_memory()


def take_adapters(connection: CoreSession, adapters: WorkerAdapters, message: ToWorker | None) -> None:
    """Report adapters that have been loaded, and load or drop one if a message says so."""
    for loaded in adapters.finished():
        connection.send(loaded)
    if isinstance(message, LoadAdapter):
        adapters.load(message)
    elif isinstance(message, DropAdapter):
        adapters.drop(message.index)


def take_reports(connection: CoreSession, tier: WorkerTier) -> None:
    """Report what has happened in the tier."""
    for report in tier.take_reports():
        connection.send(report)


def move_blocks(tier: WorkerTier, message: MoveBlocks | ForgetBlocks) -> None:
    """Move blocks between memory and the tier, or remove all from there."""
    if isinstance(message, MoveBlocks):
        tier.move(message)
    else:
        tier.forget()


class Pipeline:
    """Overlaps the steps of a runner: the next is launched before the running one is finished."""

    def __init__(self, connection: CoreSession, runner: Runner) -> None:
        from pagewire.workers.run.interface import Quiet  # imports torch, as the runner has by now

        self._connection, self._runner = connection, runner
        self._quiet = Quiet(connection.is_quiet, connection.descriptors)
        self.running: RunningStep | FinishedStep | None = None
        self._idle_since = runner.device.record_event()

    def reached(self) -> bool:
        """True if no step is running, or the running one would finish without waiting."""
        return self.running is None or self.running.reached()

    def launch(self, plan: StepPlan) -> None:
        """Launch a plan and finish the step before it, whose tokens are needed to sample this one."""
        step = self._runner.launch(plan, self._quiet)
        self.finish()
        step.sample(lambda: self._connection.receive_masks(plan.step_id))
        self.running = step
        if step.reached():
            self.finish()

    def finish(self) -> None:
        """Wait for the running step, if any, and send its result."""
        if (step := self.running) is not None:
            self.running = None
            result = step.finish(self._idle_since)
            self._idle_since = step.end
            if step.num_further:
                self._idle_since = self._runner.go_on(step, result, self._quiet)
            self._connection.send(result.by_columns())


def start(
    connection: CoreSession,
    config: WorkerConfig,
    listener: socket.socket | None = None,
    draws: bool = False,
) -> Runner:
    """Load the model and send `Ready`; then, in the background, keep its packed weights for the next start.

    listener: the socket at which other ranks reach this one, if they may be on other machines.
    draws: how far it is may be shown on the terminal.

    While torch is imported, a thread reads kept weights, or takes memory for those that will be packed.

    Raises:
        LoadError: the model cannot be loaded. MemoryShortageError: it would not fit, so its weights were not read.
    """

    line = LoadingLine(config.model_path, draws)

    def report(phase: str, seconds: float) -> None:
        line.ended(phase)
        connection.send(Progress(phase, seconds))

    with progress_signs(connection), line:
        take_registrations(config.registrations)
        sizes = expected_sizes(config)
        if sizes is not None:
            WEIGHTS.begin(TIMES_READ * sizes.file_bytes)
        # Works while torch is imported, in a thread that has begun, or here.
        ahead = WeightsAhead(config, 0 if sizes is None else sizes.panel_bytes)
        import_engine()
        from pagewire.workers.device.open import torch_device
        from pagewire.workers.process.wiring import open_runner
        from pagewire.workers.ranks.open import open_collective
        from pagewire.workers.weight_cache.cached_loading import keep_in_background

        began = time.monotonic()
        collective = open_collective(config.parallel, torch_device(config), listener)
        if collective.size > 1:
            report("meeting", time.monotonic() - began)
        runner, ready = open_runner(config, report, ahead, collective, connection.wake)
    ready.figures = None if sizes is None else model_figures(sizes)
    connection.send(ready)
    runner.weights.writer = keep_in_background(runner.model, ahead, runner.collective)
    return runner


def awaited_identity(fd: int) -> str:
    """The name of this process, once it has one.

    Raises:
        SystemExit: it will have none: the core has no use for it.
    """
    import_engine()
    with os.fdopen(fd) as pipe:
        if name := pipe.read():
            return name
    sys.exit(0)


def expected_sizes(config: WorkerConfig) -> Footprint | None:
    """The sizes of a model that fits into memory; None unless it will be packed on the CPU from a checkpoint.

    Raises:
        MemoryShortageError: it does not fit. LoadError: its headers cannot be read.
    """
    if not runs_on_cpu(config.device) or config.load_format in WITHOUT_HEADERS:
        return None
    headers = read_headers(config.model_path, config.hf_overrides, config.trust_remote_code)
    try:
        total, available = machine_memory(config.parallel.local_size)
        sizes = check_fit(headers, config, expected_isa(), total, available + bytes_taken_ahead())
    except MemoryShortageError:
        raise
    except ValueError:
        return None  # loading will fail, with a better message
    logger.info("model: %s", summary(sizes))
    return sizes


def progress_signs(connection: CoreSession) -> ProgressSigns:
    """A context in which the core hears every two seconds that the work goes on, as long as it does."""
    return ProgressSigns(lambda: connection.send(Loading()))


def reply(connection: CoreSession, runner: Runner | None, call: WorkerCall) -> None:
    """Run a call and send its reply; an error instead of a result that no message can hold."""
    declared = CALLS.get(call.method)
    shows_progress = declared is not None and declared.shows_progress
    try:
        with progress_signs(connection) if shows_progress else nullcontext():
            answered = answer(runner, call)
        connection.send(answered)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        text = f"{call.method}: the result cannot be sent: {error_text(error)}"
        connection.send(WorkerReply(call.call_id, error=text, error_type=error_type(error)))


def answer(runner: Runner | None, call: WorkerCall) -> WorkerReply:
    """The reply to a call. Its exceptions are sent back: a wrong call must not end the worker.

    Raises:
        LostRankError: the other ranks of the group wait for this one, which cannot go on.
    """
    try:
        if runner is None:
            raise RuntimeError("no model is loaded yet")
        from pagewire.workers.process import calls  # imports torch, as the runner has by now

        return WorkerReply(call.call_id, calls.call(runner, call.method, call.args, call.kwargs))
    except LostRankError:
        raise
    except Exception as error:
        return WorkerReply(call.call_id, error=error_text(error), error_type=error_type(error))


def read_key(name: str) -> GroupKey:
    """The key of the group in a file, or from standard input for "-".

    Raises:
        see `GroupKey.read`.
    """
    return GroupKey.parse(sys.stdin.read(), "standard input") if name == "-" else GroupKey.read(Path(name))


def main() -> int:
    """Entry point of the process. Returns its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connect", required=True, metavar="ADDRESS")
    names = parser.add_mutually_exclusive_group(required=True)
    names.add_argument("--identity", metavar="NAME")
    names.add_argument(
        "--identity-from", type=int, metavar="FD", help="a pipe that says it when it is needed"
    )
    parser.add_argument("--lifeline", required=True, type=int, metavar="FD")
    parser.add_argument("--key", metavar="FILE", help="key of the group, needed over TCP; -: standard input")
    parser.add_argument(
        "--progress", action="store_true", help="show on the terminal how far the first start is"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which stops this process
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # it logs to the terminal of another process group
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read when torch is imported
    die_with_parent(options.lifeline)
    take_usual_turns()
    logs.configure()
    key = None if options.key is None else read_key(options.key)
    if options.identity is not None:
        import_engine_ahead()
    identity = options.identity or awaited_identity(options.identity_from)
    connection = CoreSession(options.connect, identity, None if key is None else key.worker)
    try:
        serve(connection, options.progress)
    except Exception as error:
        fatal = isinstance(error, LoadError)  # another start would fail the same way
        cause = str(error) if fatal else f"{type(error).__name__}: {error}"
        trace = "" if fatal else traceback.format_exc()
        lacks_memory = isinstance(error, MemoryShortageError)
        connection.send(WorkerFailed(cause, trace, fatal, error_type(error), lacks_memory))
        connection.close()
        return 1
    connection.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
