"""`pagewire keys`: CURVE certificates for cores and frontends on different machines."""

from __future__ import annotations

import argparse
from pathlib import Path


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "keys",
        help="make a CURVE certificate",
        description="Make NAME.key (public: give it to the other side) and NAME.key_secret (keep it).",
    )
    parser.add_argument("folder", type=Path, help="where to put the two files; made with mode 0700")
    parser.add_argument("name", help="of the core or the frontend")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the two files, and say where."""
    import zmq.auth

    options.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    public, secret = zmq.auth.create_certificates(options.folder, options.name)
    Path(secret).chmod(0o600)
    print(f"public: {public}\nsecret: {secret}")
    return 0
