"""Calls of MiniMax M3: parameters are elements named after them, with elements inside for objects and lists.

]<]minimax[>[<tool_call>
]<]minimax[>[<invoke name="f">
]<]minimax[>[<where>]<]minimax[>[<city>Oslo]<]minimax[>[</city>]<]minimax[>[</where>
]<]minimax[>[<days>]<]minimax[>[<item>1]<]minimax[>[</item>]<]minimax[>[<item>2]<]minimax[>[</item>]<]minimax[>[</days>
]<]minimax[>[</invoke>
]<]minimax[>[</tool_call>

One token, which is no text, stands before every tag. As with other parameters between tags, the schema says what a
text means (`argument_types.py`), and whether elements are those of an object or of a list.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from pagewire.frontend.server.parsing.argument_types import ONLY_TEXT, ParameterTypes, argument_json
from pagewire.frontend.server.parsing.call_formats import (
    Format,
    Functions,
    check_required,
    const,
    json_value,
    keywords,
    optional,
    sequence,
    tag,
    tags,
)
from pagewire.frontend.server.parsing.constrained import arguments_schema
from pagewire.frontend.server.parsing.deltas import call_id
from pagewire.frontend.server.parsing.parameter_calls import text_form
from pagewire.frontend.server.parsing.parser import Parser, Reading, read_marks

MARK = "]<]minimax[>["
OPENING, CLOSING = f"{MARK}<tool_call>", f"{MARK}</tool_call>"
INVOKE, NAMED, INVOKED = f'{MARK}<invoke name="', '">', f"{MARK}</invoke>"
ITEM = "item"
MAX_DEPTH = 32  # of elements in elements; what lies deeper is text
MAX_ITEMS = 64  # of a list whose length has a limit
NESTED = frozenset({"object", "array"})


class ElementCalls(Parser):
    """Parser for such calls, and text around them. functions: those that may be called.

    A call begins once its name and a tag have come. Strings are emitted while they are read.
    """

    call_marks = (OPENING,)

    def __init__(
        self, functions: Functions = (), new_id: Callable[[], str] = call_id, parallel: bool = True
    ) -> None:
        self._schemas = {function["name"]: arguments_schema(function) for function in functions}
        self._types = {name: ParameterTypes(schema) for name, schema in self._schemas.items()}
        super().__init__(new_id, parallel)

    def read(self) -> Reading[None]:
        while mark := (yield from self.text_until(OPENING)):
            yield from self.accept(mark)
            if not (yield from read_marks(self, INVOKE)) or not (yield from self.call()):
                self.emit_content()
                continue
            while (yield from read_marks(self, INVOKE)) and (yield from self.call()):
                pass
            if (yield from read_marks(self, CLOSING)):
                self.drop()

    def call(self) -> Reading[bool]:
        """Read and emit a call after its mark. Returns False, and emits nothing, if it is none."""
        name = yield from self.name()
        if not name or not (yield from self.accept(NAMED)):
            return False
        yield from self.space()
        if not (yield from self.comes(f"{MARK}<")):
            return False
        self.start_call(name)
        schema = self._schemas.get(name, {})
        if (yield from self.members(schema, self._types.get(name) or ParameterTypes({}), False, 0)):
            yield from read_marks(self, INVOKED)
        self.drop()
        return True

    def members(self, part: Any, types: ParameterTypes, is_list: bool, depth: int) -> Reading[bool]:
        """Read elements, and emit them as an object or a list; return whether all of them have ended.

        part: of the schema that they follow.
        """
        self.emit_arguments("[" if is_list else "{")
        separator = ""
        while (yield from self.another()):
            yield from self.accept(f"{MARK}<")
            self.drop()
            if not (yield from self.hold_until(">")):
                self.drop()
                return False
            key = self.pending
            yield from self.accept(">")
            self.drop()
            self.emit_arguments(
                separator if is_list else f"{separator}{json.dumps(key, ensure_ascii=False)}: "
            )
            inner = types.inner(part, None if is_list else key)
            if not (yield from self.value(inner, types, f"{MARK}</{key}>", depth)):
                return False
            separator = ", "
        if self._ended:
            return False
        self.emit_arguments("]" if is_list else "}")
        return True

    def another(self) -> Reading[bool]:
        """Return whether another element begins, and drop white space before it."""
        yield from self.space()
        self.drop()
        return not (yield from self.comes(f"{MARK}</")) and (yield from self.comes(f"{MARK}<"))

    def value(self, part: Any, types: ParameterTypes, end: str, depth: int) -> Reading[bool]:
        """Read and emit the content of an element, and read its end; return whether that has come."""
        kinds = types.types(part)
        if kinds == ONLY_TEXT:
            self.emit_arguments('"')
            return (yield from self.string_until(end))
        if kinds & NESTED and depth < MAX_DEPTH:
            begin = len(self.pending)
            yield from self.space()
            if not (yield from self.comes(end)) and (yield from self.comes(f"{MARK}<")):
                is_list = "array" in kinds and (
                    "object" not in kinds or (yield from self.comes(f"{MARK}<{ITEM}>"))
                )
                self.drop()
                if not (yield from self.members(part, types, is_list, depth + 1)):
                    return False
                yield from self.accept(end)
                self.drop()
                return True
            self._at = self._from + begin
        if not (yield from self.hold_until(end)):
            self.emit_pending_arguments()
            return False
        text = self.pending
        if not text.strip() and "string" not in kinds and kinds & NESTED:
            self.emit_arguments("[]" if "array" in kinds else "{}")
        else:
            self.emit_arguments(argument_json(text, kinds))
        yield from self.accept(end)
        self.drop()
        return True


def element_tags(functions: Functions, parallel: bool) -> list[Format]:
    """Return the format of calls as one tag.

    Raises:
        ValueError: a function's parameters cannot be written so.
    """
    calls = []
    for function in functions:
        schema = arguments_schema(function)
        arguments = object_form(schema, ParameterTypes(schema), keywords(schema)[2], 0)
        calls.append(tag(f"{INVOKE}{function['name']}{NAMED}", arguments, f"{INVOKED}\n"))
    return [tag(f"{OPENING}\n", tags(calls, "", parallel), CLOSING)]


def object_form(part: Any, types: ParameterTypes, definitions: dict[str, Any], depth: int) -> Format:
    """Return the format of an object's members, in the order of their declaration."""
    properties, required, _ = keywords(part)
    check_required(properties, required)
    forms = []
    for name, inner in properties.items():
        if not name or ">" in name or "/" in name:
            raise ValueError(f"tools: {name[:100]!r} cannot be written as the name of a parameter")
        form = tag(f"{MARK}<{name}>", value_form(inner, types, definitions, depth), f"{MARK}</{name}>")
        forms.append(form if name in required else optional(form))
    return sequence(*forms) if forms else const("")


def value_form(part: Any, types: ParameterTypes, definitions: dict[str, Any], depth: int) -> Format:
    """Return the format of a value: a text, JSON of a number or a constant, or elements.

    Raises:
        ValueError: it cannot be written so.
    """
    kinds = types.types(part)
    if "string" in kinds:
        return text_form(part, kinds, definitions, "]")
    if not kinds & NESTED:
        return json_value(part, definitions)
    if len(kinds) > 1 or depth == MAX_DEPTH:
        raise ValueError(
            f"tools: a parameter of the types {', '.join(sorted(kinds))} cannot be written as elements"
        )
    part = types.resolved(part)
    if kinds == {"object"}:
        if not part.get("properties") or isinstance(part.get("patternProperties"), dict):
            raise ValueError("tools: an object whose members are not declared cannot be written as elements")
        return object_form(part, types, definitions, depth + 1)
    inner = types.inner(part, None)
    item = tag(f"{MARK}<{ITEM}>", value_form(inner, types, definitions, depth + 1), f"{MARK}</{ITEM}>")
    least, most = part.get("minItems", 0), part.get("maxItems")
    if max(least, most or 0) > MAX_ITEMS or part.get("prefixItems") or part.get("uniqueItems"):
        raise ValueError(
            f"tools: a list of over {MAX_ITEMS} or of unlike items cannot be written as elements"
        )
    repeated: Format = {"type": "tags_with_separator", "tags": [item], "separator": ""}
    if most is not None:
        repeated = const("")
        for _ in range(most - least):
            repeated = optional(sequence(item, repeated))
    return sequence(*[item] * least, repeated)
