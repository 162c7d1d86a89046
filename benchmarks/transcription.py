"""How long Whisper takes for a window of 30 seconds, beside transformers.

    python -m benchmarks.transcription [--size base] [--dtype float32] [--rounds 7] [--tokens 100] [--threads 1]

The weights are random, and so are the recordings; each output has the same number of tokens, and transformers
generates it from the same samples (`WhisperFeatureExtractor`, `generate`). Both take turns, so that whatever else
the machine does slows both; the median of the ratios counts. Several threads wait for each other where other
processes take a processor, so each has one by default. Also said: the share of tokens that are equal.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from pagewire import LLM, SamplingParams

SIZES = {"tiny": (384, 4, 6), "base": (512, 6, 8), "small": (768, 12, 12)}
"""By name: the width, the layers of encoder and decoder each, and the heads."""
RATE, SECONDS = 16_000, 30
START = 50258


def make(folder: Path, size: str, dtype: torch.dtype) -> Any:
    """Save a model with random weights; returns transformers' own."""
    width, layers, heads = SIZES[size]
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=51865,
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        decoder_start_token_id=START,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = WhisperForConditionalGeneration(config).to(dtype).eval()
    model.generation_config.suppress_tokens = model.generation_config.begin_suppress_tokens = None
    model.save_pretrained(folder)
    return model


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    dtype = getattr(torch, options.dtype)
    with tempfile.TemporaryDirectory() as name:
        model = make(Path(name), options.size, dtype)
        llm = LLM(
            name,
            dtype=options.dtype,
            skip_tokenizer_init=True,
            kv_cache_memory_bytes=1 << 30,
            num_threads=options.threads,
        )
        try:
            compare(llm, model, dtype, options)
        finally:
            llm.shutdown()


def compare(llm: LLM, model: Any, dtype: torch.dtype, options: argparse.Namespace) -> None:
    """Take turns, and print the times. The first turn warms both up."""
    extractor = WhisperFeatureExtractor(feature_size=80)
    params = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True, detokenize=False)
    rng = np.random.default_rng(0)
    ours, theirs, equal = [], [], []
    for _ in range(options.rounds + 1):
        sound = rng.standard_normal(RATE * SECONDS).astype(np.float32)
        begin = time.perf_counter()
        prompt: Any = {"prompt_token_ids": [START], "multi_modal_data": {"audio": (sound, RATE)}}
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        middle = time.perf_counter()
        with torch.inference_mode():
            features = extractor(sound, sampling_rate=RATE, return_tensors="pt").input_features.to(dtype)
            made = model.generate(
                features, do_sample=False, min_new_tokens=options.tokens, max_new_tokens=options.tokens
            )
        ours.append(middle - begin)
        theirs.append(time.perf_counter() - middle)
        tokens = made[0].tolist()[-options.tokens :]
        equal.append(statistics.mean(map(int.__eq__, output.outputs[0].token_ids, tokens)))
    ratios = [other / own for own, other in zip(ours[1:], theirs[1:], strict=True)]
    print(f"pagewire {statistics.median(ours[1:]):.3f} s, transformers {statistics.median(theirs[1:]):.3f} s")
    print(
        f"transformers takes {statistics.median(ratios):.2f} times as long ({min(ratios):.2f} to {max(ratios):.2f})"
    )
    print(f"equal tokens: {statistics.mean(equal):.1%}")


if __name__ == "__main__":
    main()
