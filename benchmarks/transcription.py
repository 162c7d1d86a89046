"""How long Whisper takes for a window of 30 seconds, beside transformers or CTranslate2.

    python -m benchmarks.transcription [--size base] [--dtype float32] [--rounds 7] [--tokens 100] [--threads 1]
    python -m benchmarks.transcription --peer ctranslate2 [--quantization int8]

The weights are random, and so are the recordings; each output has the same number of tokens, and the peer
generates it from the same samples (`WhisperFeatureExtractor`, then `generate`). CTranslate2, on which
faster-whisper runs, has to be installed; it converts the same weights. Both take turns, so that whatever else the
machine does slows both; the median of the ratios counts. Several threads wait for each other where other processes
take a processor, so each has one by default. Also said: the share of tokens that are equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
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
Generate = Callable[[torch.Tensor], list[int]]
START, NO_TIMES, VOCABULARY = 50258, 50363, 51865


def make(folder: Path, size: str, dtype: torch.dtype) -> Any:
    """Save a model with random weights; returns transformers' own."""
    width, layers, heads = SIZES[size]
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=VOCABULARY,
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
    parser.add_argument("--peer", choices=("transformers", "ctranslate2"), default="transformers")
    parser.add_argument("--quantization", choices=("int8",), help="of both, beside ctranslate2")
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
            quantization=options.quantization,
        )
        generate = partial(by_transformers, model, options.tokens)
        if options.peer == "ctranslate2":
            generate = by_ctranslate2(Path(name), options)
        try:
            compare(llm, generate, options)
        finally:
            llm.shutdown()


def by_transformers(model: Any, num_tokens: int, features: torch.Tensor) -> list[int]:
    """The tokens of a window's features [1, bins, columns]."""
    with torch.inference_mode():
        made = model.generate(
            features.to(model.dtype), do_sample=False, min_new_tokens=num_tokens, max_new_tokens=num_tokens
        )
    tokens: list[int] = made[0].tolist()[-num_tokens:]
    return tokens


def by_ctranslate2(folder: Path, options: argparse.Namespace) -> Generate:
    """As `by_transformers`, by CTranslate2 on the same weights."""
    import ctranslate2

    converted = folder / "ctranslate2"
    kind = options.quantization or options.dtype
    ctranslate2.converters.TransformersConverter(str(folder)).convert(str(converted), quantization=kind)
    names = [f"token {number}" for number in range(VOCABULARY)]  # the model has no tokenizer
    names[START - 1], names[START], names[NO_TIMES] = (
        "<|endoftext|>",
        "<|startoftranscript|>",
        "<|notimestamps|>",
    )
    (converted / "vocabulary.json").write_text(json.dumps(names))
    model = ctranslate2.models.Whisper(
        str(converted), compute_type=kind, intra_threads=options.threads, inter_threads=1
    )

    def generate(features: torch.Tensor) -> list[int]:
        view = ctranslate2.StorageView.from_array(features.float().numpy())
        (found,) = model.generate(
            view,
            [[START, NO_TIMES]],
            beam_size=1,
            max_length=2 * options.tokens,  # half of it is for a text before this one
            suppress_blank=False,
            suppress_tokens=[],
        )
        tokens: list[int] = found.sequences_ids[0]
        return tokens

    return generate


def compare(llm: LLM, generate: Generate, options: argparse.Namespace) -> None:
    """Take turns, and print the times. The first turn warms both up."""
    extractor = WhisperFeatureExtractor(feature_size=80)
    # CTranslate2 generates times unless it is told not to.
    prefix = [START, NO_TIMES] if options.peer == "ctranslate2" else [START]
    params = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True, detokenize=False)
    rng = np.random.default_rng(0)
    ours, theirs, equal, counts = [], [], [], []
    for _ in range(options.rounds + 1):
        sound = rng.standard_normal(RATE * SECONDS).astype(np.float32)
        begin = time.perf_counter()
        prompt: Any = {"prompt_token_ids": prefix, "multi_modal_data": {"audio": (sound, RATE)}}
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        middle = time.perf_counter()
        tokens = generate(extractor(sound, sampling_rate=RATE, return_tensors="pt").input_features)
        ours.append(middle - begin)
        theirs.append(time.perf_counter() - middle)
        counts.append(len(tokens))
        equal.append(statistics.mean(map(int.__eq__, output.outputs[0].token_ids, tokens)))
    ratios = [other / own for own, other in zip(ours[1:], theirs[1:], strict=True)]
    print(
        f"pagewire {statistics.median(ours[1:]):.3f} s, {options.peer} {statistics.median(theirs[1:]):.3f} s"
    )
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(f"{options.peer} takes {statistics.median(ratios):.2f} times as long ({spread})")
    print(f"equal tokens: {statistics.mean(equal):.1%}, of {min(counts)} to {max(counts)}")


if __name__ == "__main__":
    main()
