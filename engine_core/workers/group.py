"""The core's handle on its worker processes: start, messages, supervision, restart.

    start -> WorkerHello -> WorkerConfig -> Progress, Loading ... -> Ready -> StepPlan <-> StepResult ...

A group has one process for each rank. What the core sends goes to all ranks; their answers come back as one message
once the last of them has answered. So a step lasts until every rank has run it, and a rank that hangs is noticed
like a single worker that hangs. The ranks live and die together: the end of one ends the others.
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import zmq

from pagewire.engine_core.workers.process import WORKER_COMMAND, WorkerProcess
from pagewire.ipc.address_lock import AddressLock
from pagewire.ipc.codec import Buffer, Codec
from pagewire.ipc.descriptors import SpareDescriptors
from pagewire.ipc.errors import ProtocolError, received_error
from pagewire.ipc.messages import PROTOCOL
from pagewire.ipc.sockets import bind_router, private_address, receive, send
from pagewire.ipc.worker_messages import (
    FromWorker,
    Progress,
    Ready,
    StepResult,
    WorkerConfig,
    WorkerFailed,
    WorkerHello,
    WorkerReply,
)

logger = logging.getLogger("pagewire.core")

SPARE_DESCRIPTORS = 8  # kept for the start of a process: pipes, a pidfd, its connection
# Fields of `Ready` that are the same in every rank of a group.
MUST_AGREE = ("architecture", "dtype", "vocab_size", "max_model_len", "eos_token_id", "pooling")

Outcome: TypeAlias = list[Any] | Exception  # of a call: the result of each rank, or an error


@dataclass(frozen=True, slots=True)
class GroupReply:
    """The answers of all ranks to a `WorkerCall`, in the order of the ranks."""

    call_id: int
    replies: list[WorkerReply]

    def outcome(self) -> Outcome:
        """The result of each rank; or the error of the first rank that failed, of the type that it named."""
        for reply in self.replies:
            if reply.error is not None:
                return received_error(reply.error, reply.error_type)
        return [reply.result for reply in self.replies]


FromGroup: TypeAlias = Ready | StepResult | GroupReply | WorkerFailed


class WorkerGroup:
    """The worker processes of a core, which may be started again and again.

    configs: what each rank loads; there are as many ranks. command: the program of a worker.

    Raises:
        ValueError: no configs.

    Attributes:
        size: number of ranks.
        ready: the merged `Ready` of all ranks; None while one of them is loading.
        failure: the first cause that a process sent before it exited; None if none did.
        exit_fd: a file descriptor that is readable from the end of any process until `reap`.
        num_starts: how often the group was started.
        last_sign: monotonic time of the last message of the group, for which every rank has sent its own.
        longest_step: seconds of the longest step since the workers were started.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        configs: Sequence[WorkerConfig],
        command: Sequence[str] = WORKER_COMMAND,
    ) -> None:
        if not configs:
            raise ValueError("a worker group has at least one rank, but no configuration is given")
        self.size = len(configs)
        self.address = private_address(f"worker-{os.getpid()}-{os.urandom(4).hex()}")
        self._lock = AddressLock(self.address)  # tells others that the socket is in use
        self.socket = bind_router(context, self.address)
        self.ready: Ready | None = None
        self.failure: WorkerFailed | None = None
        self.num_starts = 0
        self.last_sign = self.longest_step = 0.0
        self._killed = False
        self._spare = SpareDescriptors(SPARE_DESCRIPTORS * self.size)
        self._configs, self._command = configs, command
        self._codec: Codec[FromWorker] = Codec(FromWorker)
        self._processes: dict[bytes, WorkerProcess] = {}  # by identity, in the order of the ranks
        self._partial: dict[tuple[type, int], dict[int, Any]] = {}  # answers of some ranks, by rank
        self._exits = select.epoll()
        self.exit_fd = self._exits.fileno()

    @property
    def pids(self) -> list[int]:
        """Process ids in the order of the ranks; none while the group does not run."""
        return [process.pid for process in self._processes.values()]

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Start all processes. Each has an identity of its own, so late messages of earlier ones are ignored.

        Raises:
            OSError, MemoryError: a process cannot be started; then none runs.
        """
        self.num_starts += 1
        self.ready = self.failure = None
        self.longest_step, self._killed = 0.0, False
        self._spare.release()  # taken again once the workers are connected
        try:
            for rank in range(self.size):
                self._start_process(rank)
        except BaseException:
            for process in self._forget_all():
                process.reap()
            raise

    def _start_process(self, rank: int) -> None:
        identity = f"worker-{self.num_starts}-{rank}"
        process = WorkerProcess(self._command, self.address, identity, rank)
        self._processes[process.identity] = process
        self._exits.register(process.exit_fd, select.EPOLLIN)
        logger.info("worker %d%s started (pid %d)", self.num_starts, self._label(process), process.pid)

    @property
    def accepting(self) -> bool:
        """True while the workers take plans and calls: they are ready, and are not being killed."""
        return self.ready is not None and not self._killed

    def silence(self, now: float) -> float:
        """Seconds since the last message of a process that is loading; 0 if none is, or they are being killed."""
        if self.ready is not None or self._killed:
            return 0.0
        signs = [process.last_sign for process in self._processes.values() if process.ready is None]
        return now - min(signs, default=now)

    def kill(self, why: str = "") -> None:
        """Kill all processes without waiting; `exit_fd` reports their exit. why: the cause, for `reap`."""
        if why and self.failure is None:
            self.failure = WorkerFailed(why)
        self._killed = True
        for process in self._processes.values():
            process.kill()

    def reap(self) -> str:
        """End the whole group after one of its processes has ended; returns why that ended, as text."""
        causes = [
            f"{cause}{self._label(process)}"
            for process in self._processes.values()
            if (cause := process.exit_cause) is not None
        ]
        why = ", ".join(causes) if self.failure is None else self.failure.error
        for process in self._forget_all():
            process.reap()
        return why

    def stop(self, timeout: float = 5.0) -> None:
        """End all processes, within `timeout` seconds, and close the socket."""
        give_up = time.monotonic() + timeout
        processes = self._forget_all()
        for process in processes:
            process.release()
        for process in processes:
            process.stop(max(0.0, give_up - time.monotonic()))
        self._exits.close()
        self._spare.release()
        self.socket.close()
        self._lock.release()

    def _forget_all(self) -> list[WorkerProcess]:
        processes, self._processes = list(self._processes.values()), {}
        for process in processes:
            with suppress(FileNotFoundError):  # its registration may be what has failed
                self._exits.unregister(process.exit_fd)
        self.ready = None
        self._partial.clear()
        return processes

    # ------------------------------------------------------------ messages

    def send(self, message: Any) -> None:
        """Send to all processes. For one that has just ended nothing happens: `exit_fd` reports that."""
        frames = self._codec.encode(message)
        for process in self._processes.values():
            self._send_to(process, frames)

    def messages(self) -> Iterator[FromGroup]:
        """The messages of the group, from those of its processes that have arrived."""
        while True:
            try:
                identity, *frames = receive(self.socket, zmq.NOBLOCK)
            except zmq.Again:
                return
            process = self._processes.get(bytes(identity))
            if process is None:
                continue
            process.last_sign = time.monotonic()
            try:
                message = self._take(process, self._codec.decode(frames))
            except ProtocolError as error:
                logger.error("invalid message from the worker%s: %s", self._label(process), error)
                self.kill()
                return
            if message is not None:
                self.last_sign = process.last_sign
                yield message

    def _take(self, process: WorkerProcess, message: FromWorker) -> FromGroup | None:
        """Handle the message of one rank; returns that of the group once all ranks have sent theirs, else None."""
        if isinstance(message, StepResult):
            self.longest_step = max(self.longest_step, message.busy_us / 1e6)
            results = self._gather(process, message.step_id, message)
            return None if results is None else results[0]
        if isinstance(message, WorkerReply):
            replies = self._gather(process, message.call_id, message)
            return None if replies is None else GroupReply(message.call_id, replies)
        if isinstance(message, WorkerHello):
            self._handshake(process, message)
        elif isinstance(message, Progress):
            logger.info("worker%s: %s took %.2f s", self._label(process), message.phase, message.seconds)
        elif isinstance(message, Ready):
            return self._take_ready(process, message)
        elif isinstance(message, WorkerFailed):
            message.error += self._label(process)
            self.failure = self.failure or message
            return message
        return None

    def _gather(self, process: WorkerProcess, number: int, message: Any) -> list[Any] | None:
        """The messages of all ranks of this type and number, by rank; None while some are missing."""
        if self.size == 1:
            return [message]
        key = (type(message), number)
        messages = self._partial.setdefault(key, {})
        messages[process.rank] = message
        if len(messages) < self.size:
            return None
        del self._partial[key]
        return [messages[rank] for rank in range(self.size)]

    def _take_ready(self, process: WorkerProcess, ready: Ready) -> Ready | None:
        process.ready = ready
        all_ready = [other.ready for other in self._processes.values() if other.ready is not None]
        if len(all_ready) < self.size:
            return None
        try:
            self.ready = merged(all_ready)
        except ValueError as error:
            self._refuse(str(error))
        self._spare.refill()
        return self.ready

    def _handshake(self, process: WorkerProcess, hello: WorkerHello) -> None:
        if hello.protocol != PROTOCOL:
            self._refuse(f"the worker uses protocol {hello.protocol}, the core protocol {PROTOCOL}")
        else:
            self._send_to(process, self._codec.encode(self._configs[process.rank]))

    def _refuse(self, why: str) -> None:
        """End the group for a reason that another start would not change."""
        self.failure = WorkerFailed(why, fatal=True)
        self.kill()

    def _send_to(self, process: WorkerProcess, frames: Sequence[Buffer]) -> None:
        try:
            send(self.socket, [process.identity, *frames], zmq.NOBLOCK)
        except zmq.Again:
            logger.error("the worker%s reads no messages; killing it", self._label(process))
            self.kill("the worker reads no messages")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise

    def _label(self, process: WorkerProcess) -> str:
        return f" (rank {process.rank})" if self.size > 1 else ""


def merged(readies: Sequence[Ready]) -> Ready:
    """The `Ready` of a group, given those of its ranks: the fewest KV blocks, and the sum of the memory.

    Raises:
        ValueError: the ranks disagree about the model.
    """
    first = readies[0]
    expected = properties(first)
    for rank, ready in enumerate(readies):
        for name, value in properties(ready).items():
            if value != expected[name]:
                raise ValueError(
                    f"the workers of a group must agree, but {name} is {expected[name]} in rank 0 and {value} in "
                    f"rank {rank}"
                )
    return msgspec.structs.replace(
        first,
        num_blocks=min(ready.num_blocks for ready in readies),
        bytes_per_block=sum(ready.bytes_per_block for ready in readies),
        weight_bytes=sum(ready.weight_bytes for ready in readies),
        startup_seconds=combined(max, [ready.startup_seconds for ready in readies]),
        memory=combined(sum, [ready.memory for ready in readies]),
    )


def properties(ready: Ready) -> dict[str, Any]:
    """The properties that all workers of a group must share, by name."""
    kind_of_device = ready.device.partition(":")[0]
    return {name: getattr(ready, name) for name in MUST_AGREE} | {"the kind of device": kind_of_device}


def combined(combine: Callable[[list[Any]], Any], tables: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A table with `combine` of each name's values in those that have it."""
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: combine([table[name] for table in tables if name in table]) for name in names}
