"""The largest pictures, sounds and sets of them that are taken: each limit is declared here only."""

from __future__ import annotations

from pagewire.ipc.wire.budget import MAX_MEDIUM_BYTES

MAX_SOURCE_BYTES = {"image": 32 << 20, "audio": 64 << 20}  # of one, as it was sent or fetched
MAX_SOURCES_BYTES = 128 << 20  # of all of a prompt, as they were sent or fetched
MAX_PIXELS = MAX_MEDIUM_BYTES // 3  # of a picture
MAX_SIDE = 1 << 14  # pixels of a side
MAX_SOUND_SECONDS = 1500
MIN_SPEECH_SECONDS = 0.1  # of a sound that is transcribed, as in OpenAI's API
MAX_LOUDNESS = 1 << 31  # of a sample; floats are from -1 to 1, but some writers scale them as integers
MAX_SAMPLES = MAX_MEDIUM_BYTES // 4  # of a sound, when it is resampled
MAX_SOUND_FRAMES = 1 << 27  # samples of one channel, before they are resampled
MAX_CHANNELS = 16
MIN_RATE, MAX_RATE = 1000, 384_000  # samples a second
MAX_DECODED_BYTES = (
    192 << 20
)  # of all pictures and sounds of a prompt: a message to the core has room for 256 MiB
