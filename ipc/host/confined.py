"""Runs jobs on untrusted input, which may hang, crash or fill memory, in processes that may be lost.

    Confined.run(job) --a socket per job--> job server (kept warm, one thread) --fork--> the job's own process

The job server (`job_server.py`) imports what jobs need, once, and forks processes for them, one of them ahead. Each
limits its own time, memory and stack: whatever a job does, it ends alone. Only a process whose jobs have all
succeeded may do another one. A job server that is lost or stops answering is replaced, and the jobs that were in it
run again. A job that was killed is remembered for a while, and refused at once when it comes again; not so one that
got too little of a processor within its time, which says nothing about the job.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from pagewire.ipc.errors import EngineBusyError, EngineStalledError, received_error
from pagewire.ipc.fair_queue import FairQueue
from pagewire.ipc.host.lifeline import Child, exit_cause
from pagewire.ipc.shares import Name

START_SECONDS = 60.0  # time that a job server gets to import and load what jobs need, by default
# Time over a job's own limit after which the job server counts as hung. On a machine that is far too busy, one that
# works was seen to be late by seconds, and its successor takes seconds of a processor to be ready.
GRACE_SECONDS = 20.0
NUM_ATTEMPTS = 3  # job servers that may be lost under one job before it is given up
REMEMBER_SECONDS = 600.0  # how long a job that was killed is refused at once
MAX_REMEMBERED = 1024  # killed jobs that are remembered


class Limits(msgspec.Struct, frozen=True, array_like=True):
    """The limits of one job.

    seconds: of wall-clock time. cpu_seconds: of processor time. memory_bytes: of address space, beside that of the
    job server. stack_bytes: of stack. answer_bytes: size of the answer. computes: the job waits for nothing but a
    processor, so `EngineStalledError` if it runs out of `seconds`, which are at least twice `cpu_seconds`, first.
    """

    seconds: float
    cpu_seconds: float
    memory_bytes: int
    stack_bytes: int = 4 << 20
    answer_bytes: int = 1 << 25
    computes: bool = False


class Job(msgspec.Struct, array_like=True):
    """A job on its way to its process."""

    limits: Limits
    data: bytes


class Answer(msgspec.Struct, array_like=True):
    """The answer of a job's process: the result, or an exception as text, type and field."""

    result: bytes = b""
    error: str | None = None
    error_type: str | None = None
    error_place: str | None = None


class ReceivedAnswer(msgspec.Struct, array_like=True):
    """An `Answer` as it is received: its result, which may be large, is not copied."""

    result: memoryview = memoryview(b"")
    error: str | None = None
    error_type: str | None = None
    error_place: str | None = None


class JobKilledError(RuntimeError):
    """A job exceeded its limits or crashed, and its process was ended; the text says which."""


class JobTimeoutError(JobKilledError):
    """A job exceeded its limit of wall-clock or processor time."""


class _ServerLostError(Exception):
    """The job server has ended, or does not answer (`silent`)."""

    def __init__(self, silent: bool = False) -> None:
        super().__init__(silent)
        self.silent = silent


class Confined:
    """Runs jobs in a job server that is started with the first of them.

    module: is run as a program (`python -m`) and calls `serve`. arguments: of the program.
    num_parallel: jobs that run at the same time; others wait for as long as their time limit, tenants in turn
    (`FairQueue`). num_reserved: of these places, those that only tenants without a running job get.
    start_seconds: that the job server gets to import and load what jobs need.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        *,
        num_parallel: int = 2,
        num_reserved: int = 0,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self._start_seconds = start_seconds
        self._command = (sys.executable, "-m", module, *arguments)
        self._server: JobServer | None = None
        self._starting = threading.Lock()
        self._closed = False
        self._places: FairQueue[object] = FairQueue(num_places=num_parallel, num_reserved=num_reserved)
        self._killed: OrderedDict[bytes, tuple[float, JobKilledError]] = OrderedDict()

    def start(self) -> None:
        """Start the job server ahead of the first job, and wait until it is ready.

        Raises:
            Exception: what the program raised. EngineBusyError: it does not start, or has been closed.
        """
        self._running_server()

    @property
    def pid(self) -> int | None:
        """Process id of the job server; None before it is started."""
        return None if self._server is None else self._server.pid

    def run(self, data: bytes, limits: Limits, tenant: Name = "") -> memoryview:
        """Run a job of a tenant and return its result. Blocks; may be called in any thread.

        Raises:
            JobKilledError: the job exceeded a limit or crashed, now or a short time ago.
            EngineStalledError: the job got too little of a processor to say more of it.
            EngineBusyError: other jobs took all places for too long, or the job server cannot be started.
            Exception: what the job raised, with its type as far as `ERROR_TYPES` has it.
        """
        job = msgspec.msgpack.encode(Job(limits, data))
        key = hashlib.sha256(job).digest()
        self._refuse_killed(key)
        with self._places.place(tenant, limits.seconds):
            try:
                return self._result(job, limits)
            except JobKilledError as error:
                # An error of its own: that one holds the job, by its frames.
                self._killed[key] = (time.monotonic() + REMEMBER_SECONDS, type(error)(*error.args))
                if len(self._killed) > MAX_REMEMBERED:
                    self._killed.popitem(last=False)
                raise

    def close(self) -> None:
        """End the job server and all jobs, also while it starts."""
        self._closed = True
        if (server := self._server) is not None:
            server.kill()

    def _result(self, job: bytes, limits: Limits) -> memoryview:
        silent = False
        for _ in range(NUM_ATTEMPTS):
            server = self._running_server()
            try:
                answer = server.run(job, limits)
            except _ServerLostError as error:
                silent = error.silent
                server.kill()
                continue
            if answer.error is not None:
                raise received_error(answer.error, answer.error_type, answer.error_place)
            return answer.result
        if silent:
            raise EngineStalledError(f"the process that runs such jobs did not answer {NUM_ATTEMPTS} times")
        raise JobKilledError(f"the process that runs such jobs was lost {NUM_ATTEMPTS} times")

    def _refuse_killed(self, key: bytes) -> None:
        until, error = self._killed.get(key, (0.0, None))
        if error is not None and time.monotonic() < until:
            raise type(error)(*error.args)

    def _running_server(self) -> JobServer:
        with self._starting:
            if not self._closed and (self._server is None or not self._server.alive):
                self._server = JobServer(self._command)
                if not self._closed:  # else `close` may not have seen this one
                    self._server.greet(self._start_seconds)
            if self._closed or self._server is None:
                self.close()
                raise EngineBusyError("the process for such jobs has been closed")
            return self._server


class JobServer:
    """A running job server, as its parent sees it. `greet` waits until it is ready."""

    def __init__(self, command: Sequence[str]) -> None:
        self._name = " ".join(command[1:3])
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fd = theirs.fileno()
            self._child = Child([*command, "--control", str(fd)], pass_fds=[fd], own_session=True)
        self._killed = self._ready = False

    def greet(self, seconds: float) -> None:
        """Wait for up to `seconds` until it is ready; it is killed if it is not.

        Raises:
            Exception: what the program raised before it was ready.
            EngineBusyError: it has ended. EngineStalledError: it was not ready in time.
        """
        self._control.settimeout(seconds)
        late, greeting = False, b""
        try:
            greeting = self._control.recv(1 << 16)
        except TimeoutError:
            late = True
        except OSError:
            pass
        ready = msgspec.msgpack.decode(greeting, type=Answer) if greeting else None
        if ready is not None and ready.error is None:
            self._ready = True
            return
        self.kill()
        self._control.close()
        if ready is not None and ready.error is not None:
            raise received_error(ready.error, ready.error_type, ready.error_place)
        if late:
            raise EngineStalledError(f"{self._name} did not start within {seconds:g} s")
        raise EngineBusyError(f"{self._name} ended before it was ready")

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.pid

    @property
    def alive(self) -> bool:
        """False once the process has ended."""
        return not self._killed and self._child.poll() is None

    def run(self, job: bytes, limits: Limits) -> ReceivedAnswer:
        """Run a job in a process of its own.

        Raises:
            JobKilledError: that process has ended without an answer, or with one that is too long.
            EngineStalledError: it only computes, and got too little of a processor.
            _ServerLostError: the job server has ended or hangs.
        """
        ours, theirs = socket.socketpair()
        data = bytearray()
        with ours:
            try:
                with theirs:
                    socket.send_fds(self._control, [b"job"], [theirs.fileno()])
                ours.settimeout(limits.seconds + GRACE_SECONDS)
                with suppress(
                    BrokenPipeError, ConnectionResetError
                ):  # killed while it read; its status follows
                    ours.sendall(job)
                    ours.shutdown(socket.SHUT_WR)
                while chunk := ours.recv(1 << 18):
                    data += chunk
                    if len(data) > limits.answer_bytes + 1024:
                        raise JobKilledError(f"its result has more than {limits.answer_bytes} bytes")
            except OSError as error:
                raise _ServerLostError(isinstance(error, TimeoutError)) from error
        if len(data) < STATUS_BYTES:
            raise _ServerLostError
        status = int.from_bytes(data[-STATUS_BYTES:], "little", signed=True)
        if status != 0:
            raise killed_error(status, limits)
        return msgspec.msgpack.decode(memoryview(data)[:-STATUS_BYTES], type=ReceivedAnswer)

    def kill(self) -> None:
        """End the process and all its jobs."""
        if not self._killed:
            self._killed = True
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.kill()
            if self._ready:  # else `greet` waits, and sees the end
                self._control.close()


STATUS_BYTES = (
    4  # an answer ends with a status: 0 from the job's process, else the job server adds its exit status
)
OUT_OF_MEMORY = 3  # exit status of a job's process after a MemoryError


def killed_error(status: int, limits: Limits) -> JobKilledError | EngineStalledError:
    """The error of a job whose process has ended with this exit status, in words of limits."""
    if status == -signal.SIGALRM and limits.computes:
        return EngineStalledError(
            f"it got less than {limits.cpu_seconds:g} s of a processor within {limits.seconds:g} s: try again later"
        )
    if status in (-signal.SIGALRM, -signal.SIGXCPU, -signal.SIGPROF):
        return JobTimeoutError(
            f"it takes more than {limits.seconds:g} s ({limits.cpu_seconds:g} s of processor time)"
        )
    if status in (-signal.SIGSEGV, -signal.SIGBUS):
        return JobKilledError(
            f"it is nested too deeply: it needs more than {limits.stack_bytes >> 20} MiB of stack"
        )
    if status in (-signal.SIGABRT, -signal.SIGKILL, OUT_OF_MEMORY):
        return JobKilledError(f"it needs more than {limits.memory_bytes >> 20} MiB of memory")
    return JobKilledError(f"its process {exit_cause(status)}")
