"""Names for the content of KV blocks.

A full block is named by a sha256 chain: its own tokens, everything before it, and whatever else its keys and
values depend on. Equal names mean equal KV, so blocks may be shared by name. sha256 rather than a faster
hash: with a collision one user would read another's cache.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

ROOT = bytes(32)  # as long as a name, so that tokens and keys of one block never read as a parent of another


def hash_block(parent: bytes, token_ids: Sequence[int], extra: bytes = b"") -> bytes:
    """The name (32 bytes) of the block with `token_ids` behind the block named `parent` (`ROOT`: none).

    extra: keys other than tokens, such as a cache salt on the first block.
    """
    return sha256(b"%d|%b%b%b" % (len(token_ids), parent, array("i", token_ids).tobytes(), extra)).digest()
