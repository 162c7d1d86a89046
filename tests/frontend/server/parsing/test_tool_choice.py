"""How `tools` and `tool_choice` decide on the prompt, the form of the output, and its parser."""

from __future__ import annotations

import copy
from typing import Any

import jsonschema
import pytest

from pagewire.frontend.server.parsing.choice import ToolUse, tool_use
from pagewire.frontend.server.parsing.closed_schema import close_schema
from pagewire.frontend.server.parsing.constrained import NamedCall, RequiredCalls, calls_schema
from pagewire.frontend.server.parsing.dialects import DIALECTS, dialect_named
from pagewire.frontend.server.parsing.marked_calls import MarkedCalls
from pagewire.frontend.server.parsing.mistral import Mistral

INTEGER = {"type": "integer", "maximum": 5}
TREE = {"type": "object", "properties": {"left": {"$ref": "#"}, "size": {"$ref": "#/$defs/size"}}}
SCHEMAS: list[dict[str, Any]] = [
    {},
    {"type": "object", "required": ["a"]},
    {"properties": {"a": {"type": "string"}}},
    {**TREE, "additionalProperties": False, "$defs": {"size": INTEGER}},
    # Properties may be called like keywords.
    {
        "properties": {
            name: {"$ref": "#/definitions/n"} for name in ("default", "const", "$id", "enum", "$defs")
        },
        "definitions": {"n": INTEGER},
    },
    {"properties": {"a": {"$ref": "#named"}}, "$defs": {"n": {"$anchor": "named", "type": "string"}}},
    {"anyOf": [{"required": ["a"]}, {"$ref": "#/$defs/b"}], "$defs": {"b": {"required": ["b"]}}},
    # Data is left unchanged, even if it looks like a reference.
    {"properties": {"a": {"enum": [{"$ref": "#/nowhere"}, 1], "default": {"$ref": "#"}}}},
    {"properties": {"a": {"const": {"$ref": "#/nowhere"}}}},
]
ARGUMENTS: list[Any] = [
    {},
    {"a": 1},
    {"a": "x"},
    {"b": 1},
    {"left": {"left": {"size": 3}}},
    {"left": {"left": {"size": 9}}},
    {"left": {"x": 1}},
    {"size": "x"},
    {"a": {"$ref": "#/nowhere"}},
    {"a": {"$ref": "#/$defs/f7/nowhere"}},
    *({name: value} for name in ("default", "const", "$id", "enum", "$defs") for value in (3, 9)),
    [],
    3,
]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": f"f{index}", "parameters": schema}}
    for index, schema in enumerate(SCHEMAS)
]
F0: Any = {"type": "function", "function": {"name": "f0"}}


def valid(schema: dict[str, Any], value: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def test_a_list_of_calls_is_valid_if_their_arguments_are() -> None:
    functions = [tool["function"] for tool in TOOLS]
    before = copy.deepcopy(functions)
    schema = calls_schema(functions, parallel=True)
    assert functions == before
    jsonschema.Draft202012Validator.check_schema(schema)
    seen = set()
    for index, own in enumerate(SCHEMAS):
        for arguments in ARGUMENTS:
            expected = isinstance(arguments, dict) and valid(close_schema(own), arguments)
            seen.add(expected)
            call = {"name": f"f{index}", "parameters": arguments}
            assert valid(schema, [call]) == expected, (own, arguments)
    assert seen == {True, False}
    call = {"name": "f0", "parameters": {}}
    assert valid(schema, [call, call]) and not valid(schema, [])
    assert not valid(schema, [{**call, "name": "g"}]) and not valid(schema, [{**call, "more": 1}])
    assert not valid(schema, [{"name": "f0"}]) and not valid(schema, call)
    single = calls_schema(functions, parallel=False)
    assert valid(single, [call]) and not valid(single, [call, call])


def parser_of(use: ToolUse) -> Any:
    assert use.new_parser is not None
    return use.new_parser()


def test_choices() -> None:
    assert tool_use(None) == tool_use([]) == tool_use(TOOLS, "none") == ToolUse()
    assert tool_use(TOOLS, "none", prompt_unused=True) == ToolUse(TOOLS)
    for choice in (None, "auto"):
        use = tool_use(TOOLS, choice, parser="hermes")
        assert (use.prompted, use.schema, use.marks_are_special) == (TOOLS, None, False)
        assert isinstance(parser_of(use), MarkedCalls)
    use = tool_use(TOOLS, "auto", parser="mistral")
    assert isinstance(parser_of(use), Mistral) and use.marks_are_special
    use = tool_use(TOOLS, "required", parallel=False)
    assert (
        isinstance(parser_of(use), RequiredCalls) and use.schema is not None and use.schema["maxItems"] == 1
    )
    use = tool_use(TOOLS, F0)
    assert (
        isinstance(parser_of(use), NamedCall) and use.schema == {"type": "object"} and use.prompted == TOOLS
    )
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [F0, F0]}}
    assert tool_use(TOOLS, allowed, parser="hermes").prompted == TOOLS[:1]


def test_call_ids_have_the_length_of_the_format() -> None:
    for parser, length in ((None, 29), ("hermes", 29), ("mistral", 9)):
        (call,) = parser_of(tool_use(TOOLS, F0, parser=parser, auto=False)).parse("{}").tool_calls
        assert len(call.id) == length


@pytest.mark.parametrize(
    ("tools", "choice", "error"),
    [
        (TOOLS, "auto", "--tool-call-parser none"),
        (TOOLS, None, "--tool-call-parser none"),
        (None, "required", "needs tools"),
        (None, F0, "needs tools"),
        (TOOLS, "f0", "must be 'none', 'auto', 'required' or"),
        (TOOLS, 3, "must be 'none'"),
        (TOOLS, {"type": "function", "function": {"name": "g"}}, "no tool 'g'"),
        (TOOLS + TOOLS[:1], "none", "there are two functions named 'f0'"),
        (["f"], "none", r"tools\[0\] must be"),
        ([*TOOLS, {"type": "custom", "custom": {}}], "none", r"tools\[9\] must be"),
        ([{"type": "function", "function": {}}], "none", r"tools\[0\].function.name"),
        ([{"type": "function", "function": {"name": "é"}}], "none", r"tools\[0\].function.name"),
        ([{"type": "function", "function": {"name": "f" * 257}}], "none", r"tools\[0\].function.name"),
        ([{"type": "function", "function": {"name": "f", "description": 3}}], "none", "description must be"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": "{}"}}],
            "none",
            "schema of an object",
        ),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
            "none",
            "an object",
        ),
    ],
)
def test_refused_tools_and_choices(tools: Any, choice: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        tool_use(tools, choice)


def test_parsers_by_name() -> None:
    assert dialect_named("hermes") is DIALECTS["hermes"]
    with pytest.raises(ValueError, match=r"one of gpt_oss, .*hermes, .*got 'x'"):
        dialect_named("x")
    with pytest.raises(ValueError, match="--tool-call-parser none"):
        tool_use(TOOLS, "auto", parser="hermes", auto=False)
