"""Parser for calls of Mistral's models: a mark and a list of JSON objects, or (since tokenizer v11) a mark, a name
and arguments for each call.

    [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]
    [TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[ARGS]{}
"""

from __future__ import annotations

from collections.abc import Callable

from pagewire.frontend.server.parsing.deltas import short_call_id
from pagewire.frontend.server.parsing.json_calls import JSONCalls
from pagewire.frontend.server.parsing.parser import Reading

MARK, ID_MARK, ARGUMENTS_MARK = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class Mistral(JSONCalls):
    """Parser for text and calls of either form."""

    marks_are_special = True

    def __init__(self, new_id: Callable[[], str] = short_call_id, parallel: bool = True) -> None:
        super().__init__(new_id, parallel)

    def read(self) -> Reading[None]:
        while (yield from self.text_until(MARK)):
            yield from self.accept(MARK)
            yield from self.space()
            listed = yield from self.comes("[")
            if not (yield from (self.call_list() if listed else self.named_call())):
                self.emit_content()

    def named_call(self) -> Reading[bool]:
        """Read and emit `f{...}` or `f[CALL_ID]123456789[ARGS]{...}`. Returns False at other text."""
        name = yield from self.name()
        if not name:
            return False
        if (yield from self.accept(ID_MARK)):
            yield from self.name()
        yield from self.accept(ARGUMENTS_MARK)
        if not (yield from self.object_begins()):
            return False
        self.start_call(name)
        yield from self.streamed_arguments()
        return True
