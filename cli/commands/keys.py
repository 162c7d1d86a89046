"""`pagewire keys`: CURVE certificates for cores and frontends on different machines."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from pagewire.cli.options import UsageError


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "keys",
        help="make a CURVE certificate",
        description="Make NAME.key (public: give it to the other side) and NAME.key_secret (keep it).",
    )
    parser.add_argument("folder", type=Path, help="folder for the two files; created with mode 0700")
    parser.add_argument("name", help="name of the core or frontend that the certificate is for")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the two files and print their paths.

    Raises:
        UsageError: the name is a path, one of the files exists and its keys may be in use, or other users can
            change the folder.
    """
    import zmq.auth

    from pagewire.ipc.owned import check_folder

    if not options.name or Path(options.name).name != options.name:
        raise UsageError(f"the name must not be a path, got {options.name!r}")
    for path in (options.folder / f"{options.name}.{kind}" for kind in ("key", "key_secret")):
        if path.exists():
            raise UsageError(f"{path} exists; choose another name, or remove it")
    options.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        check_folder(options.folder)
    except PermissionError as error:
        raise UsageError(str(error)) from error
    os.umask(0o077)  # before the secret is written: other users must not be able to read it at any time
    public, secret = zmq.auth.create_certificates(options.folder, options.name)
    Path(public).chmod(0o644)
    print(f"public: {public}\nsecret: {secret}")
    return 0
