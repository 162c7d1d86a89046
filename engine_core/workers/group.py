"""The core's handle on its worker processes: start, messages, supervision, restart.

    start -> WorkerHello -> WorkerConfig -> Progress, Loading ... -> Ready -> StepPlan <-> StepResult ...

A group has one process for each rank. They get their configuration once all of them have connected, since it says
how they meet. What the core sends goes to all ranks; their answers come back as one message once the last of them
has answered. So a step lasts until every rank has run it, and a rank that hangs is noticed like a single worker
that hangs. The result of a step is that of the first rank of the last stage, which samples. The ranks live and die
together: the end of one ends the others.
"""

from __future__ import annotations

import logging
import secrets
import select
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import zmq

from pagewire.engine_core.workers.launchers.early import identity_of
from pagewire.engine_core.workers.launchers.interface import Launcher, Process
from pagewire.engine_core.workers.places import places
from pagewire.engine_core.workers.tier_reports import GroupTierReports
from pagewire.ipc.errors import ProtocolError, received_error
from pagewire.ipc.host.descriptors import SpareDescriptors
from pagewire.ipc.wire.codec import Buffer, Codec
from pagewire.ipc.wire.lora import AdapterLoaded
from pagewire.ipc.wire.messages import PROTOCOL
from pagewire.ipc.wire.sockets import receive, send
from pagewire.ipc.wire.steps import Masks, StepPlan, StepResult
from pagewire.ipc.wire.tier_messages import TierReport
from pagewire.ipc.wire.worker_messages import (
    FromWorker,
    Progress,
    Ready,
    WorkerConfig,
    WorkerFailed,
    WorkerHello,
    WorkerReply,
)

logger = logging.getLogger("pagewire.core")

SPARE_DESCRIPTORS = 8  # kept for the start of a process: pipes, a pidfd, its connection
# Fields of `Ready` that are the same in every rank of a group.
MUST_AGREE = (
    "architecture",
    "dtype",
    "vocab_size",
    "max_model_len",
    "eos_token_id",
    "pooling",
    "embedding_size",
    "short_length",
    "encoder_layers",
)

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


FromGroup: TypeAlias = Ready | StepResult | GroupReply | WorkerFailed | AdapterLoaded | TierReport


@dataclass(slots=True)
class Rank:
    """A process of the group, and what it has sent.

    last_sign: monotonic time of its last message, or of its start. hello, ready: None until it has sent them.
    """

    process: Process
    last_sign: float
    hello: WorkerHello | None = None
    ready: Ready | None = None


class WorkerGroup:
    """The worker processes of a core, which may be started again and again.

    config: what all ranks load, from their next start on; `config.parallel` has what is the same for all, such as
        their number.
    launcher: starts their processes.

    Attributes:
        size: number of ranks.
        ready: the merged `Ready` of all ranks; None while one of them is loading.
        failure: the first cause that a process sent before it exited; None if none did.
        exit_fd: a file descriptor that is readable from the end of any process until `reap`.
        num_starts: how often the group was started.
        last_sign: monotonic time of the last message of the group, for which every rank has sent its own.
        last_message: monotonic time of the last message of any rank.
        longest_step: seconds of the longest step since the workers were started.
    """

    def __init__(self, config: WorkerConfig, launcher: Launcher) -> None:
        self.size = config.parallel.size
        self.socket, self.address = launcher.listener.socket, launcher.listener.address
        self.ready: Ready | None = None
        self.failure: WorkerFailed | None = None
        self.num_starts = 0
        self.last_sign = self.last_message = self.longest_step = 0.0
        self._launcher, self.config = launcher, config
        self._killed = False
        self._sampling = self.size - config.parallel.num_shards  # the first rank of the last stage
        self._spare = SpareDescriptors(SPARE_DESCRIPTORS * self.size)
        self._codec: Codec[FromWorker] = Codec(FromWorker)
        self._ranks: dict[bytes, Rank] = {}  # by identity, in the order of the ranks
        self._partial: dict[tuple[type, int], dict[int, Any]] = {}  # answers of some ranks, by rank
        self._tiers = GroupTierReports(self.size)
        self._exits = select.epoll()
        self.exit_fd = self._exits.fileno()

    @property
    def pids(self) -> list[int]:
        """Process ids in the order of the ranks; none while the group does not run."""
        return [rank.process.pid for rank in self._ranks.values()]

    @property
    def obstacles(self) -> str:
        """What the start of the processes still waits for, as text; empty if for nothing."""
        return "; ".join(filter(None, dict.fromkeys(rank.process.obstacle for rank in self._ranks.values())))

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

    def _start_process(self, number: int) -> None:
        identity = identity_of(self.num_starts, number)
        process = self._launcher.start(number, self.address, identity)
        rank = self._ranks[process.identity] = Rank(process, time.monotonic())
        self._exits.register(process.exit_fd, select.EPOLLIN)
        pid = f" (pid {process.pid})" if process.pid else ""
        logger.info("worker %d%s started%s", self.num_starts, self._label(rank), pid)

    def start_ahead(self) -> None:
        """Have processes ready for the next start, where the launcher can."""
        for rank in range(self.size):
            self._launcher.start_ahead(rank, self.address)

    def end_ahead(self) -> None:
        """End the processes that wait for the next start."""
        self._launcher.end_ahead()

    @property
    def accepting(self) -> bool:
        """True while the workers take plans and calls: they are ready, and are not being killed."""
        return self.ready is not None and not self._killed

    def silence(self, now: float) -> float:
        """Seconds since the last message of any rank that is not ready; 0 if all are, or they are being killed.

        One that has loaded waits for the others, so the group hangs only once none of them gives a sign.
        """
        if self.ready is not None or self._killed:
            return 0.0
        signs = [rank.last_sign for rank in self._ranks.values() if rank.ready is None]
        return now - max(signs, default=now)

    def kill(self, why: str = "") -> None:
        """Kill all processes without waiting; `exit_fd` reports their exit. why: the cause, for `reap`."""
        if why and self.failure is None:
            self.failure = WorkerFailed(why)
        self._killed = True
        for rank in self._ranks.values():
            rank.process.kill()

    def reap(self) -> str:
        """End the whole group after one of its processes has ended; returns why that ended, as text."""
        causes = [
            f"{cause}{self._label(rank)}"
            for rank in self._ranks.values()
            if (cause := rank.process.exit_cause) is not None
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
        self._launcher.close()

    def _forget_all(self) -> list[Process]:
        processes = [rank.process for rank in self._ranks.values()]
        self._ranks = {}
        for process in processes:
            with suppress(FileNotFoundError):  # its registration may be what has failed
                self._exits.unregister(process.exit_fd)
        self.ready = None
        self._partial.clear()
        return processes

    # ------------------------------------------------------------ messages

    def send(self, message: Any) -> None:
        """Send to all processes; masks to those that sample, the last stage, and embeddings to the first stage.

        For a process that has just ended nothing happens: `exit_fd` reports that.
        """
        frames = later = self._codec.encode(message)
        if self._sampling and isinstance(message, StepPlan) and any(row.media for row in message.rows):
            later = self._codec.encode(without_embeddings(message))
        first = self._sampling if isinstance(message, Masks) else 0
        for rank in self._ranks.values():
            if rank.process.rank >= first:
                in_first_stage = rank.process.rank < self.config.parallel.num_shards
                self._send_to(rank, frames if in_first_stage else later)

    def messages(self) -> Iterator[FromGroup]:
        """The messages of the group, from those of its processes that have arrived."""
        while True:
            try:
                identity, *frames = receive(self.socket, zmq.NOBLOCK)
            except zmq.Again:
                return
            rank = self._ranks.get(bytes(identity))
            if rank is None:
                continue
            rank.last_sign = self.last_message = time.monotonic()
            try:
                message = self._take(rank, self._codec.decode(frames))
            except ProtocolError as error:
                logger.error("invalid message from the worker%s: %s", self._label(rank), error)
                self.kill()
                return
            if message is not None:
                self.last_sign = rank.last_sign
                yield message

    def _take(self, rank: Rank, message: FromWorker) -> FromGroup | None:
        """Handle the message of one rank; returns that of the group once all ranks have sent theirs, else None."""
        if isinstance(message, StepResult):
            self.longest_step = max(self.longest_step, message.worker_us / 1e6)
            results = self._gather(rank, message.step_id, message)
            return None if results is None else merged_result(results, self._sampling)
        if isinstance(message, WorkerReply):
            replies = self._gather(rank, message.call_id, message)
            return None if replies is None else GroupReply(message.call_id, replies)
        if isinstance(message, AdapterLoaded):
            loaded = self._gather(rank, message.index, message)
            return None if loaded is None else merged_adapter(loaded)
        if isinstance(message, TierReport):
            return self._take_tier_report(rank, message)
        if isinstance(message, WorkerHello):
            self._handshake(rank, message)
        elif isinstance(message, Progress):
            logger.info("worker%s: %s took %.2f s", self._label(rank), message.phase, message.seconds)
        elif isinstance(message, Ready):
            return self._take_ready(rank, message)
        elif isinstance(message, WorkerFailed):
            message.error += self._label(rank)
            self.failure = self.failure or message
            return message
        return None

    def _gather(self, rank: Rank, number: int, message: Any) -> list[Any] | None:
        """The messages of all ranks of this type and number, by rank; None while some are missing."""
        if self.size == 1:
            return [message]
        key = (type(message), number)
        messages = self._partial.setdefault(key, {})
        messages[rank.process.rank] = message
        if len(messages) < self.size:
            return None
        del self._partial[key]
        return [messages[number] for number in range(self.size)]

    def _take_ready(self, rank: Rank, ready: Ready) -> Ready | None:
        rank.ready = ready
        all_ready = [other.ready for other in self._ranks.values() if other.ready is not None]
        if len(all_ready) < self.size:
            return None
        self._tiers = GroupTierReports(self.size)
        reports = [
            self._tiers.merged(number, each) for number, own in enumerate(all_ready) for each in own.tier
        ]
        try:
            self.ready = msgspec.structs.replace(merged(all_ready), tier=list(filter(None, reports)))
        except ValueError as error:
            self._refuse(str(error))
        self._spare.refill()
        return self.ready

    def _take_tier_report(self, rank: Rank, report: TierReport) -> TierReport | None:
        """The report of the group; those that come before all ranks are ready are a part of its `Ready`."""
        if self.ready is not None:
            return self._tiers.merged(rank.process.rank, report)
        if rank.ready is not None:
            rank.ready.tier.append(report)
        return None

    def _handshake(self, rank: Rank, hello: WorkerHello) -> None:
        if hello.protocol != PROTOCOL:
            self._refuse(f"the worker uses protocol {hello.protocol}, the core protocol {PROTOCOL}")
            return
        rank.hello = hello
        hellos = [other.hello for other in self._ranks.values() if other.hello is not None]
        if len(hellos) == self.size:
            rendezvous = f"pagewire-{secrets.token_hex(16)}"
            for other, place in zip(
                self._ranks.values(), places(hellos, rendezvous, self.config.parallel), strict=True
            ):
                config = msgspec.structs.replace(self.config, parallel=place)
                self._send_to(other, self._codec.encode(config))

    def _refuse(self, why: str) -> None:
        """End the group for a reason that another start would not change."""
        self.failure = WorkerFailed(why, fatal=True)
        self.kill()

    def _send_to(self, rank: Rank, frames: Sequence[Buffer]) -> None:
        try:
            send(self.socket, [rank.process.identity, *frames], zmq.NOBLOCK)
        except zmq.Again:
            logger.error("the worker%s reads no messages; killing it", self._label(rank))
            self.kill("the worker reads no messages")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise

    def _label(self, rank: Rank) -> str:
        return f" (rank {rank.process.rank})" if self.size > 1 else ""


def without_embeddings(plan: StepPlan) -> StepPlan:
    """A plan for stages behind the first, which get hidden states in the place of embeddings."""
    rows = [msgspec.structs.replace(row, media=[]) if row.media else row for row in plan.rows]
    return msgspec.structs.replace(plan, rows=rows)


def merged(readies: Sequence[Ready]) -> Ready:
    """The `Ready` of a group, given those of its ranks: the fewest blocks and slots, and the sum of the memory.

    A stage of a pipeline whose layers keep no states has no state slots, and needs none.

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
        num_states=min((ready.num_states for ready in readies if ready.num_states), default=0),
        bytes_per_state=sum(ready.bytes_per_state for ready in readies),
        num_swap_blocks=min(ready.num_swap_blocks for ready in readies),
        num_swap_states=min(ready.num_swap_states for ready in readies),
        weight_bytes=sum(ready.weight_bytes for ready in readies),
        startup_seconds=combined(max, [ready.startup_seconds for ready in readies]),
        memory=combined(sum, [ready.memory for ready in readies]),
    )


def merged_result(results: Sequence[StepResult], sampling: int) -> StepResult:
    """The result of a group: that of the rank that samples, with the time of the one that encodes media."""
    results[sampling].encode_us = max(result.encode_us for result in results)
    return results[sampling]


def merged_adapter(loaded: Sequence[AdapterLoaded]) -> AdapterLoaded:
    """What all ranks say of an adapter: the first error, with its rank if they differ, or the sum of the bytes."""
    errors = {message.error for message in loaded}
    for rank, message in enumerate(loaded):
        if message.error is not None:
            place = f" (rank {rank})" if len(errors) > 1 else ""
            return msgspec.structs.replace(message, error=message.error + place)
    first = loaded[0]
    if any(message.content != first.content for message in loaded):
        return AdapterLoaded(
            first.index,
            error="its files were replaced while the workers read them, or differ between their machines",
            error_type="ValueError",
        )
    return msgspec.structs.replace(first, num_bytes=sum(message.num_bytes for message in loaded))


def properties(ready: Ready) -> dict[str, Any]:
    """The properties that all workers of a group must share, by name."""
    kind_of_device = ready.device.partition(":")[0]
    return {name: getattr(ready, name) for name in MUST_AGREE} | {"the kind of device": kind_of_device}


def combined(combine: Callable[[list[Any]], Any], tables: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A table with `combine` of each name's values in those that have it."""
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: combine([table[name] for table in tables if name in table]) for name in names}
