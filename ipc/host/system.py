"""The system that an engine needs."""

from __future__ import annotations

import sys


def require_linux() -> None:
    """Check that an engine can run here.

    Raises:
        OSError: this is no Linux. Frontends that attach work on other systems, too.
    """
    if sys.platform != "linux":
        raise OSError(
            f"an engine runs on Linux, and this system is {sys.platform}: attach to an engine on another machine, "
            "for which pagewire-client is enough"
        )
