"""`pagewire keys`: API keys of a server, and CURVE certificates for cores and frontends on different machines."""

from __future__ import annotations

import argparse
import os
import secrets
from pathlib import Path

from pagewire.cli.commands import SUMMARIES
from pagewire.cli.console.parser import UsageError
from pagewire.frontend.server.http.key_file import key_digest, parse, read_key_file
from pagewire.ipc.tenants import check_tenant

RIGHTS = {
    "priority": "of requests that give none (default: 0; lower runs earlier)",
    "best_priority": "the best priority that a request may give (default: any)",
    "max_requests": "requests in flight at once (default: any number)",
    "max_tokens": "tokens in flight at once, of prompts and all that may be generated (default: any number)",
}


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "keys",
        help=SUMMARIES["keys"],
        description="Make NAME.key (public: give it to the other side) and NAME.key_secret (keep it) in a folder. "
        "With --api: make an API key, print it, and add its name, sha256 and rights to a file for "
        "`pagewire serve --api-key-file`.",
    )
    parser.add_argument(
        "place", type=Path, metavar="FOLDER", help="folder for the two files; created with mode 0700"
    )
    parser.add_argument(
        "name", metavar="NAME", help="name of the core or frontend that the certificate is for"
    )
    group = parser.add_argument_group("API keys")
    group.add_argument(
        "--api",
        action="store_true",
        help="make an API key: FOLDER is a file of API keys, NAME the owner of the key",
    )
    for name, text in RIGHTS.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="INT", help=text)
    group.add_argument("--admin", action="store_true", help="the key may use the endpoints of --enable-admin")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Make a key or a certificate.

    Raises:
        UsageError: the name or a right is invalid, or a file is in use or not safe.
    """
    words = [f"{name}={value}" for name in RIGHTS if (value := getattr(options, name)) is not None]
    if options.admin:
        words.append("admin")
    if options.api:
        return add_api_key(options.place, options.name, words)
    if words:
        raise UsageError(f"{words[0]} is a right of an API key: give --api")
    return make_certificate(options.place, options.name)


def add_api_key(path: Path, name: str, words: list[str]) -> int:
    """Add a new key to a file, and print it; the file has only its hash.

    Raises:
        UsageError: the file cannot be read or is not safe, or the entry would not fit the others of that name.
    """
    key = "pw-" + secrets.token_urlsafe(32)
    line = " ".join([name, "sha256:" + key_digest(key.encode()).hex(), *words])
    try:
        check_tenant(name)
        (entry,) = parse(line)
        entries = read_key_file(str(path)) if path.exists() else []
        if any(other.name == name and other.rights != entry.rights for other in entries):
            raise ValueError(f"{name} has a key with other rights: give the same, or change the file")
        text = path.read_text() if path.exists() else ""
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a") as file:
            file.write(("\n" if text and not text.endswith("\n") else "") + line + "\n")
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error
    print(f"key: {key}\nfile: {path}")
    return 0


def make_certificate(folder: Path, name: str) -> int:
    """Write the two files of a certificate and print their paths.

    Raises:
        UsageError: the name is a path, one of the files exists and its keys may be in use, or other users can
            change the folder.
    """
    import zmq.auth

    from pagewire.ipc.host.owned import check_folder

    if not name or Path(name).name != name:
        raise UsageError(f"the name must not be a path, got {name!r}")
    for path in (folder / f"{name}.{kind}" for kind in ("key", "key_secret")):
        if path.exists():
            raise UsageError(f"{path} exists; choose another name, or remove it")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        check_folder(folder)
    except PermissionError as error:
        raise UsageError(str(error)) from error
    os.umask(0o077)  # before the secret is written: other users must not be able to read it at any time
    public, secret = zmq.auth.create_certificates(folder, name)
    Path(public).chmod(0o644)
    print(f"public: {public}\nsecret: {secret}")
    return 0
