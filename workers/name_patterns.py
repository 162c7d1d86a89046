"""Regular expressions of names of modules that come with a model or an adapter, matched within limits of time.

Python's own `re` would do, but it may take hours for a malicious one, and nothing can interrupt it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import regex

from pagewire.ipc.quoting import quoted
from pagewire.workers.errors import LoadError

MATCH_SECONDS = 0.2  # processor time of a thread to match a name; as a rule it takes microseconds
ALL_SECONDS = 5.0  # to match all names of modules with all patterns of a configuration


class MatchTime:
    """The processor time, in seconds, that the patterns of a configuration may still take."""

    def __init__(self, seconds: float = ALL_SECONDS) -> None:
        self.left = seconds


class NamePattern:
    """A regular expression of names of modules."""

    def __init__(self, pattern: str, where: str, match_time: MatchTime) -> None:
        """Compile a pattern.

        where: what has it, for messages. match_time: what all patterns of the configuration have together.

        Raises:
            LoadError: it is none.
        """
        self._where, self._time = where, match_time
        try:
            self._pattern = regex.compile(pattern)
        except (regex.error, RecursionError, OverflowError) as error:
            raise LoadError(f"{where}: {quoted(pattern)} is no regular expression: {error}") from error

    def match(self, name: str) -> Any:
        """Return the match of the beginning of a name; None if it does not match.

        Raises:
            LoadError: that takes too long, or all matches until now have.
        """
        return self._limited(self._pattern.match, name)

    def fullmatch(self, name: str) -> Any:
        """Return the match of a whole name, from which groups can be read; as `match`."""
        return self._limited(self._pattern.fullmatch, name)

    def _limited(self, match: Callable[..., Any], name: str) -> Any:
        begin = now = time.thread_time()
        end = begin + min(MATCH_SECONDS, self._time.left)
        try:
            while now < end:
                try:
                    return match(name, timeout=MATCH_SECONDS, concurrent=True)
                except TimeoutError:  # by a clock that counts the time of all threads of the process
                    now = time.thread_time()
        finally:
            self._time.left -= time.thread_time() - begin
        if self._time.left <= 0:
            raise LoadError(
                f"{self._where}: to match the names of modules with its patterns takes too long in all"
            )
        raise LoadError(
            f"{self._where}: to match {quoted(name)} with {quoted(self._pattern.pattern)} takes too long"
        )
