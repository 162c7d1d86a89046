"""What messages repeat of input: bounded, whatever it is, without formatting all of it first."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest

from pagewire.ipc.bounds import check_each, check_integer, check_string, unknown_name
from pagewire.ipc.quoting import MAX_QUOTED, escaped_json, on_one_line, quoted, shortened


class Unquotable(str):
    """A string that may not be formatted as a whole."""

    def __repr__(self) -> str:
        raise AssertionError("all of it was formatted")


@pytest.mark.parametrize(
    "value",
    [
        "x" * 1_000_000,
        b"x" * 1_000_000,
        10**100_000,
        ["x" * 1_000_000] * 1000,
        {"x" * 1_000_000: 1},
        [[[[["x"]]]]],
        set(range(1000)),
        object(),
    ],
    ids=range(8),
)
def test_quotations_are_bounded(value: Any) -> None:
    assert 0 < len(quoted(value)) < 1.5 * MAX_QUOTED


def test_short_values_are_quoted_whole() -> None:
    for value in ("a\n'", 5, -1.5, True, None, [1, "a"], {"a": [2.0]}, 2**70, (1,), {}, {"b": {}, "a": 1}):
        assert quoted(value) == repr(value)


def test_a_long_list_is_cut_before_it_is_formatted() -> None:
    assert quoted(["a"] * 100 + [Unquotable()]).startswith("['a', 'a'")


def test_a_long_dict_is_cut_before_it_is_formatted_and_is_not_sorted() -> None:
    compared: list[str] = []

    class Key(str):
        def __lt__(self, other: str) -> bool:
            compared.append(self)
            return str(self) < str(other)

    long = {Key(f"k{9999 - number}"): number for number in range(10_000)}
    assert quoted(long).startswith("{'k9999': 0, 'k9998': 1, ")
    assert quoted(dict.fromkeys(range(9), 0)).endswith("7: 0, ...}")
    assert not compared


def test_checks_of_fields_quote_bounded() -> None:
    long = "x" * 1_000_000
    for check in (
        lambda: check_integer("n", long, None),  # type: ignore[arg-type]
        lambda: check_string("user", [long]),
        lambda: check_string("user", long + "\ud800"),
        lambda: check_each("ids", [1] * 1_000_000 + [long], int, lambda name, value: value),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            check()
        assert len(str(caught.value)) < 2 * MAX_QUOTED
    assert len(unknown_name("option", long, ["x"])) < 2 * MAX_QUOTED


def test_shortened_tells_how_much_is_missing() -> None:
    assert shortened("abc", 3) == "abc"
    assert shortened("abcde", 3) == "abc... (2 more characters)"


def test_one_line_shows_every_character_that_a_terminal_would_obey() -> None:
    everything = "".join(map(chr, range(0x110000)))
    line = on_one_line(everything)
    assert len(line.splitlines()) == 1
    assert not {unicodedata.category(letter) for letter in line} & {"Cc", "Cs", "Zl", "Zp"}
    assert on_one_line("a\n\x1b[2Jé中👩") == "a\\x0a\\x1b[2Jé中👩"
    assert escaped_json('"\x7f\x9b"') == '"\\u007f\\u009b"'
