"""The first start of an embedded model at a terminal does not wait for a compiler: PyTorch computes this time.

An engine keeps the kernels that it began with, as do workers that replace others: the tokens of one engine must not
depend on when they were computed. So an engine that begins with PyTorch's kernels has them to its end. An embedded
model loses little by it. A larger one would lose more than the minutes that it waits for, so it waits.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

from pagewire.cli.console.terminal import show
from pagewire.ipc.files.hub import EMBEDDED
from pagewire.ipc.host.lifeline import Child

if TYPE_CHECKING:
    from pagewire.ipc.options.engine_args import EngineArgs

VARIABLE = "PAGEWIRE_CPU_ISA"
LASTING = ("serve", "chat")
"""Commands that last long enough to compile meanwhile."""
COMPILER = [sys.executable, "-m", "pagewire.cli.console.compile_kernels"]


@contextmanager
def without_waiting(options: argparse.Namespace, args: EngineArgs) -> Iterator[None]:
    """In this context, an engine that is opened has PyTorch's kernels if others would have to be compiled first.

    Only for an embedded model, of a command at a terminal; a line there says so. `serve` and `chat` compile the
    kernels meanwhile. `PAGEWIRE_CPU_ISA`, whatever it names, turns this off.
    """
    if not may_begin_with_pytorch(options, args):
        yield
        return
    compiles = options.command in LASTING
    rest = "They are compiled meanwhile, and serve from the next start." if compiles else later(args.model)
    show(f"The CPU kernels are not compiled yet, so PyTorch computes this time. {rest}", stream=sys.stderr)
    # A server's log has the lines of the compilation; a conversation is not interrupted by them.
    shown = None if options.command == "serve" else subprocess.DEVNULL
    with compiling(shown) if compiles else nullcontext():
        os.environ[VARIABLE] = "reference"  # for all processes of this engine, also those that replace others
        try:
            yield
        finally:
            os.environ.pop(VARIABLE, None)


def later(model: str) -> str:
    """What to do about kernels that are not compiled."""
    return f"The first start of `pagewire serve {model}` compiles them."


def may_begin_with_pytorch(options: argparse.Namespace, args: EngineArgs) -> bool:
    """True if an engine with these options is one embedded model, in one worker here, for somebody at a terminal.

    A worker on another machine would choose its kernels itself.
    """
    if options.command not in (*LASTING, "generate") or getattr(options, "also", None):
        return False
    at_terminal = sys.stderr is not None and sys.stderr.isatty()
    if not at_terminal or args.model not in EMBEDDED or args.num_workers > 1 or os.environ.get(VARIABLE):
        return False
    from pagewire.kernels.cpu.library import must_compile
    from pagewire.workers.device.machine import runs_on_cpu

    return runs_on_cpu(args.device) and must_compile()


@contextmanager
def compiling(shown: int | None) -> Iterator[None]:
    """A context in which a process compiles the kernels into the cache. It ends with the context, done or not.

    shown: where its log goes, as for `subprocess.Popen`.
    """
    with tempfile.TemporaryDirectory(prefix="pagewire-build-") as folder:  # also of a process that is killed
        environment = os.environ | {"TMPDIR": folder}
        child = Child(COMPILER, env=environment, stdout=subprocess.DEVNULL, stderr=shown, own_session=True)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):  # it has ended already
                os.killpg(child.pid, signal.SIGKILL)  # and the compilers that it has started
            child.kill()
