"""Logging by the environment, in a process of its own: it is a process's own affair."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pagewire.ipc import logs
from pagewire.ipc.quoting import MAX_MESSAGE

PROGRAM = """
import logging, sys
from pagewire.ipc import logs
logs.configure(*sys.argv[1:])
logger = logging.getLogger("pagewire.core")
logger.debug("fine")
logger.info("a %s", "ü\\nE 00:00:00.000 pagewire.core: forged\\r\\x1b[2J\\x9b2J")
logger.info("facts", extra={"facts": {"tokens": 3, "level": "no"}})
logging.getLogger("library").info("chatter")
try:
    raise ValueError("no\\nE 00:00:00.000 pagewire.core: forged\\x9b2J")
except ValueError:
    logging.getLogger("library").exception("it failed")
logger.error("the worker failed", extra={"traceback": "of another process\\n"})
"""
FORGED = "ü\nE 00:00:00.000 pagewire.core: forged\r\x1b[2J\x9b2J"


def lines(*arguments: str, **environment: str) -> list[str]:
    """What the program logs."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PAGEWIRE_LOG")}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, env=clean | environment, capture_output=True, text=True, encoding="utf-8")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return done.stderr.splitlines()


def test_text_is_one_line_with_level_time_and_name() -> None:
    """Whatever the arguments and the exception are: only lines of ours begin with a level."""
    first, second, third, *traceback, fourth, fifth = lines()
    told = r"a ü\x0aE 00:00:00.000 pagewire.core: forged\x0d\x1b[2J\x9b2J"
    assert re.fullmatch(r"I \d\d:\d\d:\d\d\.\d{3} pagewire\.core: " + re.escape(told), first)
    assert second.endswith("pagewire.core: facts")
    assert third.startswith("E ") and traceback[-2] == "    ValueError: no"
    assert traceback[-1] == r"    E 00:00:00.000 pagewire.core: forged\x9b2J"
    assert all(line.startswith("    ") and line.isprintable() for line in traceback)
    assert fourth.endswith("pagewire.core: the worker failed") and fifth == "    of another process"


def test_lines_are_bounded() -> None:
    def formatted(*arguments: object, formatter: logging.Formatter, **more: object) -> str:
        record = logging.LogRecord("pagewire", logging.WARNING, "", 0, "got %s", arguments, None)
        vars(record).update(more)
        return formatter.format(record)

    for formatter in (logs.TextFormatter(logs.TEXT), logs.JsonFormatter()):
        assert len(formatted("x" * 1_000_000, formatter=formatter)) < 1.2 * MAX_MESSAGE
        deep = "\n".join(["in main"] + ["in f" * 1000] * 5000 + ["ValueError: last"])
        text = formatted("x", formatter=formatter, traceback=deep)
        assert len(text) < 1.2 * logs.MAX_TRACEBACK_LINES * MAX_MESSAGE
        assert "in main" in text and "ValueError: last" in text and "more lines" in text


@pytest.mark.parametrize("by_option", [True, False])
def test_json_is_one_object_per_record(by_option: bool) -> None:
    written = lines("json") if by_option else lines(PAGEWIRE_LOG_FORMAT="json")
    assert all(line.isprintable() for line in written)
    info, facts, error, other = map(json.loads, written)
    assert info.pop("pid") and re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", info.pop("time"))
    assert info == {"level": "INFO", "logger": "pagewire.core", "message": f"a {FORGED}"}
    assert (facts["tokens"], facts["level"], "message" in facts) == (3, "INFO", False)
    assert error["message"] == "it failed" and "ValueError: no" in error["exception"]
    assert other["exception"] == "of another process"


def test_levels_are_ours_and_libraries_only_warn() -> None:
    assert "fine" in lines(PAGEWIRE_LOGGING_LEVEL="debug")[0]
    assert lines(PAGEWIRE_LOGGING_LEVEL="ERROR")[0].endswith("library: it failed")


def test_a_file_may_configure_all_and_nothing_may(tmp_path: Path) -> None:
    path = tmp_path / "logging.json"
    handler = {"class": "logging.FileHandler", "filename": str(tmp_path / "log")}
    path.write_text(json.dumps({"version": 1, "handlers": {"f": handler}, "root": {"handlers": ["f"]}}))
    assert lines(PAGEWIRE_LOGGING_CONFIG_PATH=str(path)) == []
    assert (tmp_path / "log").read_text().startswith("it failed")
    assert lines(PAGEWIRE_CONFIGURE_LOGGING="0")[0] == "it failed"  # as Python does without configuration


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"PAGEWIRE_LOGGING_LEVEL": "LOUD"}, "PAGEWIRE_LOGGING_LEVEL must be one of DEBUG, .*, got 'LOUD'"),
        ({"PAGEWIRE_LOG_FORMAT": "xml"}, "PAGEWIRE_LOG_FORMAT must be one of text, json, got 'xml'"),
        ({"PAGEWIRE_LOGGING_CONFIG_PATH": "/nowhere"}, "PAGEWIRE_LOGGING_CONFIG_PATH: /nowhere: .*No such"),
        ({"PAGEWIRE_LOGGING_CONFIG_PATH": "/dev/null"}, "PAGEWIRE_LOGGING_CONFIG_PATH: /dev/null: "),
        ({"PAGEWIRE_LOGGING_CONFIG_PATH": "x", "PAGEWIRE_CONFIGURE_LOGGING": "0"}, "has no effect"),
    ],
)
def test_a_mistake_is_reported(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        logs.configure()
