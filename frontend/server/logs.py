"""The server's log: one line per request, as text or as JSON."""

from __future__ import annotations

import logging
import os
import sys

import msgspec

TEXT = "%(levelname).1s %(asctime)s.%(msecs)03d %(name)s: %(message)s"


class JSONFormatter(logging.Formatter):
    """A line as a JSON object; the facts of a request are fields of their own."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{record.msecs:03.0f}",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        facts = getattr(record, "facts", None)
        line |= {"message": record.getMessage()} if facts is None else facts
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def configure_logging(form: str) -> None:
    """Log to standard error, at `PAGEWIRE_LOGGING_LEVEL` (default INFO). form: "text" or "json"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONFormatter() if form == "json" else logging.Formatter(TEXT, datefmt="%H:%M:%S"))
    level = os.environ.get("PAGEWIRE_LOGGING_LEVEL", "INFO").upper()
    logging.basicConfig(level=level, handlers=[handler])
