from __future__ import annotations

from array import array
from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from pagewire.ipc.wire.block_names import ROOT, hash_block

tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8)
names = st.just(ROOT) | st.binary(min_size=32, max_size=32)
keys = st.binary(max_size=40)


def test_a_name_is_a_sha256_of_length_parent_tokens_and_keys() -> None:
    told = b"2|" + ROOT + array("i", [5, 6]).tobytes() + b"salt"
    assert hash_block(ROOT, [5, 6], b"salt") == sha256(told).digest()


@given(names, tokens, keys)
def test_equal_content_has_an_equal_name_of_32_bytes(
    parent: bytes, token_ids: list[int], extra: bytes
) -> None:
    name = hash_block(parent, token_ids, extra)
    assert len(name) == len(ROOT) == 32
    assert name == hash_block(parent, tuple(token_ids), bytes(extra))


@given(names, tokens, keys, names, tokens, keys)
def test_other_content_has_another_name(
    parent: bytes, token_ids: list[int], extra: bytes, parent2: bytes, token_ids2: list[int], extra2: bytes
) -> None:
    same = (parent, token_ids, extra) == (parent2, token_ids2, extra2)
    assert (hash_block(parent, token_ids, extra) == hash_block(parent2, token_ids2, extra2)) == same


@given(st.lists(tokens, min_size=2, max_size=4), st.data())
def test_a_name_tells_of_all_blocks_before(blocks: list[list[int]], data: st.DataObject) -> None:
    def chain(blocks: list[list[int]]) -> bytes:
        name = ROOT
        for block in blocks:
            name = hash_block(name, block)
        return name

    i = data.draw(st.integers(0, len(blocks) - 1))
    j = data.draw(st.integers(0, len(blocks[i]) - 1))
    changed = [list(block) for block in blocks]
    changed[i][j] ^= 1
    assert chain(changed) != chain(blocks)


@given(st.binary(min_size=32, max_size=32), st.lists(st.integers(0, 2**31 - 1), min_size=8, max_size=8))
def test_salt_and_tokens_cannot_spell_a_parent(parent: bytes, token_ids: list[int]) -> None:
    """A first block whose tokens and salt are the bytes of another block's parent and tokens."""
    spelt = parent + array("i", token_ids).tobytes()
    first, salt = array("i", spelt[:32]).tolist(), spelt[32:]
    assert hash_block(ROOT, first, salt) != hash_block(parent, token_ids)
