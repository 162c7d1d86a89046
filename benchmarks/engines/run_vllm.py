"""vLLM's `LLM` on the CPU, compiled (its default). See driver.py."""

from __future__ import annotations

import os
from typing import Any

from driver import Generate, serve

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="WARNING")


def start(model: str) -> tuple[Generate, Any]:
    """With prefix caching, as ours."""
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype="bfloat16", max_model_len=4096, enable_prefix_caching=True, max_num_seqs=256)

    def generate(prompts: list[list[int]], num_out: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=num_out, ignore_eos=True)
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    return generate, dict


if __name__ == "__main__":
    serve(start)
