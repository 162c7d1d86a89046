"""The program that decodes, with a decoder that crashes, holds its place or fills memory at a content's word."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from pagewire.frontend.media import decode_process

decode = decode_process.decode_picture


def faulty(data: bytes, max_side: int) -> tuple[tuple[int, ...], bytes]:
    """Decode a picture, unless it says otherwise."""
    if data == b"crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if data == b"exit":
        os._exit(7)
    if data.startswith(b"hold "):
        with Path(data[5:].decode()).open("wb"):  # a FIFO: opened once the test reads it
            signal.pause()
    if data == b"fill":
        return (1,), bytes(2 << 30)
    return decode(data, max_side)


decode_process.decode_picture = faulty

if __name__ == "__main__":
    decode_process.main()
