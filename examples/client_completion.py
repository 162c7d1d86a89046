"""OpenAI's client on `pagewire serve`: completions, whole and streamed, with log probabilities.

pagewire serve demo &
python examples/client_completion.py
"""

from __future__ import annotations

import argparse

from openai import OpenAI

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
parser.add_argument("--api-key", default="none")
arguments = parser.parse_args()

client = OpenAI(base_url=arguments.base_url, api_key=arguments.api_key)
model = client.models.list().data[0].id
prompt = 'The "with" statement is used to'
whole = client.completions.create(model=model, prompt=prompt, max_tokens=20, n=2, logprobs=2, seed=0)
for choice in whole.choices:
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    print(f"{sum(filter(None, choice.logprobs.token_logprobs)):8.2f} {choice.text!r}")
for part in client.completions.create(model=model, prompt=prompt, max_tokens=20, temperature=0, stream=True):
    print(part.choices[0].text, end="", flush=True)
print()
