"""Logging of every pagewire process: one line of text or JSON per record, on standard error.

What a record repeats of a client's input can neither end its line nor control the terminal that shows it: control
characters are escaped, and the lines of a traceback are indented. Lines and tracebacks have a largest length.

    PAGEWIRE_LOGGING_LEVEL         DEBUG, INFO (the default), WARNING, ERROR
    PAGEWIRE_LOG_FORMAT            text (the default) or json
    PAGEWIRE_LOGGING_CONFIG_PATH   a JSON file for `logging.config.dictConfig`, instead of the above
    PAGEWIRE_CONFIGURE_LOGGING     0: leave logging alone

Child processes inherit these variables, and so the configuration.
"""

from __future__ import annotations

import json
import logging
import logging.config
import os
import sys
import time
from pathlib import Path
from typing import Any

from pagewire.ipc.environment import env_flag
from pagewire.ipc.quoting import escaped_json, on_one_line, shortened

FORMATS = ("text", "json")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
TEXT = "%(levelname).1s %(asctime)s.%(msecs)03d %(name)s: %(message)s"
MAX_TRACEBACK_LINES = 100  # the last ones, of the error itself, and the first few
INDENT = "    "  # before the lines of a traceback: a line of a record begins with the letter of its level


class TextFormatter(logging.Formatter):
    """Formats a record as one line of text, and its traceback as indented lines after it.

    A record may bring the traceback of another process as text: `extra={"traceback": text}`. Facts are written
    whole (see `JsonFormatter`): what is logged of a request is limited where they are made.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (the base class's name)
        """The line, with control characters escaped, and the traceback that the record brings."""
        record.message = message_of(record)
        line = on_one_line(super().formatMessage(record))
        brought = getattr(record, "traceback", None)
        return f"{line}\n{indent_traceback(brought)}" if brought else line

    def formatException(self, ei: Any) -> str:  # noqa: N802 (the base class's name)
        """The traceback of an exception."""
        return indent_traceback(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802 (the base class's name)
        """The stack of a record with `stack_info`."""
        return indent_traceback(stack_info)


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object: time (UTC), level, logger, pid, message, and `exception` with a traceback.

    If a record has `facts` (a mapping, passed in `extra`), these fields replace the message.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "pid": record.process,
        }
        fields = getattr(record, "facts", None) or {"message": message_of(record)}
        line |= {name: value for name, value in fields.items() if name not in line}
        brought = getattr(record, "traceback", None)
        if exception := self.formatException(record.exc_info) if record.exc_info else brought:
            line["exception"] = "\n".join(lines_of(exception))
        return escaped_json(json.dumps(line, ensure_ascii=False, default=str))


def message_of(record: logging.LogRecord) -> str:
    """The message of a record, shortened unless it is made of facts."""
    message = record.getMessage()
    return message if hasattr(record, "facts") else shortened(message)


def indent_traceback(traceback: str) -> str:
    """A traceback as it is written after a line of text."""
    return "\n".join(INDENT + line for line in lines_of(traceback))


def lines_of(traceback: str) -> list[str]:
    """The lines of a traceback, each shortened and without control characters; a long one without its middle."""
    lines = [on_one_line(shortened(line)) for line in traceback.rstrip("\n").split("\n")]
    left_out = len(lines) - MAX_TRACEBACK_LINES
    if left_out <= 0:
        return lines
    head = MAX_TRACEBACK_LINES // 4
    return [*lines[:head], f"... ({left_out} more lines)", *lines[head + left_out :]]


def configure(log_format: str | None = None) -> None:
    """Configure the logging of this process from the environment.

    log_format: overrides PAGEWIRE_LOG_FORMAT, for child processes too.

    Raises:
        ValueError: unknown level or format, or the configuration file cannot be read or used.
    """
    if log_format is not None:
        os.environ["PAGEWIRE_LOG_FORMAT"] = log_format
    path = os.environ.get("PAGEWIRE_LOGGING_CONFIG_PATH")
    if not env_flag("PAGEWIRE_CONFIGURE_LOGGING"):
        if path:
            raise ValueError("PAGEWIRE_LOGGING_CONFIG_PATH has no effect with PAGEWIRE_CONFIGURE_LOGGING=0")
        return
    if path:
        configure_from(Path(path))
        return
    handler = logging.StreamHandler(sys.stderr)
    if choose_option("PAGEWIRE_LOG_FORMAT", FORMATS, "text") == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(TextFormatter(TEXT, "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])  # for libraries
    logging.getLogger("pagewire").setLevel(choose_option("PAGEWIRE_LOGGING_LEVEL", LEVELS, "INFO"))


def configure_from(path: Path) -> None:
    """Configure logging from a JSON file in the schema of `logging.config.dictConfig`.

    Raises:
        ValueError: the file cannot be read, or is no such configuration.
    """
    try:
        logging.config.dictConfig(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"PAGEWIRE_LOGGING_CONFIG_PATH: {path}: {error}") from error


def choose_option(name: str, choices: tuple[str, ...], default: str) -> str:
    """The value of an environment variable as one of `choices`; case is ignored.

    Raises:
        ValueError: the value is not one of them.
    """
    text = os.environ.get(name) or default
    for choice in choices:
        if text.lower() == choice.lower():
            return choice
    raise ValueError(f"{name} must be one of {', '.join(choices)}, got {text!r}")
