"""A finished transcription, in the formats of OpenAI's API."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from pagewire.frontend.speech.languages import LANGUAGES
from pagewire.frontend.speech.recording import Recording
from pagewire.frontend.speech.segments import TranscriptionSegment
from pagewire.frontend.speech.subtitles import srt, vtt
from pagewire.frontend.speech.transcriber import Transcriber

TranscriptFormat: TypeAlias = Literal["json", "text", "srt", "verbose_json", "vtt"]


class DurationUsage(msgspec.Struct, tag="duration"):
    """What a transcription is charged by: the seconds of the recording."""

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


async def transcribe(transcriber: Transcriber, recording: Recording) -> VerboseTranscription:
    """Transcribe a whole recording."""
    segments = [part async for found in transcriber.segments(recording) for part in found]
    task = transcriber.task
    language = "en" if task == "translate" else await transcriber.detect(recording)
    seconds = recording.seconds
    text = joined(segments)
    return VerboseTranscription(task, LANGUAGES[language], seconds, text, segments, DurationUsage(seconds))


def joined(segments: list[TranscriptionSegment]) -> str:
    """The text of segments, without space around it."""
    return "".join(segment.text for segment in segments).strip()


def written(transcript: VerboseTranscription, form: TranscriptFormat) -> bytes | str:
    """A transcription in a format: bytes of JSON, or plain text."""
    if form == "verbose_json":
        return msgspec.json.encode(transcript)
    if form == "json":
        return msgspec.json.encode(Transcription(transcript.text, transcript.usage))
    if form == "srt":
        return srt(transcript.segments)
    return vtt(transcript.segments) if form == "vtt" else transcript.text + "\n"
