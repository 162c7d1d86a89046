"""The file of API keys: who may use the server, and within which limits.

    # NAME   KEY                    RIGHTS
    alice    sha256:2bd806c97f0e...  max_requests=64 max_tokens=200000
    bob      sk-in-plain-text        priority=10 best_priority=5
    carol    sha256:9af15b336e6a...  admin

One line is one key; several lines with one name are several keys of one tenant. `pagewire keys --api` adds a line.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from pagewire.ipc.tenants import check_tenant

MAX_BYTES = 4 << 20  # of a key file
MIN_KEY = 8  # characters of a key in plain text
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
MAX_NUMBER = 2**31 - 1


@dataclass(frozen=True)
class Rights:
    """The rights and limits of a tenant.

    priority: of requests that give none. best_priority: the best that a request may give (lower is better); None:
    any. max_requests, max_tokens: how many may be in flight at once, where a request counts with the tokens of its
    prompts and all that it may generate; None: any number. admin: use the endpoints for operators.
    """

    priority: int = 0
    best_priority: int | None = None
    max_requests: int | None = None
    max_tokens: int | None = None
    admin: bool = False


NUMBERS = tuple(field.name for field in fields(Rights) if field.name != "admin")
LEAST = {"max_requests": 1, "max_tokens": 1}  # of the others: -MAX_NUMBER


@dataclass(frozen=True)
class KeyEntry:
    """One key: the name of its tenant, the key's sha256, and what the tenant may do."""

    name: str
    digest: bytes
    rights: Rights = Rights()


def key_digest(key: bytes) -> bytes:
    """The hash by which keys are compared, so that comparing reveals nothing about them."""
    return hashlib.sha256(key).digest()


def signature_of(path: str) -> tuple[int, ...]:
    """A value that changes when the file does.

    Raises:
        OSError: there is no such file.
    """
    found = Path(path).stat()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def read_key_file(path: str) -> list[KeyEntry]:
    """Read a file of keys, which other users must not be able to read or change.

    Raises:
        OSError: it cannot be read. ValueError: its mode or its owner is not safe, or a line is malformed.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a pipe must not block
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path} is not a regular file")
        if found.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
            mode = stat.S_IMODE(found.st_mode)
            raise ValueError(f"{path} has mode {mode:o}, so others may read or change keys: chmod 600 {path}")
        if found.st_uid not in (0, os.geteuid()):
            raise ValueError(f"{path} belongs to another user (uid {found.st_uid}): chown it")
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"{path} is larger than {MAX_BYTES} bytes, the limit of a key file")
    try:
        entries = list(parse(data.decode()))
        check_entries(entries)
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return entries


def parse(text: str) -> Iterator[KeyEntry]:
    """The keys of a file's text. Errors name the line, and never quote a key.

    Raises:
        ValueError: a line is malformed.
    """
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            if len(words) < 2:
                raise ValueError("a line is NAME KEY [RIGHTS]")
            name, key, *rights = words
            check_tenant(name)
            yield KeyEntry(name, parse_key(key), parse_rights(rights))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None


def parse_key(word: str) -> bytes:
    """The digest of a key that is given as `sha256:HEX` or in plain text; raises ValueError."""
    if word.startswith("sha256:"):
        if not DIGEST.fullmatch(word):
            raise ValueError("sha256: needs 64 lower-case hexadecimal digits")
        return bytes.fromhex(word.removeprefix("sha256:"))
    if len(word) < MIN_KEY:
        raise ValueError(f"a key has at least {MIN_KEY} characters")
    return key_digest(word.encode())


def parse_rights(words: list[str]) -> Rights:
    """Rights of words such as `max_requests=64` and `admin`; raises ValueError."""
    given: dict[str, int | bool] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name in given:
            raise ValueError(f"{name} is given twice")
        if word == "admin":
            given["admin"] = True
        elif name not in NUMBERS:
            raise ValueError(f"unknown right {name[:40]!r}; there are {', '.join(NUMBERS)} and admin")
        elif not re.fullmatch(r"-?[0-9]{1,10}", value) or not (
            LEAST.get(name, -MAX_NUMBER) <= int(value) <= MAX_NUMBER
        ):
            least = LEAST.get(name, -MAX_NUMBER)
            raise ValueError(f"{name} must be an integer from {least} to {MAX_NUMBER}")
        else:
            given[name] = int(value)
    rights = Rights(**given)  # type: ignore[arg-type]
    if rights.best_priority is not None and rights.priority < rights.best_priority:
        raise ValueError(f"priority={rights.priority} is better than best_priority={rights.best_priority}")
    return rights


def check_entries(entries: list[KeyEntry]) -> None:
    """Check that a key belongs to one tenant, and that all lines of a tenant give the same rights.

    Raises:
        ValueError: they do not.
    """
    owners: dict[bytes, str] = {}
    rights: dict[str, Rights] = {}
    for entry in entries:
        if owners.setdefault(entry.digest, entry.name) != entry.name:
            raise ValueError(f"{owners[entry.digest]} and {entry.name} have the same key")
        if rights.setdefault(entry.name, entry.rights) != entry.rights:
            raise ValueError(f"the lines of {entry.name} give different rights")
