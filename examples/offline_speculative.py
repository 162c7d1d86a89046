"""Speculative decoding: tokens are proposed and verified in one step; outputs are the same bits with and without.

python examples/offline_speculative.py --model demo --method ngram
python examples/offline_speculative.py --model LARGE --speculative-model SMALL
"""

from __future__ import annotations

import argparse

from pagewire import LLM, SamplingParams

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="demo")
parser.add_argument(
    "--method", default="ngram", help="ngram, suffix, mtp, ...; with --speculative-model: it is found"
)
parser.add_argument("--speculative-model", help="a draft model, an MLP speculator or an EAGLE-3 head")
arguments = parser.parse_args()

drafts = (
    {"model": arguments.speculative_model} if arguments.speculative_model else {"method": arguments.method}
)
prompt = "x = 1\ny = 2\n" * 8
params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
with LLM(model=arguments.model, speculative_config={**drafts, "num_speculative_tokens": 4}) as llm:
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    metrics = output.metrics
    assert metrics is not None
    print(output.outputs[0].text)
    print(f"{metrics.num_accepted_tokens} of {metrics.num_draft_tokens} proposed tokens were right")
