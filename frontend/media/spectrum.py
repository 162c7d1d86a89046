"""The peak of a sound's log-mel spectrogram, to which the parts of it that an encoder hears are scaled.

numpy is imported in the process that decodes only.
"""

from __future__ import annotations

from typing import Any

from pagewire.ipc.wire.sources import Spectrum

MAX_HERTZ = 8000.0  # of the highest filter, as Whisper has it
FLOOR = 1e-10
BLOCK = 4096  # frames at a time


def log_peak(data: bytes, rate: int, spectrum: Spectrum) -> float:
    """The largest value of a sound's log-mel spectrogram, as a logarithm to base 10.

    data: float32 [n], little-endian, of which a second has `rate`; n is over half of a Fourier transform.
    """
    import numpy as np

    size, hop = spectrum.num_fft, spectrum.hop
    samples = np.pad(np.frombuffer(data, "<f4"), size // 2, mode="reflect")
    # One frame fewer than fit, as `WhisperFeatureExtractor` leaves the last one out.
    frames = np.lib.stride_tricks.sliding_window_view(samples, size)[::hop][:-1]
    window = np.hanning(size + 1)[:-1].astype(np.float32)
    filters = mel_filters(rate, spectrum).astype(np.float32)
    peak = FLOOR
    for first in range(0, len(frames), BLOCK):
        power = np.abs(np.fft.rfft(frames[first : first + BLOCK] * window)) ** 2
        peak = max(peak, float((power.astype(np.float32) @ filters).max()))
    return float(np.log10(peak))


def mel_filters(rate: int, spectrum: Spectrum) -> Any:
    """Triangular filters of equal area, float64 [num_fft // 2 + 1, num_bins], by Slaney's mel scale.

    The scale is linear up to 1000 Hz (15 mel), and logarithmic above (27 mel for a factor of 6.4).
    """
    import numpy as np

    step = np.log(6.4) / 27
    top = 15 + np.log(MAX_HERTZ / 1000) / step
    mels = np.linspace(0, top, spectrum.num_bins + 2)
    edges = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp(step * (np.maximum(mels, 15) - 15)))
    hertz = np.linspace(0, rate // 2, spectrum.num_fft // 2 + 1)[:, None]
    left, centre, right = edges[:-2], edges[1:-1], edges[2:]
    triangles = np.minimum((hertz - left) / (centre - left), (right - hertz) / (right - centre))
    return np.maximum(triangles, 0) * 2 / (right - left)
