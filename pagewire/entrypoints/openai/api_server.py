"""The HTTP server under vLLM's name: `python -m pagewire.entrypoints.openai.api_server` is `pagewire serve`."""

import sys

from pagewire.cli.main import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
