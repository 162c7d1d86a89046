"""A finished transcription, in the formats of OpenAI's API."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from pagewire.frontend.speech.segments import TranscriptionSegment
from pagewire.frontend.speech.subtitles import srt, vtt

TranscriptFormat: TypeAlias = Literal["json", "text", "srt", "verbose_json", "vtt"]


class DurationUsage(msgspec.Struct, tag="duration"):
    """The usage of a transcription: the seconds of the recording."""

    seconds: float


class Transcription(msgspec.Struct):
    """The text of a recording."""

    text: str
    usage: DurationUsage


class VerboseTranscription(msgspec.Struct):
    """The text of a recording with its parts.

    task: "transcribe" or "translate". language: the name of the text's language. duration: of the recording, in
    seconds.
    """

    task: str
    language: str
    duration: float
    text: str
    segments: list[TranscriptionSegment]
    usage: DurationUsage

    def encode(self, form: TranscriptFormat) -> bytes | str:
        """Return it in a format: bytes of JSON, or plain text."""
        if form == "verbose_json":
            return msgspec.json.encode(self)
        if form == "json":
            return msgspec.json.encode(Transcription(self.text, self.usage))
        if form == "srt":
            return srt(self.segments)
        return vtt(self.segments) if form == "vtt" else self.text + "\n"


def join_segments(segments: list[TranscriptionSegment]) -> str:
    """The text of segments, without space around it."""
    return "".join(segment.text for segment in segments).strip()
