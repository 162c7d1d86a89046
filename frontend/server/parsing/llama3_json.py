"""The calls of Llama 3.1 and 3.2: bare JSON objects, sometimes after a mark, sometimes several with semicolons.

<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}
"""

from __future__ import annotations

from pagewire.frontend.server.parsing.json_calls import JSONCalls
from pagewire.frontend.server.parsing.parser import Reading

MARK = "<|python_tag|>"


class Llama3JSON(JSONCalls):
    """Calls stand anywhere, with or without the mark. Without its arguments an object is none: many an answer is
    JSON with a name in it.
    """

    needs_arguments = True

    def read(self) -> Reading[None]:
        while mark := (yield from self.text_until(MARK, "{")):
            if mark == MARK:
                yield from self.accept(MARK)
                yield from self.space()
            while (yield from self.call_object()):
                yield from self.space()
                yield from self.accept(";")
                yield from self.space()
            self.pass_content()
