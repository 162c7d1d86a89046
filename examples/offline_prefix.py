"""Prompts that begin alike: what is computed for one is not computed for the next.

python examples/offline_prefix.py --model demo
"""

from __future__ import annotations

import argparse

from pagewire import LLM, SamplingParams

PREFIX = (
    "You teach Python to people who know another language. You answer in one sentence, with an example of code, "
    "and you say where the reference manual has more. You never mention other languages. The question is: "
)
QUESTIONS = ["What is a list?", "What is a dictionary?", "What is the with statement?"]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="demo")
arguments = parser.parse_args()

params = SamplingParams(temperature=0.0, max_tokens=20)
with LLM(model=arguments.model) as llm:
    llm.generate(PREFIX + QUESTIONS[0], params, use_tqdm=False)
    for output in llm.generate([PREFIX + question for question in QUESTIONS], params, use_tqdm=False):
        length = len(output.prompt_token_ids or ())
        print(f"{output.num_cached_tokens} of {length} tokens were cached -> {output.outputs[0].text!r}")
