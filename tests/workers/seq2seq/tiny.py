"""Tiny encoder-decoders with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB = 120
BART_LIKE = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "init_std": 0.2,
}
T5_LIKE = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "initializer_factor": 3.0,
}
WHISPER = {
    "vocab_size": VOCAB,
    "num_mel_bins": 80,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "max_target_positions": 64,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "init_std": 0.2,
}
TEXTS: dict[str, dict[str, Any]] = {
    "bart": BART_LIKE,
    "blenderbot": BART_LIKE,
    "blenderbot-small": BART_LIKE,
    "m2m_100": {**BART_LIKE, "scale_embedding": True},
    "marian": {**BART_LIKE, "decoder_vocab_size": None},
    "mbart": {**BART_LIKE, "scale_embedding": True},
    "mt5": {**T5_LIKE, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "pegasus": BART_LIKE,
    "plbart": BART_LIKE,
    "t5": T5_LIKE,
    "umt5": {**T5_LIKE, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}
"""Settings by model type, of models that read texts."""


def save(folder: Path, model_type: str, settings: dict[str, Any]) -> Any:
    """Save a model with random weights, biases and norms; returns it."""
    from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

    torch.manual_seed(0)
    kind = AutoModelForSpeechSeq2Seq if model_type == "whisper" else AutoModelForSeq2SeqLM
    model = kind.from_config(AutoConfig.for_model(model_type, **settings), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases are 0 and norms are 1 in a model that was not trained
                parameter.add_(0.1 * torch.randn_like(parameter))
        if getattr(model, "final_logits_bias", None) is not None:
            model.final_logits_bias.normal_()
    model.generation_config.forced_bos_token_id = model.generation_config.forced_eos_token_id = None
    model.save_pretrained(folder)
    return model
