"""Logging by the environment, in a process of its own: it is a process's own affair."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pagewire.ipc import logs

PROGRAM = """
import logging, sys
from pagewire.ipc import logs
logs.configure(*sys.argv[1:])
logger = logging.getLogger("pagewire.core")
logger.debug("fine")
logger.info("a %s\\nb", "ü")
logger.info("facts", extra={"facts": {"tokens": 3, "level": "no"}})
logging.getLogger("library").info("chatter")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("library").exception("it failed")
"""


def lines(*arguments: str, **environment: str) -> list[str]:
    """What the program logs."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PAGEWIRE_LOG")}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, env=clean | environment, capture_output=True, text=True, encoding="utf-8")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return done.stderr.splitlines()


def test_text_is_one_line_with_level_time_and_name() -> None:
    first, second, third, *rest = lines()
    assert re.fullmatch(r"I \d\d:\d\d:\d\d\.\d{3} pagewire\.core: a ü", first) and second == "b"
    assert third.endswith("pagewire.core: facts")
    assert rest[0].startswith("E ") and rest[-1] == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize("by_option", [True, False])
def test_json_is_one_object_per_record(by_option: bool) -> None:
    written = lines("json") if by_option else lines(PAGEWIRE_LOG_FORMAT="json")
    info, facts, error = map(json.loads, written)
    assert info.pop("pid") and re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", info.pop("time"))
    assert info == {"level": "INFO", "logger": "pagewire.core", "message": "a ü\nb"}
    assert (facts["tokens"], facts["level"], "message" in facts) == (3, "INFO", False)
    assert error["message"] == "it failed" and "ZeroDivisionError" in error["exception"]


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
