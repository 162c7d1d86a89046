"""Parser for calls of Hermes 2 Pro, Hermes 3, Qwen 2.5 and Qwen 3: JSON objects between tags.

<tool_call>
{"name": "f", "arguments": {"a": 1}}
</tool_call>
"""

from __future__ import annotations

from pagewire.frontend.server.parsing.json_calls import JSONCalls
from pagewire.frontend.server.parsing.parser import Reading

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes(JSONCalls):
    """Parser for any number of calls with text around them. The closing tag may be missing."""

    close = CLOSE
    call_marks = (OPEN,)

    def read(self) -> Reading[None]:
        while (yield from self.text_until(OPEN)):
            yield from self.accept(OPEN)
            yield from self.space()
            if not (yield from self.call_object()):
                self.emit_content()
                continue
            yield from self.space()
            if (yield from self.accept(CLOSE)):
                self.drop()
