"""Which architectures are served, as a Markdown table: `python -m benchmarks.parity [NAME ...]`, from the root.

Each is a tiny random model. Served means: greedy tokens in float32 equal those of transformers' `generate`, for
prompts of several lengths, chunked and batched.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from pagewire.workers.errors import LoadError
from tests.workers.architectures import ARCHITECTURES, VOCAB_SIZE, Architecture
from tests.workers.parity import make_prompts, our_tokens, transformers_tokens


def verdict(architecture: Architecture) -> tuple[str, str, bool]:
    """The architecture's class, what came of it in words, and whether the table says so too."""
    with tempfile.TemporaryDirectory() as folder:
        path = architecture.write(Path(folder))
        name = architecture.class_name()
        prompts = make_prompts(VOCAB_SIZE)
        try:
            equal = our_tokens(path, prompts) == transformers_tokens(path, prompts)
        except LoadError as error:
            reason = str(error).partition("not supported: ")[2] or str(error)
            return name, f"refused: {reason}", architecture.refused is not None
    return name, "served" if equal else "**wrong tokens**", equal and architecture.refused is None


def main() -> int:
    """Print the table. Status 1: something is not as `ARCHITECTURES` says."""
    names = set(sys.argv[1:])
    print("| model type | class | |\n|---|---|---|")
    num_served = num_surprises = 0
    for architecture in ARCHITECTURES:
        if names and architecture.name not in names:
            continue
        class_name, words, expected = verdict(architecture)
        num_served += words == "served"
        num_surprises += not expected
        print(f"| {architecture.name} | {class_name} | {words} |", flush=True)
    print(f"\n{num_served} served, {num_surprises} not as expected")
    return 1 if num_surprises else 0


if __name__ == "__main__":
    sys.exit(main())
