"""Embeddings of texts, and how alike two texts are.

python examples/offline_embed.py --model sentence-transformers/all-MiniLM-L6-v2
"""

from __future__ import annotations

import argparse

from pagewire import LLM

TEXTS = ["The with statement closes files.", "A with block ends by closing its file.", "Lists can be sorted."]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="demo", help="a model of embeddings; others are made one")
arguments = parser.parse_args()

with LLM(model=arguments.model, runner="pooling", convert="embed") as llm:
    vectors = [output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)]
    print(f"{len(vectors)} vectors of {len(vectors[0])} numbers")
    for text, score in zip(TEXTS[1:], llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False), strict=True):
        print(f"{score.outputs.score:.3f} {text}")
