"""A model in a GGUF file: its weights stay quantised, and its tokenizer and chat template are those of the file.

python examples/offline_gguf.py model-q4_k_m.gguf
"""

from __future__ import annotations

import argparse

from pagewire import LLM, SamplingParams

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("file", help="a .gguf file, or REPOSITORY:FILE of the hub")
parser.add_argument("--max-model-len", type=int, default=512)
arguments = parser.parse_args()

with LLM(model=arguments.file, max_model_len=arguments.max_model_len) as llm:
    params = SamplingParams(temperature=0.0, max_tokens=20)
    (output,) = llm.chat(
        [{"role": "user", "content": "What is the capital of France?"}], params, use_tqdm=False
    )
    print(output.outputs[0].text)
