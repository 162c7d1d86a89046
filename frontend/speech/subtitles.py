"""Segments as subtitles: SubRip (srt) and WebVTT."""

from __future__ import annotations

from collections.abc import Sequence

from pagewire.frontend.speech.segments import TranscriptionSegment


def srt(segments: Sequence[TranscriptionSegment]) -> str:
    """The text of an .srt file."""
    return "".join(
        f"{number}\n{clock(segment.start, ',')} --> {clock(segment.end, ',')}\n{subtitle_line(segment)}\n\n"
        for number, segment in enumerate(segments, 1)
    )


def vtt(segments: Sequence[TranscriptionSegment]) -> str:
    """The text of a .vtt file."""
    cues = (
        f"{clock(segment.start, '.')} --> {clock(segment.end, '.')}\n{subtitle_line(segment)}\n\n"
        for segment in segments
    )
    return "WEBVTT\n\n" + "".join(cues)


def clock(seconds: float, mark: str) -> str:
    """A time as hours, minutes, seconds and milliseconds. mark: before the milliseconds."""
    milliseconds = round(1000 * seconds)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{milliseconds // 1000:02d}{mark}{milliseconds % 1000:03d}"


def subtitle_line(segment: TranscriptionSegment) -> str:
    """The text of a segment in one line, without the arrow that stands between times."""
    return " ".join(segment.text.split()).replace("-->", "->")
