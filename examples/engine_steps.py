"""The engine without `LLM.generate`: requests are added while others run, and outputs are taken as they come.

python examples/engine_steps.py --model demo --max-num-seqs 4
"""

from __future__ import annotations

import argparse

from pagewire import EngineArgs, LLMEngine, SamplingParams

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="demo")
parser.add_argument("--max-num-seqs", type=int, default=4)
arguments = parser.parse_args()

waiting = [
    ("A list is", SamplingParams(temperature=0.0, max_tokens=20, logprobs=1)),
    ('The "with" statement', SamplingParams(n=2, temperature=0.8, top_k=5, seed=0, max_tokens=20)),
    ("To be or not to be,", SamplingParams(temperature=0.8, presence_penalty=0.2, seed=0, max_tokens=20)),
]
engine = LLMEngine.from_engine_args(EngineArgs(model=arguments.model, max_num_seqs=arguments.max_num_seqs))
try:
    number = 0
    while waiting or engine.has_unfinished_requests():
        if waiting:
            engine.add_request(str(number), *waiting.pop(0))
            number += 1
        for output in engine.step():
            if output.finished:
                print(f"request {output.request_id}: {[part.text for part in output.outputs]}")
finally:
    engine.shutdown()
