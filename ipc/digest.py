"""The digest by which contents are named."""

from __future__ import annotations

from collections.abc import Iterable


def sha256_of(parts: Iterable[bytes | bytearray | memoryview]) -> bytes:
    """The sha256 (32 bytes) of the parts, one after the other."""
    from hashlib import sha256  # loads OpenSSL, and most frontends name nothing

    digest = sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()
