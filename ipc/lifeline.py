"""No process outlives its parent.

A parent keeps the writing end of a pipe open as long as it lives; a child sees the end of file, however
the parent ended. (A parent-death signal alone would not do: the kernel sends it when the *thread* that
started the child ends, and anyone may create an `LLM` in a short-lived thread.)
"""

from __future__ import annotations

import os
import select
import subprocess
import threading
from collections.abc import Sequence
from typing import IO, Any


class Child:
    """A child process that ends when this one does.

    The command is given `--lifeline FD`, the reading end of the pipe.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: bytes | None = None,
        env: dict[str, str] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> None:
        read_fd, self._write_fd = os.pipe()
        try:
            self.process = subprocess.Popen(
                [*command, "--lifeline", str(read_fd)],
                stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                pass_fds=[read_fd],
                env=env,
                start_new_session=True,  # Ctrl-C in the terminal is the parent's to handle
            )
        finally:
            os.close(read_fd)
        if stdin is not None and self.process.stdin is not None:
            try:
                self.process.stdin.write(stdin)
                self.process.stdin.close()
            except BrokenPipeError:
                pass  # it died already; its exit status tells

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    def poll(self) -> int | None:
        """Exit status, or None while it runs."""
        return self.process.poll()

    def stop(self, timeout: float) -> int:
        """Cut the lifeline, wait up to `timeout` seconds, then kill. Returns the exit status."""
        self.release()
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def kill(self) -> int:
        """Kill at once, and reap. Returns the exit status."""
        self.process.kill()
        self.release()
        return self.process.wait()

    def release(self) -> None:
        """Close this end of the lifeline."""
        if self._write_fd >= 0:
            os.close(self._write_fd)
            self._write_fd = -1

    def __del__(self) -> None:
        self.release()


def wait_for_end(fd: int, milliseconds: int | None = None) -> bool:
    """Wait until the writing end of the lifeline `fd` is closed. False after `milliseconds`, if it is not."""
    poll = select.poll()  # select.select ends at descriptor 1023, which a busy parent may well pass on
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(milliseconds))


def die_with_parent(fd: int) -> None:
    """End this process at once when the parent ends, even in the middle of a long computation."""

    def wait() -> None:
        wait_for_end(fd)
        os._exit(0)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
