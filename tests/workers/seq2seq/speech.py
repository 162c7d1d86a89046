"""A tiny Whisper with random weights, and a tokenizer of bytes with Whisper's special tokens."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor

from tests.workers.seq2seq.tiny import WHISPER, save

RATE = 16_000
LANGUAGES = ("en", "de", "fr")
SPECIAL = [
    "<|endoftext|>",
    "<|startoftranscript|>",
    *(f"<|{code}|>" for code in LANGUAGES),
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
]
IDS = {name: 256 + i for i, name in enumerate(SPECIAL)}
FIRST = 256 + len(SPECIAL)
"""The token of 0.00 seconds."""
NUM_TIMES = 1501


def tokenizer() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    made.add_tokens([AddedToken(f"<|{i * 0.02:.2f}|>", special=False) for i in range(NUM_TIMES)])
    assert made.get_vocab_size() == FIRST + NUM_TIMES
    return made


def save_whisper(folder: Path, *, multilingual: bool = True, **settings: Any) -> Any:
    """Save it; returns transformers' model. Its text follows the sound, and has some timestamps."""
    import torch

    end, start = IDS["<|endoftext|>"], IDS["<|startoftranscript|>"]
    model = save(
        folder,
        "whisper",
        WHISPER
        | {
            "vocab_size": FIRST + NUM_TIMES,
            "max_target_positions": 64,
            "pad_token_id": end,
            "bos_token_id": end,
            "eos_token_id": end,
            "decoder_start_token_id": start,
        }
        | settings,
    )
    with torch.no_grad():
        model.proj_out.weight[FIRST:] *= 0.5  # they are far more than other tokens
        model.proj_out.weight[end] *= 1.5
        for layer in model.model.decoder.layers:
            layer.encoder_attn.out_proj.weight *= 3
    config = model.generation_config
    config.suppress_tokens = [7, 9, *range(end + 1, FIRST)]
    config.begin_suppress_tokens = [32, end]
    config.no_timestamps_token_id = IDS["<|notimestamps|>"]
    config.prev_sot_token_id = IDS["<|startofprev|>"]
    config.max_initial_timestamp_index = 50
    config.is_multilingual = multilingual
    config.max_length = 64
    config.eos_token_id = config.pad_token_id = config.bos_token_id = end
    config.decoder_start_token_id = start
    if multilingual:
        config.lang_to_id = {f"<|{code}|>": IDS[f"<|{code}|>"] for code in LANGUAGES}
        config.task_to_id = {name: IDS[f"<|{name}|>"] for name in ("translate", "transcribe")}
    model.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=80).save_pretrained(folder)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(), eos_token="<|endoftext|>", bos_token="<|endoftext|>"
    )
    fast.save_pretrained(folder)
    return model


def noise(seconds: float, seed: int = 0) -> NDArray[np.float32]:
    """Noise whose loudness and pitch change, float32 [n]."""
    rng = np.random.default_rng(seed)
    n = int(seconds * RATE)
    time = np.arange(n) / RATE
    tone = np.sin(2 * np.pi * (200 + 150 * np.sin(0.7 * time)) * time) * (1 + np.sin(0.31 * time))
    return (0.1 * tone + 0.05 * rng.standard_normal(n) * np.sin(0.2 * time)).astype(np.float32)


def wav(samples: NDArray[np.float32], rate: int = RATE) -> bytes:
    """A file of float samples, which decode to the same."""
    import soundfile

    file = BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype="FLOAT")
    return file.getvalue()
