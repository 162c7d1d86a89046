"""OpenAI's client on `pagewire serve`: answers of a pydantic type, a choice, and a regular expression.

pagewire serve demo &
python examples/client_structured.py
"""

from __future__ import annotations

import argparse
from typing import Any, Literal

import pydantic
from openai import OpenAI


class Statement(pydantic.BaseModel):
    """A statement of Python."""

    name: Literal["with", "for", "if"]
    has_else: bool


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
parser.add_argument("--api-key", default="none")
arguments = parser.parse_args()

client = OpenAI(base_url=arguments.base_url, api_key=arguments.api_key)
model = client.models.list().data[0].id


def ask(question: str, structure: dict[str, Any]) -> str:
    """Return an answer that follows a structure (`StructuredOutputsParams`)."""
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=60,
        extra_body={"structured_outputs": structure},
    )
    return answer.choices[0].message.content or ""


schema = {"json": Statement.model_json_schema(), "disable_any_whitespace": True}
print(repr(Statement.model_validate_json(ask("Describe a statement of Python as JSON.", schema))))
print(ask("Is a list mutable?", {"choice": ["yes", "no"]}))
print(ask("When?", {"regex": r"(19|20)\d\d-(0[1-9]|1[0-2])"}))
