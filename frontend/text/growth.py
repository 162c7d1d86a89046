"""Limits of what a chat template computes: time, the size of each result, and the memory of all of them.

A short template can make a long text in one call, so sizes are computed before the call wherever its result can be
more than three times as long as what goes into it; `tests/frontend/text/test_growth.py` says of each method and
filter why it is safe. What was made counts for the whole rendering: a template may keep all of it.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import Any

from jinja2.utils import Namespace

MAX_CHARS = 1 << 24  # characters of a text
MAX_ITEMS = 1 << 20  # items of a list
MAX_BITS = 1 << 12  # bits of an integer
MAX_SECONDS = 5.0  # processor time of one rendering
MAX_BYTES = 1 << 29  # of all texts and lists that one rendering makes
ITEM_BYTES = 64  # of a list: a pointer, and a small string
# Formats with a width of many digits or a computed one.
WIDE_FORMAT = re.compile(r"\d{5}|%[^a-zA-Z%]*\*|\{[^}]*\{")
LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
# Filters that look at each item of what they get.
OF_ITEMS = frozenset(
    (
        "batch",
        "groupby",
        "list",
        "map",
        "max",
        "min",
        "reject",
        "rejectattr",
        "reverse",
        "select",
        "selectattr",
    )
) | frozenset(("slice", "sort", "sum", "unique"))
# Filters that turn whatever they get into a text.
OF_TEXT = frozenset(
    ("capitalize", "center", "e", "escape", "forceescape", "format", "indent", "join", "lower", "replace")
) | frozenset(
    ("string", "striptags", "title", "tojson", "trim", "truncate", "upper", "urlencode", "wordcount")
)
OF_TEXT |= {"wordwrap", "xmlattr"}
LISTED = (list, tuple, KeysView, ValuesView, ItemsView)


class Spent(threading.local):
    """The time and size that the rendering of this thread has spent.

    end: of its time, as `time.thread_time`; None: no limit.
    """

    end: float | None = None
    num_bytes = 0  # that it has made


spent = Spent()


def begin() -> None:
    """Begin a rendering in this thread."""
    spent.end, spent.num_bytes = time.thread_time() + MAX_SECONDS, 0


def end() -> None:
    """End the rendering of this thread."""
    spent.end = None


def check_time() -> None:
    """Raise ValueError if this thread's rendering has exceeded its time."""
    if spent.end is not None and time.thread_time() > spent.end:
        raise ValueError(f"it takes more than {MAX_SECONDS:g} s")


def check_value_size(size: int) -> None:
    """Raise ValueError for a text that is too long."""
    if size > MAX_CHARS:
        raise ValueError(f"it creates a text of more than {MAX_CHARS} characters")


def check_num_items(number: int) -> None:
    """Raise ValueError for a list that is too long."""
    if number > MAX_ITEMS:
        raise ValueError(f"it creates a list of more than {MAX_ITEMS} items")


def spend(num_bytes: int) -> None:
    """Count what a rendering has made; raise ValueError if it is too much in all."""
    if spent.end is None:
        return
    spent.num_bytes += num_bytes
    if spent.num_bytes > MAX_BYTES:
        raise ValueError(f"it creates texts and lists of more than {MAX_BYTES} bytes in all")


def count_value(value: Any) -> Any:
    """Return a value that was made, and count it; raise ValueError if it is too long, or bytes."""
    if isinstance(value, str):
        check_value_size(len(value))
        spend(value.__sizeof__())
    elif isinstance(value, (list, tuple, dict)):
        check_num_items(len(value))
        spend(ITEM_BYTES * len(value))
    elif isinstance(value, (bytes, bytearray)):
        raise ValueError("it makes bytes: a prompt is a text")
    return value


def count_items(items: Iterable[Any], num_bytes: int = 0) -> Iterator[Any]:
    """Yield items, checking time and number. num_bytes: that are made for each."""
    for number, item in enumerate(items, 1):
        check_time()
        check_num_items(number)
        if num_bytes:
            spend(num_bytes)
        yield item


def text_size(value: Any) -> int:
    """Return about how many characters `str(value)` has; raise ValueError if there are too many."""
    if isinstance(value, str):
        return len(value)
    size, rest = 0, [value]
    while rest:
        part = rest.pop()
        if isinstance(part, Namespace):
            part = object.__getattribute__(part, "_Namespace__attrs")
        if isinstance(part, str):
            size += len(part)
        elif isinstance(part, Mapping):
            rest += [*part.keys(), *part.values()]
        elif isinstance(part, LISTED):
            rest += part
        elif isinstance(part, int):
            size += part.bit_length() // 3
        size += 2  # quotes, commas
        check_value_size(size + 2 * len(rest))
        check_time()
    return size


def num_lines(text: str) -> int:
    """Return the number of a text's lines, counting each character that may end one."""
    return 1 + sum(map(text.count, LINE_ENDS))


def check_growth(name: str, subject: Any, arguments: tuple[Any, ...]) -> None:
    """Check the length of the result before a method of texts or a filter is called on `subject`.

    arguments: in any order, for those with names come in the template's.

    Raises:
        ValueError: the result would be too long.
    """
    for number in arguments:
        if isinstance(number, int):
            check_value_size(number)  # it may be a width
    if not isinstance(subject, str):
        return
    texts = [argument for argument in arguments if isinstance(argument, str)]
    longest = max(map(len, texts), default=0)
    if name == "replace":
        check_value_size(max((subject.count(old) * len(new) for old in texts for new in texts), default=0))
    elif name in ("format", "format_map", "%"):
        check_format(subject, arguments)
    elif name == "join":
        check_join(arguments[0] if arguments else (), subject)
    elif name in ("indent", "expandtabs"):
        width = max([longest, *(number for number in arguments if isinstance(number, int))], default=0)
        check_value_size((width + 8) * (num_lines(subject) + subject.count("\t")))
    elif name == "translate":
        check_table(subject, arguments)
    elif name == "wordwrap":
        check_value_size(len(subject) * max(1, longest))
    elif name in ("split", "rsplit", "splitlines"):
        check_num_items(num_lines(subject) if name == "splitlines" else max_parts(subject, texts))
    elif name in OF_ITEMS:
        check_num_items(len(subject))


def check_format(form: str, arguments: tuple[Any, ...]) -> None:
    """Check the length of a formatted text, in which each argument may stand any number of times.

    Raises:
        ValueError: it would be too long, or a width is not a small literal number.
    """
    if WIDE_FORMAT.search(form):
        raise ValueError("it formats with a width that is too large, or not a literal number")
    longest = max(map(text_size, arguments), default=0)
    check_value_size(len(form) + (form.count("%") + form.count("{")) * longest)


def check_table(subject: str, arguments: tuple[Any, ...]) -> None:
    """Check the length of a text whose characters are replaced by the values of a table."""
    (table,) = arguments or ((),)
    values = table.values() if isinstance(table, Mapping) else table
    if not isinstance(values, (*LISTED, str)):
        raise ValueError("it translates with a table that is neither a dict nor a list")
    check_value_size(
        len(subject) * max((len(value) for value in values if isinstance(value, str)), default=1)
    )


def check_join(items: Any, separator: str) -> None:
    """Check the length of the joined items.

    Raises:
        ValueError: the text would be too long.
    """
    if isinstance(items, (str, Mapping, *LISTED)):
        size = len(items) if isinstance(items, str) else text_size(items)
        check_value_size(len(separator) * len(items) + size)


def max_parts(text: str, separators: list[str]) -> int:
    """Return how many parts a text may be split into, at white space or at a separator."""
    if len(text) <= MAX_ITEMS:
        return len(text)
    return 1 + max(text.count(separator) for separator in separators) if any(separators) else len(text) // 2
