"""The key of a group of workers on several machines: one secret, which the core and all workers have.

From it both sides derive the CURVE keys of both. Who has the file can act as the core or as a worker.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from pagewire.ipc.host.owned import open_owned
from pagewire.ipc.wire.sockets import CurveKeys, runtime_dir

HEADER = "pagewire-workers-1"
MAX_BYTES = 1000


@dataclass(frozen=True)
class GroupKey:
    """The secret of a group; 32 random bytes."""

    secret: bytes = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> GroupKey:
        """The key in a file.

        Raises:
            OSError: it cannot be read. PermissionError: other users can read or change it.
            ValueError: it holds no key.
        """
        with os.fdopen(open_owned(path.resolve()), "rb") as file:
            if os.fstat(file.fileno()).st_mode & (stat.S_IROTH | stat.S_IWOTH):
                raise PermissionError(f"{path} holds a secret that every user may read: chmod 600 {path}")
            return cls.parse(file.read(MAX_BYTES).decode(errors="replace"), str(path))

    @classmethod
    def parse(cls, text: str, source: str) -> GroupKey:
        """The key in a text, as `text` makes it. source: where it comes from.

        Raises:
            ValueError: it holds no key.
        """
        try:
            header, digits = text.split()
            key = cls(bytes.fromhex(digits))
        except ValueError:
            header, key = "", cls(b"")
        if header != HEADER or len(key.secret) != 32:
            raise ValueError(f"{source} holds no key of workers: the core makes one, see --join-key")
        return key

    @property
    def text(self) -> str:
        """The key as a file holds it."""
        return f"{HEADER} {self.secret.hex()}\n"

    @classmethod
    def read_or_make(cls, path: Path) -> GroupKey:
        """The key in a file, which is made if it does not exist.

        Raises:
            see `read`.
        """
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except FileExistsError:
            return cls.read(path)
        key = cls(secrets.token_bytes(32))
        with os.fdopen(descriptor, "w") as file:
            file.write(key.text)
        return key

    @property
    def core(self) -> CurveKeys:
        """The keys of the core."""
        return CurveKeys(*self._pair("core"))

    @property
    def worker(self) -> CurveKeys:
        """The keys of all workers."""
        return CurveKeys(*self._pair("worker"), server=self.core.public)

    def _pair(self, role: str) -> tuple[bytes, bytes]:
        secret = z85.encode(hmac.digest(self.secret, role.encode(), hashlib.sha256))
        return zmq.curve_public(secret), secret


def default_key_file() -> Path:
    """The file of the key where the options name none."""
    return runtime_dir() / "join.key"
