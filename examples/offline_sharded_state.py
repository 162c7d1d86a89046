"""Save a model as each worker holds it, which loads faster: a worker reads its own part only.

python examples/offline_sharded_state.py --model demo --output /models/demo-sharded --tensor-parallel-size 2
"""

from __future__ import annotations

import argparse

from pagewire import LLM, SamplingParams

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="demo")
parser.add_argument("--output", required=True, help="folder that is made")
parser.add_argument("--tensor-parallel-size", type=int, default=1)
arguments = parser.parse_args()

params = SamplingParams(temperature=0.0, max_tokens=20)
size = arguments.tensor_parallel_size
with LLM(model=arguments.model, tensor_parallel_size=size) as llm:
    (before,) = llm.generate("A list is", params, use_tqdm=False)
    llm.save_sharded_state(arguments.output)
with LLM(model=arguments.output, load_format="sharded_state", tensor_parallel_size=size) as llm:
    (after,) = llm.generate("A list is", params, use_tqdm=False)
print(f"before: {before.outputs[0].text!r}\nafter:  {after.outputs[0].text!r}")
