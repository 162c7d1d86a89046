"""How every process of ours logs: to standard error, a line of text or of JSON per record.

    PAGEWIRE_LOGGING_LEVEL         DEBUG, INFO (the default), WARNING, ERROR
    PAGEWIRE_LOG_FORMAT            text (the default) or json
    PAGEWIRE_LOGGING_CONFIG_PATH   a JSON file for `logging.config.dictConfig`, instead of the above
    PAGEWIRE_CONFIGURE_LOGGING     0: leave logging alone

The environment carries them from a process to those that it starts.
"""

from __future__ import annotations

import json
import logging
import logging.config
import os
import sys
import time
from pathlib import Path

FORMATS = ("text", "json")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
TEXT = "%(levelname).1s %(asctime)s.%(msecs)03d %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object per record.

    time (UTC), level, logger, pid, message, and a traceback as `exception`. A record that comes with `facts` (a
    mapping, given as `extra`) has those as fields, instead of the message made of them.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "pid": record.process,
        }
        fields = getattr(record, "facts", None) or {"message": record.getMessage()}
        line |= {name: value for name, value in fields.items() if name not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure(log_format: str | None = None) -> None:
    """Configure this process's logging by the environment. `log_format` goes before it, and into it.

    Raises:
        ValueError: no such level or format, or the file of the configuration cannot be read or used.
    """
    if log_format is not None:
        os.environ["PAGEWIRE_LOG_FORMAT"] = log_format
    path = os.environ.get("PAGEWIRE_LOGGING_CONFIG_PATH")
    if os.environ.get("PAGEWIRE_CONFIGURE_LOGGING", "1") == "0":
        if path:
            raise ValueError("PAGEWIRE_LOGGING_CONFIG_PATH has no effect with PAGEWIRE_CONFIGURE_LOGGING=0")
        return
    if path:
        configure_from(Path(path))
        return
    handler = logging.StreamHandler(sys.stderr)
    if chosen("PAGEWIRE_LOG_FORMAT", FORMATS, "text") == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter(TEXT, "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])  # of the libraries, nothing less
    logging.getLogger("pagewire").setLevel(chosen("PAGEWIRE_LOGGING_LEVEL", LEVELS, "INFO"))


def configure_from(path: Path) -> None:
    """Configure logging by a JSON file in the schema of `logging.config.dictConfig`.

    Raises:
        ValueError: it cannot be read, or is none.
    """
    try:
        logging.config.dictConfig(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"PAGEWIRE_LOGGING_CONFIG_PATH: {path}: {error}") from error


def chosen(name: str, choices: tuple[str, ...], default: str) -> str:
    """A variable of the environment that is one of `choices`, in whatever case.

    Raises:
        ValueError: it is another.
    """
    text = os.environ.get(name) or default
    for choice in choices:
        if text.lower() == choice.lower():
            return choice
    raise ValueError(f"{name} must be one of {', '.join(choices)}, got {text!r}")
