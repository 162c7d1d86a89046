"""Names of full KV blocks, by which equal prefixes share them.

A name is a sha256 chain over the block's tokens, the name of the block before it, and everything else that its
keys and values depend on. Equal names mean equal content. The hash is a cryptographic one because after a
collision one user would read another's cache.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

ROOT = bytes(32)  # the parent of a first block; as long as a name, so that the hashed bytes are unambiguous


def hash_block(parent: bytes, token_ids: Sequence[int], keys: bytes = b"") -> bytes:
    """The name (32 bytes) of a block that holds `token_ids` and follows the block named `parent`.

    parent: `ROOT` for the first block of a sequence.
    keys: what else the content depends on (`Sequence.block_keys`).
    """
    return sha256(b"%d|%b%b%b" % (len(token_ids), parent, array("i", token_ids).tobytes(), keys)).digest()
