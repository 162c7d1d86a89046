"""OpenAI's client on a server of embeddings.

pagewire serve sentence-transformers/all-MiniLM-L6-v2 &
python examples/client_embed.py
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
answer = client.embeddings.create(model=model, input=["The with statement closes files.", "A list."])
for item in answer.data:
    print(f"text {item.index}: {len(item.embedding)} numbers, the first {item.embedding[0]:.4f}")
