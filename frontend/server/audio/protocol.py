"""Requests and events of OpenAI's API for speech; `frontend/speech/transcript.py` has the responses."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from pagewire.frontend.client import DurationUsage, TranscriptFormat
from pagewire.frontend.server.http.form import FormFile
from pagewire.ipc.wire.params import Name, Priority

SpeechTemperature: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]
Threshold: TypeAlias = Annotated[float, Meta(ge=-1000.0, le=1000.0)]
Granularity: TypeAlias = Literal["segment", "word"]


class TranscriptionRequest(msgspec.Struct, kw_only=True):
    """A form with a recording.

    file: WAV, FLAC, OGG or MP3.
    language: of the recording, as a code (ISO 639-1) or a name; it is detected otherwise.
    prompt: text that might stand before, whose last tokens guide style and spelling.
    temperature: 0 begins there, and goes on to higher ones while the text repeats itself or is unlikely; any other
        is the only one.
    timestamp_granularities[]: of verbose_json; only "segment" is served.
    stream: send the text segment by segment, as events.
    compression_ratio_threshold, logprob_threshold, no_speech_threshold, condition_on_previous_text: as in
        openai/whisper, with its defaults.
    timeout, request_id, priority, cache_salt, user: as for completions.
    """

    file: FormFile
    model: Name | None = None
    language: Name | None = None
    prompt: str | None = None
    response_format: TranscriptFormat = "json"
    temperature: SpeechTemperature = 0.0
    timestamp_granularities: list[Granularity] = msgspec.field(
        name="timestamp_granularities[]", default_factory=list
    )
    stream: bool = False
    compression_ratio_threshold: Threshold = 2.4
    logprob_threshold: Threshold = -1.0
    no_speech_threshold: Threshold = 0.6
    condition_on_previous_text: bool = True
    timeout: float | None = None
    request_id: Name | None = None
    priority: Priority | None = None
    cache_salt: Name | None = None
    user: Name | None = None


REFUSED = {
    "chunking_strategy": "a recording is divided by the model's own timestamps",
    "include[]": "log probabilities of tokens are not returned; verbose_json has those of segments",
    "known_speaker_names[]": "speakers are not told apart",
    "known_speaker_references[]": "speakers are not told apart",
}
"""Fields of OpenAI's API that are not served, with the reasons."""
NO_WORDS = (
    "timestamp_granularities[]: times of words are not served, for cross-attention runs in kernels that return no "
    "weights to align words by; ask for segment"
)


class TranscriptTextDelta(msgspec.Struct, tag_field="type", tag="transcript.text.delta"):
    """An event with the text of the next segment."""

    delta: str


class TranscriptTextDone(msgspec.Struct, tag_field="type", tag="transcript.text.done"):
    """The last event, with the whole text."""

    text: str
    usage: DurationUsage
