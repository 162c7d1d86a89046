"""Settings of every test process, and of the processes that it starts."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

import pytest

# OpenMP threads spin while they wait, unless the policy is passive. Several test processes share the processors, so
# spinning threads take time from working ones. OpenMP reads the variable when torch is imported, which is later.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def have_cache() -> None:
    """Take a temporary cache where none can be made, as without a home directory: each engine would compile the
    kernels anew. Processes of tests inherit it from the one that starts them."""
    try:
        from pagewire.kernels.native.cache import cache_folder
    except ModuleNotFoundError:  # an environment of clients, whose servers run in another one
        return
    try:
        cache_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        os.environ["PAGEWIRE_CACHE_ROOT"] = tempfile.mkdtemp(prefix="pagewire-cache-")
        atexit.register(shutil.rmtree, os.environ["PAGEWIRE_CACHE_ROOT"], True)


have_cache()

# A job in the background of a shell ignores Ctrl-C, and so would the programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Put the environment back: a command that runs in this process sets the logging of its children there."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
