"""OpenAI's client on `pagewire serve`: a conversation, streamed, with what pagewire adds to the API.

pagewire serve demo &
python examples/client_chat.py 'What is a list?'
"""

from __future__ import annotations

import argparse

from openai import OpenAI

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("question", nargs="?", default="What is the with statement?")
parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
parser.add_argument("--api-key", default="none")
arguments = parser.parse_args()

client = OpenAI(base_url=arguments.base_url, api_key=arguments.api_key)
model = client.models.list().data[0].id
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": arguments.question}],
    max_tokens=60,
    stream=True,
    stream_options={"include_usage": True},
    extra_body={"top_k": 20, "repetition_penalty": 1.1},
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage is not None:
        print(f"\n({chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} out)")
