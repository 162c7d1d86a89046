"""OpenVINO GenAI's continuous batching; the model is an export of optimum-intel's. See driver.py."""

from __future__ import annotations

from typing import Any

from driver import Generate, serve


def start(model: str) -> tuple[Generate, Any]:
    """With prefix caching, and room for as many sequences as the others have."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_batched_tokens, scheduler.max_num_seqs = 4, 2048, 256
    scheduler.enable_prefix_caching = True
    pipe = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {})

    def generate(prompts: list[list[int]], num_out: int) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = num_out
        config.do_sample, config.ignore_eos = False, True
        inputs = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        pipe.generate(inputs, [config] * len(inputs))

    return generate, dict


if __name__ == "__main__":
    serve(start)
