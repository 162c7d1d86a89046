"""Outputs that follow a JSON schema, a regular expression, a choice or a grammar.

python examples/offline_structured.py --model demo
"""

from __future__ import annotations

import argparse

from pagewire import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["with", "for", "if"]},
        "lines": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["name", "lines"],
    "additionalProperties": False,
}
STRUCTURES = {
    "JSON schema": StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    "regular expression": StructuredOutputsParams(regex=r"[a-z]{3,8}@example\.com"),
    "choice": StructuredOutputsParams(choice=["yes", "no"]),
    "grammar": StructuredOutputsParams(grammar='start: "SELECT " column " FROM t"\ncolumn: "a" | "b"'),
}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="demo")
arguments = parser.parse_args()

with LLM(model=arguments.model) as llm:
    params = [
        SamplingParams(temperature=0.0, max_tokens=60, structured_outputs=structure)
        for structure in STRUCTURES.values()
    ]
    outputs = llm.generate(["Answer:"] * len(params), params, use_tqdm=False)
    for name, output in zip(STRUCTURES, outputs, strict=True):
        print(f"{name}: {output.outputs[0].text}")
