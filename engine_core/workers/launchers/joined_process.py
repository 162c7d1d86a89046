"""A worker process that an agent runs on its machine, as the core sees it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


class JoinedProcess:
    """A worker process of an agent as a `Process`. The core's thread and the launcher's use it.

    request_end: asks the agent to end it; True: to kill it. waits_for: what its start waits for.

    Attributes:
        pid: on its machine; 0 until the agent has started it.

    Raises:
        OSError: there is no descriptor left.
    """

    def __init__(
        self,
        rank: int,
        identity: str,
        waits_for: str,
        request_end: Callable[[JoinedProcess, bool], None],
    ) -> None:
        self.rank, self.identity = rank, identity.encode()
        self.pid = 0
        self.exit_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._open = True
        self._request_end = request_end
        self._obstacle: str | None = waits_for
        self._cause: str | None = None

    @property
    def exit_cause(self) -> str | None:
        """How the process has ended, as text; None while it runs or waits for its start."""
        return self._cause

    @property
    def obstacle(self) -> str | None:
        """What the start of the process still waits for; None if for nothing."""
        return self._obstacle

    def given(self) -> None:
        """Note that an agent has been asked to start it."""
        self._obstacle = None

    def end(self, cause: str) -> None:
        """Note that it has ended, or counts as lost; `exit_fd` becomes readable. The first cause counts."""
        with self._lock:
            if self._open and self._cause is None:
                self._cause = cause
                os.eventfd_write(self.exit_fd, 1)

    def kill(self) -> None:
        """Have the process killed; `exit_fd` reports its exit."""
        self._request_end(self, True)

    def reap(self) -> None:
        """Have the process killed if it still runs. The agent kills it before it starts another one."""
        self._request_end(self, True)
        self._close()

    def release(self) -> None:
        """Let the process exit by itself."""
        self._request_end(self, False)

    def stop(self, timeout: float) -> None:
        """Let the process exit. Its agent ends it when the core does."""
        self._request_end(self, False)
        self._close()

    def _close(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                os.close(self.exit_fd)
