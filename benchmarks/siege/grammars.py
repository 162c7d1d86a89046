"""Grammars that are nested, chained, exponential, huge or broken: regular expressions, Lark, JSON schemas, tags."""

from __future__ import annotations

import json
import random
from typing import Any, TypeAlias

from .attack import Target, ask, log_uniform

Fields: TypeAlias = dict[str, Any]
LIMIT = 1 << 18  # characters of the largest grammar that a server takes


async def attack(target: Target, rng: random.Random) -> str:
    """One request under one grammar."""
    path, fields = drawn(rng)
    return await ask(target, rng, path, dumps(fields))


async def many(target: Target, rng: random.Random) -> str:
    """A grammar for very many sequences."""
    grammar = rng.choice(
        ({"guided_regex": regex(rng)[:2000]}, {"guided_regex": "(a|b| )*"}, {"guided_json": {}})
    )
    prompts = [[300 + index] for index in range(log_uniform(rng, 1, 512))]
    fields = {"prompt": prompts, "n": rng.choice((1, 8, 64)), "max_tokens": rng.choice((1, 100))}
    return await ask(target, rng, "/v1/completions", dumps(fields | grammar))


async def slow(target: Target, rng: random.Random) -> str:
    """A schema that takes all the processor time that one may take, and was never seen before."""
    patterns = [f".*{rng.getrandbits(64):x}.*" for _ in range(log_uniform(rng, 20, 450))]
    schema = {"allOf": [{"type": "string", "pattern": pattern} for pattern in patterns]}
    fields = {"prompt": "A list is", "max_tokens": 1, "guided_json": schema}
    return await ask(target, rng, "/v1/completions", dumps(fields))


def drawn(rng: random.Random) -> tuple[str, Fields]:
    """An endpoint and a body with a grammar in one of its fields."""
    kind = rng.randrange(8)
    completion: Fields = {"prompt": "A list is", "max_tokens": rng.choice((1, 8, 64))}
    chat: Fields = {"messages": [{"role": "user", "content": "Answer."}], "max_tokens": 8}
    if kind == 0:
        return "/v1/completions", completion | {"guided_regex": regex(rng)}
    if kind == 1:
        return "/v1/completions", completion | {"guided_grammar": lark(rng)}
    if kind == 2:
        return "/v1/completions", completion | {"guided_json": schema(rng)}
    if kind == 3:
        fields = (
            {"structural_tag": tags(rng)}
            if rng.random() < 0.5
            else {"whitespace_pattern": regex(rng), "json": {}}
        )
        return "/v1/completions", completion | {"structured_outputs": fields}
    if kind == 4:
        function = {"name": "f", "parameters": schema(rng)}
        return "/v1/chat/completions", chat | {
            "tools": [{"type": "function", "function": function}] * 1,
            "tool_choice": "required",
        }
    format_ = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema(rng)}}
    if kind == 5:
        text = {"format": {"type": "json_schema", "name": "a", "schema": schema(rng)}}
        return "/v1/responses", {"input": "Answer.", "max_output_tokens": 8, "text": text}
    if kind == 6:
        return "/v1/completions", completion | {"guided_choice": choices(rng)}
    return "/v1/chat/completions", chat | {"response_format": format_}


def dumps(fields: Fields) -> bytes:
    """A body; schemas may be deeper than Python's encoder goes, which are then written in halves."""
    try:
        return json.dumps(fields).encode()
    except RecursionError:
        return b'{"prompt": "a", "guided_json": ' + b'{"items":' * 5000 + b"{}" + b"}" * 5000 + b"}"


# ---------------------------------------------------------------- regular expressions


def regex(rng: random.Random) -> str:
    """A regular expression that is hard, huge or broken."""
    size = log_uniform(rng, 1, 60_000)
    few = min(size, 2000)
    return rng.choice(
        (
            "a?" * size + "a" * (size if rng.random() < 0.5 else 0),
            " " * size + "(",
            "(" * few + "a" + ")" * few,
            "(" * few + "a" + "*)" * few,
            "(a*)*" * few,
            "(a|a)*" * few + "b",
            f"(a{{1,{size}}}){{1,{few}}}",
            f"((((a{{,{few}}}){{,{few}}}){{,{few}}}){{,{few}}})",
            f"[{'a-z' * few}]" * 3,
            f".*{'a' * few}.{{{few}}}",
            r"(\w+\s*)*" + r"\p{L}" * few,
            f"({'|'.join(f'w{index}' for index in range(few))})*",
            f"(.{{{few}}})*x",
            "".join(rng.choices("ab()[]{}*+?|.^$\\1,-", k=min(few, 200))),
            r"(?=a)" * few,
            "(?:a|b)*" + "(?:a|b)" * few,
            f"(?i:{'ß' * few})",
            f"[^{chr(0x10FFFF)}]{{{size}}}",
            "\\" * size,
            f"({'.*' * few})&(~({'.*a' * min(few, 50)}))",
            f"a{{{10 ** rng.randint(1, 18)}}}",
        )
    )[:LIMIT]


def choices(rng: random.Random) -> list[str]:
    """Strings to choose from: very many, very long, sharing beginnings or ends."""
    size = log_uniform(rng, 1, 20_000)
    return rng.choice(
        (
            [f"choice {index}" for index in range(size)],
            ["a" * index for index in range(1, min(size, 600))],
            ["a" * min(size, 200_000)],
            ["x" * 10 + str(index) * 3 + "y" * 10 for index in range(min(size, 5000))],
            ["\0", "\n", "\ud83d", "👩‍👩‍👧" * min(size, 1000)],
        )
    )


# ---------------------------------------------------------------- context-free grammars


def lark(rng: random.Random) -> str:
    """A Lark or GBNF grammar: chained, nested, ambiguous, left-recursive, huge or broken."""
    size = log_uniform(rng, 1, 5000)
    chain = "\n".join(f"r{index}: r{index + 1}" for index in range(size))
    skipped = chain.replace(": r", ': "x"? r')
    words = " | ".join(f'"w{index}"' for index in range(size))
    return rng.choice(
        (
            f'start: r0\n{chain}\nr{size}: "a"',
            f"start: r0\n{chain}\nr{size}: r0",
            f'start: r0\n{skipped}\nr{size}: "a"',
            f'start: {"(" * size}"a"{")" * size}',
            f'start: {"(" * size}"a"{")*" * size}',
            'start: start start | "a"',
            f'start: s\ns: {"s " * min(size, 500)}| "a" |',
            f"start: {words}",
            f"start: A\nA: /{regex(rng)[:5000]}/",
            f'start: a*\na: b*\nb: c*\nc: "x"?\n{"%ignore / /" * min(size, 300)}',
            "\n".join(f"T{index}: T{index + 1} T{index + 1}" for index in range(min(size, 60)))
            + f'\nT{min(size, 60)}: "a"\nstart: T0',
            f'start: "a"~{rng.choice((1, size, 10**9))}..{rng.choice((size, 10**12))}',
            f'start: %json {{"type": "array", "items": {{"$ref": "#"}}, "maxItems": {size}}}',
            f'root ::= {"( " * size}"a"{" )" * size}',
            'root ::= root "a" | ""',
            f"start: @tag{{{size}}}\n",
            "start: " + "".join(rng.choices('ab():|"/*+?\n ~%', k=200)),
            " " * size + "(",
            f'start: "{"a" * min(size * 40, LIMIT - 20)}"',
        )
    )[:LIMIT]


# ---------------------------------------------------------------- JSON schemas


def schema(rng: random.Random) -> Any:
    """A JSON schema: chained, recursive, combinatorial, deep, wide or broken."""
    size = log_uniform(rng, 1, 3000)
    small = min(size, 300)
    text = {"type": "string"}
    chained = {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(size)} | {f"d{size}": text}
    doubled = {
        f"d{index}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{index + 1}"}] * 2}
        for index in range(small)
    }
    options: list[Any] = [
        {"$ref": "#/$defs/d0", "$defs": chained},
        {"$ref": "#/$defs/d0", "$defs": chained | {f"d{size}": {"$ref": "#/$defs/d0"}}},
        {"$ref": "#/$defs/d0", "$defs": doubled | {f"d{small}": text}},
        {"type": "object", "patternProperties": {f"^p{index}.*x": text for index in range(size)}},
        {"type": "object", "patternProperties": {f"{'.*' * 5}{index}": {} for index in range(small)}},
        {"type": "object", "properties": {f"p{index}": text for index in range(size)}, "required": ["p0"]},
        {"type": "object", "properties": {f"p{index}": text for index in range(size)}},
        {"allOf": [{"pattern": f".*{index}.*", "type": "string"} for index in range(min(small, 60))]},
        {"anyOf": [{"type": "object", "properties": {f"a{index}": text}} for index in range(size)]},
        {"oneOf": [{"const": index} for index in range(size)]},
        {"enum": [f"value {index}" for index in range(size)]},
        {"type": "string", "pattern": regex(rng)[:20_000]},
        {"type": "string", "minLength": size, "maxLength": 10 ** rng.randint(1, 12)},
        {"type": "array", "minItems": size, "maxItems": 10 ** rng.randint(1, 12), "items": {"$ref": "#"}},
        {"type": "integer", "minimum": -(10 ** rng.randint(1, 300)), "maximum": 10 ** rng.randint(1, 300)},
        {"type": "number", "multipleOf": rng.choice((1e-300, 1e300, 0.1, 7)), "minimum": -1e308},
        {"type": "integer", "multipleOf": rng.choice((97, 10007, 2**31 - 1))},
        nest(rng, small, text),
        {"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": size},
        {"dependentSchemas": {f"p{index}": {"required": ["a"]} for index in range(small)}},
        {"not": {"not": {"type": "string"}}},
        {
            "$ref": rng.choice(
                ("http://evil.example/a.json", "file:///etc/passwd", "#/nowhere", "#" * size, "#/%24defs")
            )
        },
        {"format": rng.choice(("date-time", "email", "ipv6", "x" * size))},
        {"properties": {"\u0000" * small: {}, "\\" * small: {}, "": {}}},
        {"type": ["string", "null", "object", "array"] * small},
    ]
    return rng.choice(options)


def nest(rng: random.Random, depth: int, inner: Any) -> Any:
    """A schema around a schema around a schema."""
    kind = rng.choice(("items", "properties", "anyOf", "allOf", "not", "if"))
    for _ in range(depth):
        if kind == "properties":
            inner = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
        else:
            inner = (
                {kind: [inner, inner] if depth < 15 and kind.endswith("Of") else [inner]}
                if kind.endswith("Of")
                else {kind: inner}
            )
    return inner


def tags(rng: random.Random) -> Any:
    """A structural tag of many or deep parts."""
    size = log_uniform(rng, 1, 2000)
    deep: Any = {"type": "const_string", "value": "a"}
    for _ in range(min(size, 300)):
        deep = {"type": rng.choice(("sequence", "or")), "elements": [deep]}
    structures = [
        {"begin": f"<{index}>", "schema": schema(rng) if index < 2 else {}, "end": "</>"}
        for index in range(size)
    ]
    return rng.choice(
        (
            {"format": deep},
            {"structures": structures, "triggers": ["<"]},
            {"structures": structures[:3], "triggers": ["<" * (index + 1) for index in range(size)]},
            {"format": {"type": "regex", "pattern": regex(rng)}},
            {"format": {"type": "triggered_tags", "tags": [], "triggers": []}},
        )
    )
