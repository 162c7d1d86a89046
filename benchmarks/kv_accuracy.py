"""What keys and values of 8 and 4 bits cost: log probabilities of a text, beside those with the model's own dtype.

    python -m benchmarks.kv_accuracy MODEL.gguf [--dtype float32] [--contexts 8]

MODEL.gguf is one such as SmolLM2-135M-Instruct (`make build/smollm2`). The text is Python's own documentation, in
contexts of 1,024 tokens, each a prompt of its own. Every token attends to what the cache holds, its own key
included, so what is lost there is in all figures. Nothing depends on the speed of the machine.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

from tokenizers import Tokenizer

from benchmarks.limits import processor
from pagewire import LLM, SamplingParams
from pagewire.ipc.gguf.file import read_gguf
from pagewire.ipc.gguf.tokenizer import tokenizer_json
from pagewire.kernels.cpu.library import expected_isa
from pagewire.workers.checkpoint.headers import read_headers
from pagewire.workers.estimate.figures import footprint

CONTEXT = 1024
KV_DTYPES = ("auto", "int8", "int4")


class TokenScore(NamedTuple):
    """What a model says before a token of a text: the token's log probability, and the most likely token."""

    logprob: float
    most_likely: int


def contexts(path: Path, count: int) -> list[list[int]]:
    """The first tokens of the longest texts, CONTEXT each, by the tokenizer of a GGUF file."""
    tokenizer = Tokenizer.from_buffer(tokenizer_json(read_gguf(path)))
    longest = sorted(topics, key=lambda name: (-len(topics[name]), name))[:count]
    return [tokenizer.encode(topics[name]).ids[:CONTEXT] for name in longest]


def scores(path: Path, dtype: str, kv_dtype: str, prompts: Sequence[Sequence[int]]) -> list[TokenScore]:
    """Those of all tokens but the first of each prompt."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    with LLM(model=str(path), dtype=dtype, kv_cache_dtype=kv_dtype, max_model_len=CONTEXT + 16) as llm:
        outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params)
    found = []
    for ids, output in zip(prompts, outputs, strict=True):
        assert output.prompt_logprobs is not None
        for token, says in zip(ids[1:], output.prompt_logprobs[1:], strict=True):
            assert says is not None
            found.append(TokenScore(says[token].logprob, min(says, key=lambda other: says[other].rank or 0)))
    return found


def main() -> None:
    """Measure, and print a row for each type of keys and values."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--contexts", type=int, default=8, help="of 1,024 tokens")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    options = parser.parse_args()
    prompts = contexts(options.model, options.contexts)
    headers, isa = read_headers(str(options.model)), expected_isa()
    print(f"{processor()}; {options.dtype}, {sum(map(len, prompts)):,} tokens")
    print(f"{'kv_cache_dtype':16}{'bytes/token':>12}{'perplexity':>12}{'|difference|':>14}{'same token':>12}")
    exact: list[TokenScore] = []
    for kv_dtype in KV_DTYPES:
        found = scores(options.model, options.dtype, kv_dtype, prompts)
        exact = exact or found
        pairs = list(zip(found, exact, strict=True))
        perplexity = math.exp(-sum(score.logprob for score in found) / len(found))
        difference = sum(abs(score.logprob - other.logprob) for score, other in pairs) / len(pairs)
        same = sum(score.most_likely == other.most_likely for score, other in pairs) / len(pairs)
        num_bytes = footprint(headers, isa, options.dtype, None, kv_dtype).kv_token_bytes
        print(f"{kv_dtype:16}{num_bytes:12,}{perplexity:12.3f}{difference:14.4f}{same:12.1%}", flush=True)


if __name__ == "__main__":
    main()
