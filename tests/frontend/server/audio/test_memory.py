"""Recordings are counted while they are there, and refused over the limits."""

from __future__ import annotations

import asyncio
from io import BytesIO

import numpy as np
import pytest
import soundfile

from pagewire.frontend.server.audio import memory
from pagewire.frontend.server.audio.memory import RecordingMemory
from pagewire.frontend.server.audio.protocol import TranscriptionRequest
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.ipc.wire.sources import SourceInfo, Spectrum

SOURCE = SourceInfo("audio", 1500, 448, [2], 16_000, 480_000, Spectrum(80, 400, 160))
OPTIONS = ServerOptions(max_upload_bytes=1 << 20)


def file_of(seconds: float) -> bytes:
    file = BytesIO()
    soundfile.write(file, np.zeros(int(16_000 * seconds)), 16_000, format="WAV")
    return file.getvalue()


async def first_sizes(held: RecordingMemory, data: bytes) -> tuple[float, int, int]:
    """Seconds of a recording; bytes of files and of recordings while it is there."""
    request = TranscriptionRequest(file=data)
    async with held.decoded(request, SOURCE) as recording:
        assert request.file == b"", "the file is dropped"
        return recording.seconds, held.uploads.num_bytes, held.recordings.num_bytes


def test_a_recording_counts_until_it_is_transcribed() -> None:
    async def run() -> None:
        held = RecordingMemory(OPTIONS)
        seconds, files, recordings = await first_sizes(held, file_of(5))
        assert (seconds, files) == (5.0, 0) and recordings > 4 * 5 * 16_000 - (64 << 10) - 1
        assert (held.uploads.num_bytes, held.recordings.num_bytes) == (0, 0)
        with pytest.raises(APIError, match=r"^file: .*none of the formats"):
            await first_sizes(held, b"nothing")
        assert (held.uploads.num_bytes, held.recordings.num_bytes) == (0, 0)

    asyncio.run(run())


def test_too_many_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MAX_RECORDINGS_BYTES", 1 << 18)

    async def run() -> None:
        held = RecordingMemory(OPTIONS)
        with pytest.raises(APIError) as caught:
            await first_sizes(held, file_of(10))
        assert caught.value.status == 503 and held.uploads.num_bytes == held.recordings.num_bytes == 0
        with held.uploads.counted(4 << 20), pytest.raises(APIError) as caught:
            await first_sizes(held, file_of(5))
        assert caught.value.status == 503
        assert (await first_sizes(held, file_of(3)))[0] == 3.0

    asyncio.run(run())
