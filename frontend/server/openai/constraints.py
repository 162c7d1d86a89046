"""The constraint on an output's form: what the request demands, calls of its tools, and the reasoning before.

tool_choice             output, with `response_format` or another demand
none                    what is demanded
auto                    calls in the model's own format, or what is demanded; else text in which calls are valid
required, a function    calls; `response_format` is for answers without calls, and so has no effect: a warning
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec

from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.warnings import warn_client
from pagewire.frontend.server.openai.protocol import ResponseFormat, SamplingFields
from pagewire.frontend.server.parsing.call_formats import (
    Format,
    call_schema,
    const,
    either,
    sequence,
)
from pagewire.frontend.server.parsing.choice import ToolUse
from pagewire.ipc.wire.params import SamplingParams, StructuredOutputsParams

GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


def demands(request: SamplingFields) -> dict[str, StructuredOutputsParams]:
    """Return the constraints that a request demands of its output, by the fields that have them.

    Raises:
        APIError, ValueError, TypeError: a field is malformed.
    """
    given: dict[str, dict[str, Any]] = {}
    if request.structured_outputs is not None:
        given["structured_outputs"] = request.structured_outputs
    for name, kind in GUIDED.items():
        if (value := getattr(request, name)) is not None:
            given[name] = {kind: value}
    if request.response_format is not None and request.response_format.type != "text":
        given["response_format"] = response_format(request.response_format)
    if (pattern := request.guided_whitespace_pattern) is not None:
        if not given:
            message = "guided_whitespace_pattern is for JSON: give guided_json or response_format with it"
            raise APIError(400, message, param="guided_whitespace_pattern")
        for name, constraint in given.items():
            if constraint.get("whitespace_pattern", pattern) != pattern:
                message = f"guided_whitespace_pattern and whitespace_pattern of {name} contradict each other"
                raise APIError(400, message, param="guided_whitespace_pattern")
            given[name] = constraint | {"whitespace_pattern": pattern}
    return {name: StructuredOutputsParams.read(constraint) for name, constraint in given.items()}


def demanded_constraint(request: SamplingFields) -> StructuredOutputsParams | None:
    """Return the constraint that a request demands of its output; None: none. Equal demands count as one.

    Raises:
        APIError: two fields demand different things.
    """
    given = demands(request)
    different = [name for name, constraint in given.items() if constraint != next(iter(given.values()))]
    if different:
        message = f"{' and '.join(given)} contradict each other: give only one"
        raise APIError(400, message, param=next(iter(given)))
    return next(iter(given.values()), None)


def response_format(response_format: ResponseFormat) -> dict[str, Any]:
    """Return a response format as fields of `StructuredOutputsParams`.

    Raises:
        APIError: the schema is missing.
    """
    if response_format.type == "json_object":
        return {"json_object": True}
    if response_format.type == "structural_tag":
        if response_format.format is not None:
            return {"structural_tag": {"type": "structural_tag", "format": response_format.format}}
        return {
            "structural_tag": {
                "structures": response_format.structures or [],
                "triggers": response_format.triggers or [],
            }
        }
    if response_format.json_schema is None or response_format.json_schema.schema is None:
        raise APIError(400, "response_format needs json_schema.schema", param="response_format")
    return {"json": response_format.json_schema.schema}


def constrain_params(
    params: SamplingParams, request: SamplingFields, tools: ToolUse, thought: Format | None
) -> SamplingParams:
    """Return the parameters with all constraints on the output.

    params: with what the request demands. thought: format of the reasoning that may come first; None: none may.

    Raises:
        APIError: the tools and the request demand different things.
        ValueError: the tools have no form in the model's format.
    """
    if tools.marks_are_special:
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    structure = params.structured_outputs
    if tools.schema is not None:
        if others := demands(request).keys() - {"response_format"}:
            message = (
                f"tool_choice requires tool calls, so the output cannot be constrained by {min(others)}, too"
            )
            raise APIError(400, message, param="tool_choice")
        if structure is not None:
            warn_client(
                "response_format has no effect: tool_choice requires calls, which follow the schemas of tools"
            )
        structure = StructuredOutputsParams(json=tools.schema)
        if tools.form is not None:
            structure = as_format(structure, tools.form)
        structure = as_answer(structure, tools)
    elif structure is not None and structure.structural_tag is None and tools.call_format is not None:
        answer = format_in(as_answer(structure, tools))
        structure = as_format(structure, either(tools.call_format(), answer))
    elif structure is None and tools.text_format is not None:
        structure = valid_calls(tools.text_format, tools.strict, thought)
        thought = None
    if structure is not None and thought is not None:
        structure = as_format(structure, sequence(thought, format_in(structure)))
    if structure is params.structured_outputs:
        return params
    return msgspec.structs.replace(params, structured_outputs=structure)


def as_answer(structure: StructuredOutputsParams, tools: ToolUse) -> StructuredOutputsParams:
    """Return the constraint on an answer, which some models begin with a mark."""
    begin = "" if tools.reasoning is None else tools.reasoning.answer_begin
    return as_format(structure, sequence(const(begin), format_in(structure))) if begin else structure


def valid_calls(
    text_format: Callable[[], Format], strict: bool, thought: Format | None
) -> StructuredOutputsParams | None:
    """Return the constraint to text whose calls are valid; None, with a warning, if they cannot be written so.

    strict: the grammar must be compiled, or the request fails. thought: see `constrain_params`.

    Raises:
        ValueError: they cannot be written so, and a tool demands it.
    """
    try:
        form = text_format() if thought is None else sequence(thought, text_format())
        return StructuredOutputsParams(
            structural_tag={"type": "structural_tag", "format": form}, optional=not strict
        )
    except ValueError as error:
        if strict:
            raise
        warn_client(f"calls are not constrained to their schemas: {error}")
        return None


def as_format(structure: StructuredOutputsParams, form: Format) -> StructuredOutputsParams:
    """Return the constraint to a format, with the options of `structure`."""
    return StructuredOutputsParams(
        structural_tag={"type": "structural_tag", "format": form},
        whitespace_pattern=structure.whitespace_pattern,
        disable_any_whitespace=structure.disable_any_whitespace,
        disable_additional_properties=structure.disable_additional_properties,
    )


def format_in(structure: StructuredOutputsParams) -> Format:
    """Return a constraint of any kind as the format of a structural tag."""
    if structure.regex is not None:
        return {"type": "regex", "pattern": structure.regex}
    if structure.grammar is not None:
        return {"type": "grammar", "grammar": structure.grammar}
    if structure.choice is not None:
        return either(*map(const, structure.choice))
    if structure.structural_tag is not None:
        return tagged_format(json.loads(str(structure.structural_tag)))
    return call_schema({"type": "object"} if structure.json is None else json.loads(str(structure.json)))


def tagged_format(structural_tag: dict[str, Any]) -> Format:
    """Return the format in a structural tag, which is free text with tags in the older form."""
    if "format" in structural_tag:
        form: Format = structural_tag["format"]
        return form
    tags = [
        {
            "type": "tag",
            "begin": structure.get("begin"),
            "content": call_schema(structure.get("schema", {})),
            "end": structure.get("end"),
        }
        for structure in structural_tag.get("structures") or ()
    ]
    return {"type": "triggered_tags", "triggers": structural_tag.get("triggers"), "tags": tags}
