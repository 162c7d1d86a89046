"""The log-mel spectrogram of a part of a sound, as that of the whole sound has it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pagewire.ipc.wire.sources import SoundExcerpt

RANGE = 8.0  # of the values, as logarithms to base 10, below the peak


def excerpt_features(samples: Tensor, excerpt: SoundExcerpt, extractor: Any) -> Tensor:
    """What an encoder takes of a part of a sound, float32 [1, bins, frames of 30 s].

    These are columns of what `WhisperFeatureExtractor` makes of the whole sound, with zeros behind them, as
    `generate` of transformers and openai/whisper cut them.

    samples: float32 [n]. extractor: of transformers.
    """
    size, hop = extractor.n_fft, extractor.hop_length
    left = size // 2 - excerpt.num_before
    needed = (excerpt.num_frames - 1) * hop + size
    # Both ends of the sound are reflected, as `torch.stft` does.
    samples = pad(samples[None], (left, max(0, needed - left - len(samples))), mode="reflect")[0, :needed]
    window = torch.hann_window(size)
    power = torch.stft(samples, size, hop, window=window, center=False, return_complex=True).abs() ** 2
    filters = torch.from_numpy(extractor.mel_filters).to(torch.float32)
    log = (filters.T @ power).clamp(min=1e-10).log10()
    features = (log.clamp(min=excerpt.peak - RANGE) + 4.0) / 4.0
    return pad(features, (0, extractor.nb_max_frames - excerpt.num_frames))[None]
