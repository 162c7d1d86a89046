"""The `pagewire` command."""

from __future__ import annotations

import os
import signal
import sys

from pagewire.cli.commands import NEXT, SUMMARIES, build_parser
from pagewire.cli.console.parser import UsageError
from pagewire.cli.console.terminal import show
from pagewire.ipc.errors import EngineBusyError, EngineDeadError, ProtocolError, RequestError


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit status.

    0 is success, 1 a failure, 2 a mistake on the command line, 130 Ctrl-C, 141 a closed output pipe (SIGPIPE).
    """
    name = "pagewire"
    try:
        try:
            words = sys.argv[1:] if argv is None else argv
            if not words:
                show(NEXT.rstrip(), stream=sys.stderr)
                return 2
            command = next((word for word in words if word in SUMMARIES), "")
            if command:
                from pagewire.ipc.environment import adopt_vllm_names  # `--help` goes without it

                adopt_vllm_names()  # before logging is configured by some of them
            options = build_parser(only=command).parse_args(words)
            name = f"pagewire {options.command}"
            return int(options.run(options))
        finally:
            flush_output()
    except UsageError as error:
        complain(name, str(error))
        return 2
    except ModuleNotFoundError as error:
        complain(name, missing(error.name or ""))
        return 1
    except BrokenPipeError:  # the reader of standard output has closed the pipe
        return 128 + signal.SIGPIPE
    except (EngineDeadError, EngineBusyError, ProtocolError, RequestError, ValueError, OSError) as error:
        complain(name, str(error))
        return 1
    except KeyboardInterrupt:
        return 130


def complain(name: str, text: str) -> None:
    """Say on standard error why a command has failed; its name is red on a terminal with colours."""
    stream = sys.stderr
    if stream is not None and stream.isatty() and not os.environ.get("NO_COLOR"):
        print(f"\x1b[1;31m{name}:\x1b[0m ", end="", file=stream)
        show(text, stream=stream)
    else:
        show(f"{name}: {text}", stream=stream)


def missing(module: str) -> str:
    """Say what to install: a module of the engine is not there in `pagewire-client`, others may be optional.

    Raises:
        ModuleNotFoundError: it is a module of ours that should be there.
    """
    first, _, rest = module.partition(".")
    if first != "pagewire":
        return f"the package {first} is not installed: pip install {first}"
    if rest.partition(".")[0] not in ("engine_core", "workers", "kernels"):
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)
    return "this needs an engine, which pagewire-client has not: install pagewire in its place"


def flush_output() -> None:
    """Flush standard output here, where a failure can still set the exit status.

    Raises:
        OSError: the output could not be written and is dropped. BrokenPipeError: the pipe has no reader.
    """
    if sys.stdout is None:  # the parent process started this one with standard output closed
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # the interpreter flushes again at exit
        raise


if __name__ == "__main__":
    sys.exit(main())
