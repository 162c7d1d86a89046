"""A sound of any length, and the windows of it that an encoder hears one after the other."""

from __future__ import annotations

from dataclasses import dataclass

from pagewire.frontend.media.decode_process import decode_speech
from pagewire.frontend.media.items import Decoded
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.sources import SOUND, SoundExcerpt, SourceInfo, Spectrum


@dataclass(frozen=True)
class Recording:
    """A decoded sound.

    samples: float32 [n] at the engine's sampling rate. peak: of its spectrogram. rate: samples a second.
    max_frames: of a window.
    """

    samples: Tensor
    peak: float
    rate: int
    spectrum: Spectrum
    max_frames: int

    @classmethod
    def decoded(cls, data: bytes, info: SourceInfo) -> Recording:
        """The sound in a file. Blocks, as `decode_speech`; raises as that does."""
        spectrum = info.spectrum
        assert spectrum is not None, "the model hears"
        samples, peak = decode_speech(data, info.sampling_rate, spectrum)
        return cls(samples, peak, info.sampling_rate, spectrum, info.max_samples // spectrum.hop)

    @property
    def num_frames(self) -> int:
        """Frames of its spectrogram."""
        return self.samples.shape[0] // self.spectrum.hop

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.samples.shape[0] / self.rate

    def frames_from(self, seek: int) -> int:
        """The frames of the window that begins with a frame."""
        return min(self.max_frames, self.num_frames - seek)

    def window(self, seek: int) -> Decoded:
        """The part of it that is heard from a frame on."""
        hop, half = self.spectrum.hop, self.spectrum.num_fft // 2
        num_frames = self.frames_from(seek)
        start = max(0, seek * hop - half)
        end = min(self.samples.shape[0], (seek + num_frames) * hop + half)
        data = Tensor("float32", (end - start,), memoryview(self.samples.data)[4 * start : 4 * end])
        return Decoded(SOUND, data, excerpt=SoundExcerpt(seek * hop - start, num_frames, self.peak).options)
