"""Names of full KV blocks, by which equal prefixes share them.

A name is a sha256 chain over the block's tokens, the name of the block before it, and everything else that its
keys and values depend on. Equal names mean equal content. The hash is a cryptographic one because after a
collision one user would read another's cache. The core names its blocks by it, and a router the blocks of a prompt.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import Any

import msgspec

from pagewire.ipc.wire.items import Prompt

NAME_BYTES = 32
LONG = ("angles", "long")  # a key of the first block of a long sequence, see `Ready.short_length`
ROOT = bytes(NAME_BYTES)  # the parent of a first block; as long as a name: hashed bytes are unambiguous


def hash_block(parent: bytes, token_ids: Sequence[int], keys: bytes = b"") -> bytes:
    """The name (32 bytes) of a block that holds `token_ids` and follows the block named `parent`.

    parent: `ROOT` for the first block of a sequence.
    keys: what else the content depends on (`encoded_keys`).
    """
    return _hash(parent, len(token_ids), array("i", token_ids).tobytes(), keys)


def _hash(parent: bytes, num_tokens: int, tokens: bytes, keys: bytes) -> bytes:
    return sha256(b"%d|%b%b%b" % (num_tokens, parent, tokens, keys)).digest()


def encoded_keys(keys: list[tuple[Any, ...]]) -> bytes:
    """The encoded keys of a block beside tokens and parent (`Prompt.block_keys`); empty if there are none."""
    return msgspec.msgpack.encode(keys) if keys else b""


def name_blocks(
    names: list[bytes], token_ids: Sequence[int], block_size: int, keys: Callable[[int, int], bytes]
) -> None:
    """Append the names of the full blocks of a sequence that have none yet.

    names: of its first blocks. keys: called with the index of a block and the block size.
    """
    first, end = len(names), len(token_ids) // block_size
    if first >= end:
        return
    part = array("i", token_ids[first * block_size : end * block_size])
    tokens, size = part.tobytes(), block_size * part.itemsize
    parent = names[-1] if names else ROOT
    for i in range(first, end):
        at = (i - first) * size
        parent = _hash(parent, block_size, tokens[at : at + size], keys(i, block_size))
        names.append(parent)


def prompt_names(prompt: Prompt, block_size: int, short_length: int = 0) -> list[bytes]:
    """The names of the full blocks of a prompt, as a core gives them that shares prefixes between requests.

    short_length: of the engine.
    """
    is_long = 0 < short_length < len(prompt.token_ids)

    def keys(index: int, size: int) -> bytes:
        if index and not prompt.media:
            return b""
        own = prompt.block_keys(index, size)
        return encoded_keys([*own, LONG] if is_long and index == 0 else own)

    names: list[bytes] = []
    name_blocks(names, prompt.token_ids, block_size, keys)
    return names


def split_names(joined: bytes) -> Iterator[bytes]:
    """The names in `joined`, one after the other.

    Raises:
        ValueError: it is not made of whole names.
    """
    if len(joined) % NAME_BYTES:
        raise ValueError(f"{len(joined)} bytes are no names of {NAME_BYTES} bytes each")
    return (joined[at : at + NAME_BYTES] for at in range(0, len(joined), NAME_BYTES))
