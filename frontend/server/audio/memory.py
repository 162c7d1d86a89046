"""The memory of recordings that are on their way, as files and decoded: of all together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from pagewire.frontend.client import Recording, media_threads
from pagewire.frontend.server.audio.protocol import TranscriptionRequest
from pagewire.frontend.server.http.body import IncomingBodies
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.ipc.wire.sources import SourceInfo

LARGE_UPLOADS = 4  # bodies of `max_upload_bytes` that may be there at the same time
MAX_RECORDINGS_BYTES = 1 << 30  # of all that are being transcribed: four and a half hours at 16 kHz


class RecordingMemory:
    """Counts them; over a limit, a request gets status 503.

    uploads: files that arrive, or wait to be decoded. recordings: decoded ones, until they are transcribed.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.uploads = IncomingBodies(LARGE_UPLOADS * options.max_upload_bytes)
        self.recordings = IncomingBodies(MAX_RECORDINGS_BYTES)

    @asynccontextmanager
    async def decoded(self, request: TranscriptionRequest, source: SourceInfo) -> AsyncIterator[Recording]:
        """The recording of a request, whose file is dropped.

        Raises:
            APIError: it cannot be decoded, or there are too many others. EngineBusyError: likewise.
        """
        data = bytes(request.file)  # of a `FilePart`, which no message can hold
        request.file = b""
        try:
            with self.uploads.counted(len(data)):
                recording = await media_threads.run(partial(Recording.decoded, data, source))
        except ValueError as error:  # it is no sound
            raise APIError(400, f"file: {error}", param="file") from None
        del data
        with self.recordings.counted(len(recording.samples.data)):
            yield recording
