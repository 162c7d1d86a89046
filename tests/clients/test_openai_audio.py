"""Transcriptions by OpenAI's client, in all formats, and as events."""

from __future__ import annotations

import io
import math
import struct
import wave
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

# Random weights are never sure of a text: without these, a window is decoded six times, at last at random.
SURE = {"logprob_threshold": -1000, "compression_ratio_threshold": 1000}


def recording(seconds: int = 35) -> tuple[str, bytes]:
    """A tone that changes, as a file of 8 kHz."""
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(8000)
        values = (int(9000 * math.sin(i * i / 9e5) * math.sin(i / 7000)) for i in range(8000 * seconds))
        written.writeframes(b"".join(struct.pack("<h", value) for value in values))
    return "tone.wav", file.getvalue()


def test_transcriptions(hearing: str) -> None:
    with OpenAI(base_url=f"{hearing}/v1", api_key="none", max_retries=0) as client:

        def create(**fields: Any) -> Any:
            return client.audio.transcriptions.create(
                file=recording(), model="whisper", language="en", extra_body=SURE, **fields
            )

        whole = create(response_format="verbose_json", timestamp_granularities=["segment"])
        assert whole.text and whole.duration == 35 and len(whole.segments) > 1
        assert whole.segments[-1].start > 25, "the second window is heard"
        assert create().text == whole.text and create().usage.seconds == 35
        assert create(response_format="text").strip() == whole.text
        assert create(response_format="srt").count(" --> ") == len(whole.segments)
        assert create(response_format="vtt").startswith("WEBVTT\n\n00:00:")
        *deltas, done = create(stream=True)
        assert "".join(event.delta for event in deltas).rstrip() == done.text == whole.text
        translated = client.audio.translations.create(file=recording(2), model="whisper", extra_body=SURE)
        assert isinstance(translated.text, str)
        with pytest.raises(BadRequestError, match="times of words are not served"):
            create(response_format="verbose_json", timestamp_granularities=["word"])
