"""One model and several LoRA adapters in one batch, the model quantised if wanted.

python examples/offline_lora.py --model meta-llama/Llama-3.1-8B --adapter sql=/adapters/sql --quantization int8
"""

from __future__ import annotations

import argparse

from pagewire import LLM, LoRARequest, SamplingParams

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="demo")
parser.add_argument(
    "--adapter", metavar="NAME=FOLDER", action="append", required=True, help="may be given again"
)
parser.add_argument("--quantization", help="int8, int4, fp8, ...")
parser.add_argument("--prompt", default='The "with" statement is used to')
arguments = parser.parse_args()

named = (text.partition("=") for text in arguments.adapter)
adapters = [LoRARequest(name, number, folder) for number, (name, _, folder) in enumerate(named, start=1)]
with LLM(
    model=arguments.model,
    quantization=arguments.quantization,
    enable_lora=True,
    max_loras=len(adapters),
    max_lora_rank=64,
) as llm:
    params = SamplingParams(temperature=0.0, max_tokens=30)
    requests = [None, *adapters]
    outputs = llm.generate([arguments.prompt] * len(requests), params, lora_request=requests, use_tqdm=False)
    for request, output in zip(requests, outputs, strict=True):
        print(f"{'no adapter' if request is None else request.lora_name}: {output.outputs[0].text!r}")
