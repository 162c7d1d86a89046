"""The text of a window of 30 seconds: the segments between its timestamps, and where the next window begins.

<|0.00|> Hello.<|2.40|><|2.40|> How are you?<|5.00|><|5.00|> I am
        segment                segment              cut off: the next window begins at 5.00

As `transcribe` of openai/whisper and `generate` of transformers divide it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

FRAMES_OF_POSITION = (
    2  # frames of the spectrogram for a position of the encoder, which is the unit of timestamps
)


class TranscriptionSegment(msgspec.Struct):
    """A part of a transcription, with fields as in OpenAI's API.

    seek: the first frame of its window. start, end: in seconds. tokens: with the timestamps around them.
    avg_logprob, compression_ratio, no_speech_prob: of its window as a whole, decoded at `temperature`.
    """

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class TimedTokens(NamedTuple):
    """The tokens of a segment, and its times in positions of the window."""

    tokens: list[int]
    start: int
    end: int


def divide(tokens: Sequence[int], first: int, num_frames: int) -> tuple[list[TimedTokens], int]:
    """The segments in the tokens of a window, and the frames by which the next window begins later.

    first: the token of 0.00 seconds; those from it on are timestamps. num_frames: of the window.
    """
    is_time = [token >= first for token in tokens]
    ends = [i for i in range(1, len(tokens)) if is_time[i - 1] and is_time[i]]
    if not ends:
        last = num_frames // FRAMES_OF_POSITION
        times = [token - first for token in tokens if token >= first]
        if times and times[-1] > 0:
            last = times[-1]
        return [TimedTokens(list(tokens), 0, last)], num_frames
    ends_whole = is_time[-2:] == [False, True]  # nothing is said behind the last timestamp
    if ends_whole:
        ends.append(len(tokens))
    pieces = [
        TimedTokens(list(tokens[start:end]), tokens[start] - first, tokens[end - 1] - first)
        for start, end in zip([0, *ends], ends, strict=False)
    ]
    return pieces, num_frames if ends_whole else pieces[-1].end * FRAMES_OF_POSITION


def compression_ratio(text: str) -> float:
    """How many times as long a text is as when it is compressed: large where it repeats itself."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))
