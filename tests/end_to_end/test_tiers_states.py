"""KV blocks and states on disk: a hybrid's prefixes are found after a restart, with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagewire import LLM, SamplingParams
from tests.workers.architectures import SERVED, VOCAB_SIZE
from tests.workers.parity import make_prompts

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2, detokenize=False)
PROMPTS = make_prompts(VOCAB_SIZE, (100, 104, 109), seed=6)
CACHED = 96  # whole blocks, without the last token's
KV_BYTES = 8 << 20


def run(llm: LLM) -> tuple[list[Any], list[int]]:
    """Tokens with their log probabilities, and how many tokens of each prompt were cached."""
    outputs = [llm.generate([prompt], PARAMS, use_tqdm=False)[0] for prompt in PROMPTS]
    tokens = [
        [
            [(token_id, entry.logprob) for token_id, entry in position.items()]
            for position in part.logprobs or []
        ]
        for part in (output.outputs[0] for output in outputs)
    ]
    return tokens, [output.num_cached_tokens or 0 for output in outputs]


@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2"])
def test_a_restart_forgets_no_states(tmp_path: Path, name: str) -> None:
    folder = SERVED[name].write(tmp_path / "model")

    def engine(**more: Any) -> LLM:
        return LLM(
            str(folder),
            device="cpu",
            dtype="float32",
            skip_tokenizer_init=True,
            kv_cache_memory_bytes=KV_BYTES,
            num_threads=1,
            **more,
        )

    with engine(enable_prefix_caching=False) as llm:
        expected, _ = run(llm)
    tier = {"kv_cache_dir": str(tmp_path / "tier")}
    with engine(**tier) as llm:
        assert run(llm) == (expected, [0, 0, 0])
    with engine(**tier) as llm:
        assert run(llm) == (expected, [CACHED] * 3)
        assert llm.reset_prefix_cache() and run(llm) == (expected, [0, 0, 0])
