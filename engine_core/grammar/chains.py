"""Counts how deeply rules and references of a grammar follow one another, because compilers recurse along them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pagewire.engine_core.schedule.attachments import GrammarError

MAX_CHAIN = 256  # rules or references one after the other; compiling needs about 8 kB of stack for each
RULE = re.compile(r"^[ \t]*[?!]?([A-Za-z_]\w*)[^:\n\"/]{0,300}:", re.MULTILINE)
NAME = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"|/(?:[^/\\\n]|\\.)+/|([A-Za-z_]\w*)")


def check_rules(lark: str) -> None:
    """Refuse a grammar in Lark's notation whose rules follow one another too deeply.

    Raises:
        GrammarError: the longest chain has more than `MAX_CHAIN` rules.
    """
    heads = list(RULE.finditer(lark))
    names = {head[1] for head in heads}
    edges: dict[str, set[str]] = {}
    ends = [head.start() for head in heads[1:]] + [len(lark)] * bool(heads)
    for head, end in zip(heads, ends, strict=True):
        used = {match[1] for match in NAME.finditer(lark, head.end(), end)}
        edges.setdefault(head[1], set()).update(used & names)
    if chain_length(edges) > MAX_CHAIN:
        raise GrammarError(f"grammar: a chain of more than {MAX_CHAIN} rules that refer to one another")


def check_references(schema: Any) -> None:
    """Refuse a JSON schema whose `$ref`s follow one another too deeply.

    Raises:
        GrammarError: the longest chain has more than `MAX_CHAIN` references.
    """
    if not isinstance(schema, dict):
        return
    edges = {}
    for name in ("$defs", "definitions"):
        by_name = schema.get(name)
        for key, part in by_name.items() if isinstance(by_name, dict) else ():
            edges[f"#/{name}/{key}"] = set(references(part))
    if chain_length(edges) > MAX_CHAIN:
        raise GrammarError(f"json: a chain of more than {MAX_CHAIN} references ($ref)")


def references(part: Any) -> Iterator[str]:
    """Every `$ref` in a part of a schema."""
    pending = [part]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if isinstance(ref := value.get("$ref"), str):
                yield ref
            pending += value.values()
        elif isinstance(value, list):
            pending += value


def chain_length(edges: Mapping[str, Iterable[str]]) -> int:
    """The number of nodes on the longest path; what leads back into a path does not lengthen it."""
    lengths: dict[str, int] = {}
    for start in edges:
        path = [] if start in lengths else [(start, iter(edges[start]))]
        lengths.setdefault(start, 0)
        while path:
            name, others = path[-1]
            following = next((other for other in others if other in edges and other not in lengths), None)
            if following is not None:
                lengths[following] = 0
                path.append((following, iter(edges[following])))
                continue
            path.pop()
            inner = (lengths[other] for other in edges[name] if other in edges)
            lengths[name] = 1 + max(inner, default=0)
    return max(lengths.values(), default=0)
