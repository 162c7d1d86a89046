"""Templates that would stall a frontend, or fill its memory, are stopped."""

from __future__ import annotations

import threading
from typing import Any

import jinja2
import pytest

from pagewire.frontend.text import growth
from pagewire.frontend.text.sandbox import compile_source, render

TEXT = "{% set x = 'abcd' * 1000000 %}"


def rendered(source: str, **variables: Any) -> str:
    return render(compile_source(source), variables)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in [[[]] * 20] recursive %}{{ loop(i * 1000) }}{{ loop(i * 1000) }}{% endfor %}",
        "{% for i in range(99999) %}{% set x = range(99999) | list %}{% endfor %}",
        "{% for i in range(99999) %}{% set x = range(99999) | map('string') | join %}{% endfor %}",
    ],
)
def test_time_is_limited(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "MAX_SECONDS", 0.05)
    with pytest.raises(ValueError, match=r"takes more than 0\.05 s"):
        rendered(source)
    assert rendered("{% for i in range(9) %}{{ i }}{% endfor %}") == "012345678"  # the next has its own time


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 99999999 }}",
        "{{ 99999999 * ['a'] }}",
        "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
        TEXT + "{% for i in range(99) %}{{ x }}{% endfor %}",
        TEXT + "{{ [x] | batch(9, x) | join(x) | join(x) }}",
        TEXT + "{{ range(99999) | join(x) }}",
        TEXT + "{{ x.join(x) }}",
        TEXT + "{{ range(99999) | map('string') | join(x) }}",
        TEXT + "{{ ([x] * 9999) | join }}",
        TEXT + "{{ ''.join([x] * 9999) }}",
        TEXT + "{{ x | replace('', x) }}",
        TEXT + "{{ x.replace('a', x) }}",
        TEXT + "{{ '%s%s%s%s%s' % (x, x, x, x, x) }}",
        "{{ 'a' | center(999999999999) }}",
        "{{ 'a' | indent(999999999999) }}",
        "{{ ('a\n' * 10000) | indent(10000) }}",
        "{{ ('a\n' * 1000000) | indent('                                ') }}",
        "{{ ('\t' * 10000).expandtabs(10000) }}",
        "{{ 'a'.ljust(999999999999) }}",
        "{{ [1] | batch(999999999999, 1) | list }}",
        "{{ 'a'.zfill(width=999999999999) }}",
    ],
)
def test_the_size_of_texts_is_limited(source: str) -> None:
    with pytest.raises(ValueError, match=r"characters|items|bytes|unexpected keyword|takes no keyword"):
        rendered(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 9 ** 9 ** 9 ** 9 ** 9 ** 9 }}",
        "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 999999999) }}",
        "{{ [1] | tojson(indent=100000) }}",
        "{{ lipsum(1000) }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
    ],
)
def test_other_refusals(source: str) -> None:
    with pytest.raises(ValueError, match=r"the chat template (fails on|rejects) the conversation"):
        rendered(source)


@pytest.mark.parametrize(
    "source",
    ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "x" * 999_999, "{% if x %}" * 200 + "{% endif %}" * 200],
)
def test_templates_that_cannot_be_compiled(source: str) -> None:
    with pytest.raises(ValueError, match=r"not valid|at most"):
        compile_source(source)


def test_the_limits_change_nothing_else() -> None:
    source = """\
{% for i in items if i != 2 %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% else %}none{% endfor %}
{% for i in [1, [2, [3]]] recursive %}{% if i is iterable %}({{ loop(i) }}){% else %}{{ i }}{% endif %}{% endfor %}

{{ 'a' ~ 1 ~ missing ~ none ~ ['b'] }} {{ 2 ** 10 }} {{ '%05.1f|%s' % (1.5, 'x') }} {{ '{:>4}'.format('x') }}
{{ items | map('string') | join('-') }} {{ 'a-b' | replace('-', '+') }} {{ ('a\nb') | indent(2, true) }}
{{ 3 * 'ab' }} {{ [{'a': 1}, {'a': 2}] | join(', ', attribute='a') }} {{ 'abc' | join('.') }}
{% for k, v in {'x': 1}.items() %}{{ k }}={{ v }}{% endfor %}"""
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    for items in ([1, 2, 3], []):
        assert rendered(source, items=items) == plain.render(items=items)


def test_each_thread_has_its_own_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "MAX_SECONDS", 0.05)
    texts: list[str] = []

    def work() -> None:
        texts.append(rendered("{% for i in range(9) %}{{ i }}{% endfor %}"))

    with pytest.raises(ValueError, match="takes more"):
        rendered("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["012345678"] * 4
