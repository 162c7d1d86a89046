"""What an encoder-decoder takes, as its configuration says; and what it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagewire.ipc.wire.sources import SOUND, TEXT, SourceInfo, Spectrum
from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.workers.caches.slot_source import SlotSource
from pagewire.workers.caches.sources import EncodedSource, Features
from pagewire.workers.errors import LoadError
from pagewire.workers.module.configuration import resolve_max_model_len
from pagewire.workers.module.refusals import refuse
from pagewire.workers.seq2seq.spectrogram import excerpt_features

TEXTS = {
    *("bart", "blenderbot", "blenderbot-small", "m2m_100", "marian", "mbart", "mt5", "pegasus", "plbart"),
    *("t5", "umt5"),
}
SOUNDS = {"whisper"}
"""The model types that are served."""


def check_served(worker_config: WorkerConfig, config: Any) -> None:
    """Refuse an encoder-decoder that is not served, or not with these options.

    Raises:
        LoadError: says which.
    """
    if config.model_type not in TEXTS | SOUNDS:
        raise refuse(config, "it is an encoder-decoder of a family whose cross-attention is not known here")
    options = {
        "tensor_parallel_size and pipeline_parallel_size": worker_config.parallel.size > 1,
        "enable_lora": worker_config.lora is not None,
        "a draft model (n-grams work)": worker_config.speculative is not None
        and not worker_config.speculative.in_core,
    }
    if refused := [name for name, is_set in options.items() if is_set]:
        raise refuse(config, f"an encoder-decoder is served without {', '.join(refused)}")


def source_info(worker_config: WorkerConfig, config: Any) -> SourceInfo:
    """The sources of an encoder-decoder.

    `max_model_len` limits the target, and a text that is a source.

    Raises:
        LoadError: it exceeds what the model has positions for, or sources do not fit into a step.
    """
    hears = config.model_type in SOUNDS
    if hears and worker_config.max_model_len is None:
        max_target = config.max_target_positions
    else:
        max_target = resolve_max_model_len(worker_config, config)
    max_tokens = config.max_source_positions if hears else max_target
    most = worker_config.max_num_batched_tokens
    if hears and max_tokens > most:
        raise LoadError(f"a sound takes {max_tokens} tokens of a step: raise max_num_batched_tokens ({most})")
    start = config.decoder_start_token_id
    extractor = sound_features(worker_config, config)[1] if hears else None
    return SourceInfo(
        kind=SOUND if hears else TEXT,
        max_tokens=min(max_tokens, most),
        max_target_tokens=max_target,
        start_ids=[config.pad_token_id or 0 if start is None else start],
        sampling_rate=0 if extractor is None else extractor.sampling_rate,
        max_samples=0 if extractor is None else extractor.n_samples,
        spectrum=None
        if extractor is None
        else Spectrum(extractor.feature_size, extractor.n_fft, extractor.hop_length),
    )


def sound_features(worker_config: WorkerConfig, config: Any) -> tuple[Features, Any]:
    """What a sound's encoder takes, float32 [1, bins, frames]; and transformers' extractor, which makes it."""
    from transformers import WhisperFeatureExtractor

    folder = Path(worker_config.model_path)
    extractor = (
        WhisperFeatureExtractor.from_pretrained(folder, local_files_only=True)
        if (folder / "preprocessor_config.json").is_file()
        else WhisperFeatureExtractor(feature_size=config.num_mel_bins)
    )

    def features(source: EncodedSource) -> Tensor:
        assert isinstance(source, SlotSource) and source.sound is not None, "the source is a sound"
        samples = torch.frombuffer(bytearray(source.sound.data), dtype=torch.float32)
        if source.excerpt is not None:
            return excerpt_features(samples, source.excerpt, extractor)
        made = extractor(
            samples.numpy(), sampling_rate=extractor.sampling_rate, return_tensors="pt", device="cpu"
        )
        return made["input_features"]  # type: ignore[no-any-return]

    return features, extractor
