"""The job server of `confined.py`: forks the processes that do jobs on untrusted input.

    serve --fork--> JobProcess, idle --a job's socket--> running --answer--> idle again, or ended

A process limits its own time, memory and stack for each job, which the kernel enforces. After a job that failed, or
that left much memory behind, it ends.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, NoReturn

import msgspec

from pagewire.ipc.errors import error_place, error_text, error_type
from pagewire.ipc.host.confined import OUT_OF_MEMORY, STATUS_BYTES, Answer, Job, Limits
from pagewire.ipc.host.heap import release_spare_memory
from pagewire.ipc.host.priority import go_behind

MAX_ERROR_CHARS = 1000  # of the text of a job's exception
PR_SET_PDEATHSIG = 1
NICENESS = 5  # of a job beside the process that serves: it gets a third of a contended processor's time
BUSY_MS = 20  # time without a message after which a process is forked ahead though others are running
MAX_LEFT_BYTES = 32 << 20  # address space that jobs may leave behind in their process

Handler = Callable[[bytes], bytes]
WarmUp = Callable[[Handler], object]


def serve(
    control_fd: int,
    lifeline_fd: int,
    prepare: Callable[[], Handler],
    warm_up: WarmUp,
    jobs_per_process: int = 1,
) -> NoReturn:
    """Run the jobs that `Confined` sends, in forked processes, until the parent has ended.

    prepare: loads what all jobs need, and returns the function that does a job. warm_up: a small job that is done
    in a process that is forked ahead. jobs_per_process: jobs that a process may do, one after the other, if it has
    done all before well. All run in the only thread of the process: a fork in another state would not be safe.
    """
    control = socket.socket(fileno=control_fd)
    try:
        handler = prepare()
    except Exception as error:
        control.send(msgspec.msgpack.encode(failure(error)))
        os._exit(1)
    gc.freeze()  # a collection in a forked process would copy all pages
    go_behind(NICENESS)
    control.send(msgspec.msgpack.encode(Answer()))
    processes = JobProcesses(control, handler, warm_up, jobs_per_process)
    processes.poller.register(control_fd, select.POLLIN)
    processes.poller.register(lifeline_fd, select.POLLIN)
    while True:
        ready = [fd for fd, _ in processes.poller.poll(processes.patience_ms)]
        if not ready:
            processes.fork_ahead()
        for fd in ready:
            if fd in processes.running:
                processes.receive(fd)
            elif fd == lifeline_fd or not (job := receive_socket(control)):
                processes.end_all()
            else:
                processes.start(job)


class JobProcess(NamedTuple):
    """A forked process, as its job server sees it.

    connection: takes the sockets of jobs, and reports their ends.
    """

    pid: int
    connection: socket.socket


class JobProcesses:
    """The forked processes of a job server: those with a job, and an idle one that waits for the next job.

    A forked process copies each page of memory that it writes to, which takes longer than most jobs. The idle one
    has done so before its job comes.
    """

    def __init__(
        self, control: socket.socket, handler: Handler, warm_up: WarmUp, jobs_per_process: int
    ) -> None:
        self.poller = select.poll()
        self.running: dict[
            int, tuple[JobProcess, socket.socket]
        ] = {}  # by fd of the connection; the job's socket
        self._control, self._handler, self._warm_up = control, handler, warm_up
        self._jobs_per_process = jobs_per_process
        self._idle: JobProcess | None = None

    @property
    def patience_ms(self) -> int | None:
        """Time without a message after which a process should be forked ahead; None if there is an idle one."""
        if self._idle is not None:
            return None
        return BUSY_MS if self.running else 0

    def fork_ahead(self) -> None:
        """Fork the process that will do the next job."""
        self._idle = self._fork(self._warm_up)

    def start(self, job: socket.socket) -> None:
        """Let a process do a job: the idle one, or else a new one."""
        while True:
            process, self._idle = self._idle or self._fork(), None
            try:
                socket.send_fds(process.connection, [b"job"], [job.fileno()])
            except OSError:  # the idle one has ended: the system was short of memory
                self._reap(process)
                continue
            self.running[process.connection.fileno()] = (process, job)
            self.poller.register(process.connection, select.POLLIN)
            return

    def receive(self, fd: int) -> None:
        """Take note that a process has done its job, or has ended: its exit status then ends the answer."""
        self.poller.unregister(fd)
        process, job = self.running.pop(fd)
        job.setblocking(False)  # the parent may have stopped reading
        with job:
            try:
                done = process.connection.recv(16)
            except OSError:
                done = b""
            if done and self._idle is None:
                self._idle = process
            elif not (status := self._reap(process)):
                return
            else:
                with suppress(OSError):
                    job.send(status.to_bytes(STATUS_BYTES, "little", signed=True))

    def end_all(self) -> NoReturn:
        """End this process and those of its jobs."""
        for process, _ in self.running.values():
            os.kill(process.pid, signal.SIGKILL)
        if self._idle is not None:
            os.kill(self._idle.pid, signal.SIGKILL)
        os._exit(0)

    def _fork(self, warm_up: WarmUp | None = None) -> JobProcess:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if (pid := os.fork()) == 0:
            ours.close()
            self._control.close()
            for process, job in self.running.values():  # an answer ends when its last holder has closed it
                process.connection.close()
                job.close()
            try:
                run_jobs(theirs, self._handler, warm_up, self._jobs_per_process)
            finally:
                os._exit(1)
        theirs.close()
        return JobProcess(pid, ours)

    def _reap(self, process: JobProcess) -> int:
        """End a process that has no job, or has ended. Returns its exit status; 0 if it was idle."""
        process.connection.close()  # upon which an idle one ends
        return os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])


def receive_socket(connection: socket.socket) -> socket.socket | None:
    """The socket of the next job; None if the other side has closed the connection."""
    try:
        data, fds, _, _ = socket.recv_fds(connection, 16, 1)
    except OSError:
        return None
    return socket.socket(fileno=fds[0]) if data and fds else None


def become_job() -> None:
    """Let this process, which was forked for jobs, end with the job server, and write no errors.

    It is the first to go if memory is short.
    """
    server = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123
        file.write("1000")


def run_jobs(connection: socket.socket, handler: Handler, warm_up: WarmUp | None, num_jobs: int) -> NoReturn:
    """Do jobs in this process, which was forked for them, until one fails or leaves much memory behind."""
    become_job()
    try:
        if warm_up is not None:
            with suppress(Exception):
                warm_up(handler)
        begin = address_space()
        for num_left in reversed(range(num_jobs)):
            if (job := receive_socket(connection)) is None:
                break
            with job:
                run_job(job, handler)
            if num_left == 0 or address_space() - begin > MAX_LEFT_BYTES:
                break  # unsaid, or the next job might be sent here before the end is seen
            connection.send(b"done")
        os._exit(0)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    finally:
        os._exit(1)


def run_job(connection: socket.socket, handler: Handler) -> None:
    """Do one job within its limits; after an exception the process ends."""
    data = b"".join(iter(lambda: connection.recv(1 << 18), b""))
    job = msgspec.msgpack.decode(data, type=Job)
    set_limits(job.limits)
    failed = False
    try:
        answer = Answer(handler(job.data))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except Exception as error:
        failed, answer = True, failure(error)
    connection.sendall(msgspec.msgpack.encode(answer) + bytes(STATUS_BYTES))
    connection.shutdown(socket.SHUT_WR)  # the parent need not wait for the end of this process
    if failed:
        os._exit(0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.setitimer(signal.ITIMER_PROF, 0)
    release_spare_memory()


def address_space() -> int:
    """Bytes of this process's address space."""
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
        return int(file.read().split()[0]) * resource.getpagesize()


def set_limits(limits: Limits) -> None:
    """Let the kernel end this process when its next job exceeds a limit."""
    for number in (signal.SIGALRM, signal.SIGPROF, signal.SIGXCPU):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limits.seconds)
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
    cpu_seconds = math.ceil(time.process_time() + limits.cpu_seconds) + 1
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, address_space() + limits.memory_bytes),
        (resource.RLIMIT_STACK, limits.stack_bytes),
    ):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def failure(error: Exception) -> Answer:
    """The answer that carries an exception."""
    text = error_text(error)
    if len(text) > MAX_ERROR_CHARS:
        text = text[:MAX_ERROR_CHARS] + " ..."
    return Answer(error=text, error_type=error_type(error), error_place=error_place(error))
