"""Every method and filter that a template can call, and why its result is not much longer than its input."""

from __future__ import annotations

from typing import Any

import pytest

from pagewire.frontend.text import growth
from pagewire.frontend.text.sandbox import compile_source, render, sandbox_environment

# Methods whose results have at most three characters for one of the text, or are no texts.
FLAT_METHODS = [
    "capitalize",
    "casefold",
    "count",
    "endswith",
    "find",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "lower",
    "lstrip",
    "maketrans",
    "partition",
    "removeprefix",
    "removesuffix",
    "rfind",
    "rindex",
    "rpartition",
    "rstrip",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "upper",
]
# By method: a template in which it would make a text or list over the limits that the test sets.
GROWING_METHODS = {
    "center": "{{ 'a'.center(2000) }}",
    "encode": "{{ 'a'.encode() }}",
    "expandtabs": "{{ ('\t' * 90).expandtabs(90) }}",
    "format": "{{ ('{0}' * 90).format('a' * 90) }}",
    "format_map": "{{ ('{a}' * 90).format_map({'a': 'a' * 90}) }}",
    "join": "{{ ('a' * 90).join(['a'] * 90) }}",
    "ljust": "{{ 'a'.ljust(2000) }}",
    "replace": "{{ ('a' * 90).replace('a', 'b' * 90) }}",
    "rjust": "{{ 'a'.rjust(2000) }}",
    "rsplit": "{{ ('a ' * 300).rsplit('a') }}",
    "split": "{{ ('a ' * 300).split() }}",
    "splitlines": "{{ ('\r' * 300).splitlines() }}",
    "translate": "{{ ('a' * 90).translate({97: 'b' * 90}) }}",
    "zfill": "{{ 'a'.zfill(2000) }}",
}
OTHER_METHODS = {  # of the other types that templates have; those that change a list or dict are refused
    list: [
        "append",
        "clear",
        "copy",
        "count",
        "extend",
        "index",
        "insert",
        "pop",
        "remove",
        "reverse",
        "sort",
    ],
    dict: [
        "clear",
        "copy",
        "fromkeys",
        "get",
        "items",
        "keys",
        "pop",
        "popitem",
        "setdefault",
        "update",
        "values",
    ],
    tuple: ["count", "index"],
}
FLAT_FILTERS = [
    "abs",
    "attr",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "filesizeformat",
    "first",
    "float",
    "forceescape",
    "int",
    "items",
    "last",
    "length",
    "lower",
    "capitalize",
    "title",
    "trim",
    "upper",
    "random",
    "round",
    "safe",
    "striptags",
    "truncate",
    "urlencode",
    "wordcount",
    "string",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "reverse",
    "select",
    "selectattr",
    "unique",
    "groupby",
    "sort",
    "metered",
    "concatenated",
    "sliced",
]
GROWING_FILTERS = {
    "batch": "{{ [1] | batch(2000, 1) | list }}",
    "center": "{{ 'a' | center(width=2000) }}",
    "format": "{{ ('%(a)s' * 90) | format(a='a' * 90) }}",
    "indent": "{{ ('\r' * 90) | indent(first=true, blank=true, width='a' * 90) }}",
    "join": "{{ (['a'] * 90) | map('upper') | join(d='a' * 90) }}",
    "list": "{{ ('a' * 300) | list }}",
    "replace": "{{ ('a' * 90) | replace(new='b' * 90, old='a') }}",
    "slice": "{{ [1] | slice(300) | list }}",
    "sum": "{{ [[1] * 90, [1] * 90] | sum(start=[]) }}",
    "tojson": "{{ (([[1]] * 90)) | tojson(indent=90) }}",
    "wordwrap": "{{ ('a ' * 90) | wordwrap(1, wrapstring='b' * 90) }}",
    "xmlattr": "{{ {'a': ['a' * 90] * 90} | xmlattr }}",
}
MORE = [  # ways that are no method and no filter, or several
    "{{ 'a' * 2000 }}",
    "{{ [1] * 300 }}",
    "{{ '%s%s' % ('a' * 900, 'a' * 900) }}",
    "{{ ('%(a)s' * 90) % {'a': 'a' * 90} }}",
    "{{ ['a' * 90] * 90 }}",
    "{{ ['a' * 90] * 90 ~ '' }}",
    "{{ (['a' * 90] * 90) | string }}",
    "{{ ('a' * 90).join((['a'] * 90) | map('upper')) }}",
    "{{ [['a' * 90] * 90] | map('string') | list }}",
    "{{ namespace(a=['a' * 90] * 90) }}",
    "{{ {'a': ['a' * 90] * 90}.items() }}",
    "{% set n = namespace(x='a') %}{% for i in range(20) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
    "{% macro f(x) %}" + "{{ x }}" * 99 + "{% endmacro %}{{ f('a' * 999) | length }}",
    "{% macro f() %}{% for i in range(99) %}" + "a" * 999 + "{% endfor %}{% endmacro %}{{ f() | length }}",
    "{% set n = namespace(x=[]) %}{% set s = 'a' * 900 %}"
    "{% for i in range(99) %}{% set n.x = n.x + [s[1:]] %}{% endfor %}",
    "{% set n = namespace(x=[]) %}{% for i in range(99) %}{% set n.x = n.x + ['a' * 900] %}{% endfor %}",
    "{{ strftime_now('%c' * 900) }}",
    "{% for c in 'a' * 300 %}{% endfor %}",
    "{{ 1.to_bytes(900, 'big') }}",
]
SPECIAL = "aA1 \t\n\xdf\u0149\u1e9e\ufb03\u0390\u1fb7\U0001f600&<>'\""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that a test reaches at once."""
    monkeypatch.setattr(growth, "MAX_CHARS", 1000)
    monkeypatch.setattr(growth, "MAX_ITEMS", 100)
    monkeypatch.setattr(growth, "MAX_BYTES", 50_000)


def test_each_method_of_texts_is_known() -> None:
    """A new version of Python may have more: say of each why it is safe."""
    public = {name for name in dir(str) if not name.startswith("_")}
    assert public == {*FLAT_METHODS, *GROWING_METHODS}


def test_each_method_of_lists_and_dicts_is_known() -> None:
    for kind, names in OTHER_METHODS.items():
        assert [name for name in dir(kind) if not name.startswith("_")] == names


def test_each_filter_and_global_is_known() -> None:
    assert sandbox_environment().filters.keys() == {*FLAT_FILTERS, *GROWING_FILTERS}
    names = {"cycler", "dict", "joiner", "namespace", "raise_exception", "range", "strftime_now"}
    assert sandbox_environment().globals.keys() == names


@pytest.mark.parametrize("name", FLAT_METHODS)
def test_flat_methods_are_flat(name: str) -> None:
    for text in ("", *SPECIAL, SPECIAL * 9):
        arguments: tuple[Any, ...] = ()
        for arguments in ((), ("a",)):
            try:
                result = getattr(text, name)(*arguments)
            except (TypeError, ValueError):
                continue
            assert not isinstance(result, str) or len(result) <= 3 * len(text)


@pytest.mark.parametrize("source", [*GROWING_METHODS.values(), *GROWING_FILTERS.values(), *MORE])
def test_growth_is_refused(source: str, small: None) -> None:
    with pytest.raises(ValueError, match=r"more than|no numbers|bytes|too large|no attribute"):
        render(compile_source(source), {})


def test_nothing_is_computed_while_a_template_is_compiled() -> None:
    """There are no limits then; Jinja would put the results of constants into the code."""
    source = "{{ 'a' | center(9999999) }}" * 1000
    assert "9999999" in sandbox_environment().compile(source, raw=True)
    with pytest.raises(ValueError, match="more than"):
        render(compile_source(source), {})


def test_what_a_conversation_needs_is_far_below_the_limits() -> None:
    messages = [{"role": "user", "content": "a b\n" * 25_000}] * 40
    source = """\
{% set n = namespace(text='') %}{% for m in messages %}
{% set n.text = n.text ~ m.role ~ m.content[1:] | trim %}{{ m.content.split('b')[0] }}{% endfor %}{{ n.text }}"""
    assert len(render(compile_source(source), {"messages": messages})) > 4_000_000
