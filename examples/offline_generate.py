"""Texts for a list of prompts, in one program.

python examples/offline_generate.py --model demo
"""

from __future__ import annotations

import argparse

from pagewire import LLM, SamplingParams

PROMPTS = ['The "with" statement is used to', 'The "for" statement is used to', "A list is"]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="demo", help="a model of the hub, a folder, or a GGUF file")
parser.add_argument("--max-tokens", type=int, default=40)
arguments = parser.parse_args()

params = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=arguments.max_tokens)
with LLM(model=arguments.model) as llm:
    for output in llm.generate(PROMPTS, params):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
