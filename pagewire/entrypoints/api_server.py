"""vLLM's demonstration server under its name: `pagewire serve`, whose endpoint /generate it is."""

import sys

from pagewire.cli.main import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
