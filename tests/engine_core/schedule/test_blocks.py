from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.engine_core.schedule.blocks import Block, BlockPool


def take(pool: BlockPool, count: int, *names: bytes) -> list[Block]:
    """Blocks of one user, the first of them named."""
    blocks = pool.allocate(count)
    for block, name in zip(blocks, names, strict=False):
        pool.register(block, name)
    return blocks


def ids(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def test_blocks_are_given_out_in_order() -> None:
    pool = BlockPool(4)
    assert ids(pool.allocate(3)) == [0, 1, 2]
    assert pool.num_free == 1 and list(pool.free_order()) == [3]


def test_more_than_are_free_are_refused_whole() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(ValueError, match="2 blocks requested, 1 free"):
        pool.allocate(2)
    assert list(pool.free_order()) == [1]


def test_named_blocks_queue_at_the_back_and_nameless_ones_jump_to_the_front() -> None:
    pool = BlockPool(6)
    blocks = take(pool, 4, b"a", b"b")
    pool.free(reversed(blocks))
    assert list(pool.free_order()) == [2, 3, 4, 5, 1, 0]


def test_the_least_recently_used_is_evicted_first() -> None:
    pool = BlockPool(3)
    a, b, c = take(pool, 3, b"a", b"b", b"c")
    pool.free([b])
    pool.free([a])
    pool.free([c])
    pool.share([b])
    pool.free([b])  # used again: now the youngest
    assert list(pool.free_order()) == [0, 2, 1]
    assert pool.allocate(1) == [a]
    assert pool.find(b"a") is None and a.name is None
    assert pool.find(b"b") is b and pool.find(b"c") is c
    assert pool.num_evictions == 1


def test_a_block_is_free_when_its_last_user_leaves() -> None:
    pool = BlockPool(2)
    blocks = take(pool, 1, b"a")
    pool.share(blocks)
    pool.free(blocks)
    assert pool.num_free == 1
    pool.free(blocks)
    assert pool.num_free == 2 and pool.find(b"a") is blocks[0]


def test_a_free_block_that_is_shared_leaves_the_free_list() -> None:
    pool = BlockPool(3)
    blocks = take(pool, 1, b"a")
    pool.free(blocks)
    pool.share(blocks)
    assert list(pool.free_order()) == [1, 2] and blocks[0].num_refs == 1


def test_freeing_twice_is_noticed() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)


def test_the_first_block_of_a_name_keeps_it() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, b"a")
    pool.register(second, b"a")
    assert pool.find(b"a") is first and second.name is None


def test_a_name_once_given_stays() -> None:
    pool = BlockPool(1)
    (block,) = take(pool, 1, b"a")
    pool.register(block, b"b")
    assert block.name == b"a" and pool.find(b"b") is None


def test_a_block_that_loses_its_name_is_the_next_to_be_used() -> None:
    pool = BlockPool(3)
    a, b, c = take(pool, 3, b"a", b"b", b"c")
    pool.free([a, b])
    pool.unname(b)
    assert list(pool.free_order()) == [1, 0] and set(pool.named) == {b"a", b"c"}
    pool.unname(c)  # in use
    pool.free([c])
    assert list(pool.free_order()) == [2, 1, 0] and pool.num_evictions == 0


def test_forgetting_drops_names_but_neither_users_nor_order() -> None:
    pool = BlockPool(3)
    blocks = take(pool, 2, b"a", b"b")
    pool.free([blocks[0]])
    pool.forget()
    assert pool.find(b"a") is None and pool.find(b"b") is None
    assert list(pool.free_order()) == [2, 0] and blocks[1].num_refs == 1
    pool.free([blocks[1]])
    assert list(pool.free_order()) == [1, 2, 0]
    pool.allocate(3)
    assert pool.num_evictions == 0


@given(st.data())
def test_any_order_of_events_keeps_the_books(data: st.DataObject) -> None:
    """Against a list and counters instead of links."""
    pool = BlockPool(5)
    users: list[list[Block]] = []
    for number in range(data.draw(st.integers(0, 25))):
        event = data.draw(st.sampled_from(["allocate", "name", "share", "free", "forget"]))
        if event == "allocate" and pool.num_free:
            order = list(pool.free_order())
            users.append(pool.allocate(data.draw(st.integers(1, pool.num_free))))
            assert ids(users[-1]) == order[: len(users[-1])]
        elif event == "name" and users:
            pool.register(data.draw(st.sampled_from(users))[0], b"%d" % number)
        elif event == "share" and pool.named:
            block = pool.named[data.draw(st.sampled_from(sorted(pool.named)))]
            pool.share([block])
            users.append([block])
        elif event == "free" and users:
            pool.free(reversed(users.pop(data.draw(st.integers(0, len(users) - 1)))))
        elif event == "forget":
            pool.forget()
        refs = [sum(user.count(block) for user in users) for block in pool.blocks]
        assert [block.num_refs for block in pool.blocks] == refs
        assert sorted(pool.free_order()) == [i for i, count in enumerate(refs) if count == 0]
        assert pool.num_free == refs.count(0)
        assert pool.named == {block.name: block for block in pool.blocks if block.name is not None}
