"""Parser for calls of Llama 3.1 and 3.2: bare JSON objects, optionally after a mark, or several with semicolons.

<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}
"""

from __future__ import annotations

from pagewire.frontend.server.parsing.json_calls import JSONCalls
from pagewire.frontend.server.parsing.parser import Reading

MARK = "<|python_tag|>"


class Llama3JSON(JSONCalls):
    """Parser for calls anywhere in the text, with or without the mark.

    An object without arguments is not a call, since ordinary answers may be JSON with a "name".
    """

    needs_arguments = True
    call_marks = (MARK,)

    def read(self) -> Reading[None]:
        while mark := (yield from self.text_until(MARK, "{")):
            if mark == MARK:
                yield from self.accept(MARK)
                yield from self.space()
            while (yield from self.call_object()):
                yield from self.space()
                yield from self.accept(";")
                yield from self.space()
            self.emit_content()
