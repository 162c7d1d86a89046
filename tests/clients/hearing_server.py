"""A server of a tiny Whisper with random weights: `python -m tests.clients.hearing_server FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from pagewire.cli.main import main
from tests.workers.seq2seq.speech import save_whisper

if __name__ == "__main__":
    folder = sys.argv[1]
    save_whisper(Path(folder))
    options = ["--port", "0", "--dtype", "float32", "--kv-cache-memory-bytes", "67108864"]
    sys.exit(main(["serve", folder, "--served-model-name", "whisper", *options]))
