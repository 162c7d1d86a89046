"""Child processes that end with their parent.

The parent holds the write end of a pipe. When it ends, however that happens, the child reads end of file and exits.
(A parent-death signal would not do: the kernel sends it when the *thread* that started the child ends, and an `LLM`
may be created in a short-lived thread.)
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO, Any

# Ctrl-C in the terminal goes to the parent only. The session stays the same where Python allows it: Linux schedules
# sessions as groups, and a thread of another one that could run was seen to wait for 6 s.
OWN_GROUP: dict[str, Any] = (
    {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
)


class Child:
    """A child process that ends when this process does.

    command: gets the additional arguments `--lifeline FD`, the read end of the pipe.
    stdin: bytes to write to its standard input. pass_fds: descriptors that it inherits, under the same numbers.
    own_session: it leads a session, which may go behind others (`priority.go_behind`).

    Raises:
        OSError, MemoryError: it cannot be started.
    """

    _write_fd = -1

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: bytes | None = None,
        env: dict[str, str] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        pass_fds: Sequence[int] = (),
        own_session: bool = False,
    ) -> None:
        read_fd, self._write_fd = os.pipe()
        try:
            self.process = subprocess.Popen(
                [*command, "--lifeline", str(read_fd)],
                stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                pass_fds=[read_fd, *pass_fds],
                env=env,
                **({"start_new_session": True} if own_session else OWN_GROUP),
            )
        finally:
            os.close(read_fd)
        if stdin is not None and self.process.stdin is not None:
            try:
                self.process.stdin.write(stdin)
                self.process.stdin.close()
            except BrokenPipeError:
                pass  # it has ended already; `poll` returns its status

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self.process.pid

    def poll(self) -> int | None:
        """Exit status; None while it is running."""
        return self.process.poll()

    def exit_cause(self, seconds: float) -> str | None:
        """How it has ended, as `exit_cause`, waiting up to `seconds` for that; None if it runs."""
        try:
            return exit_cause(self.process.wait(seconds))
        except subprocess.TimeoutExpired:
            return None

    def stop(self, timeout: float) -> int:
        """Close the pipe, wait up to `timeout` seconds for the exit, then kill. Returns the exit status."""
        self.release()
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def kill(self) -> int:
        """Kill the process and wait for its end. Returns the exit status."""
        self.process.kill()
        self.release()
        return self.process.wait()

    def release(self) -> None:
        """Close the write end of the pipe, upon which the child exits."""
        if self._write_fd >= 0:
            os.close(self._write_fd)
            self._write_fd = -1

    def __del__(self) -> None:
        self.release()


def exit_cause(status: int) -> str:
    """How a process has ended, as text, given its exit status: "was killed by SIGKILL" for -9."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal; most have no name
        return f"was killed by signal {-status}"


def wait_for_end(fd: int, milliseconds: int | None = None) -> bool:
    """Wait for the parent to end. Returns False if it has not after `milliseconds`. fd: the pipe's read end."""
    poll = select.poll()  # select.select fails for descriptors above 1023, which a busy parent may pass
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(milliseconds))


def die_with_parent(fd: int) -> None:
    """Start a thread that ends this process as soon as the parent has ended. fd: the pipe's read end."""

    def wait() -> None:
        wait_for_end(fd)
        os._exit(0)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
