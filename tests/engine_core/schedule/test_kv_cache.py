from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.engine_core.schedule.kv_cache import KVCache
from pagewire.engine_core.schedule.sequence import Sequence, sequences
from pagewire.engine_core.tenants.accounts import Account
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.items import Media, Prompt
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.requests import Request


def request(prompt: list[int], *, salt: str | None = None, **params: Any) -> Sequence:
    submitted = Request(1, "r", Prompt(prompt, cache_salt=salt), SamplingParams(**params), seed=0)
    return sequences(submitted, b"c", 0, 0.0, max_model_len=100, share_prefixes=True, tenant=Account(b"c"))[0]


def run(kv: KVCache, prompt: list[int], num_tokens: int | None = None, **fields: Any) -> Sequence:
    """A request that was admitted, and has computed `num_tokens` (all)."""
    new = request(prompt, **fields)
    assert kv.admit(new, watermark=0)
    new.computed = len(prompt) if num_tokens is None else num_tokens
    kv.register(new)
    return new


def block_ids(request: Sequence) -> list[int]:
    return [block.block_id for block in request.blocks]


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for(num_tokens: int, num_blocks: int) -> None:
    assert KVCache(1, 4).blocks_for(num_tokens) == num_blocks


@pytest.mark.parametrize(("length", "num_cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_at_most_all_but_the_last_token_is_cached(length: int, num_cached: int) -> None:
    kv = KVCache(16, 4)
    prompt = list(range(length))
    kv.free(run(kv, prompt))
    again = request(prompt)
    assert kv.admit(again, watermark=0)
    assert again.computed == num_cached
    assert len(again.blocks) == kv.blocks_for(length)


def test_only_full_computed_blocks_are_found() -> None:
    kv = KVCache(16, 4)
    run(kv, list(range(12)), num_tokens=7)
    assert kv.cached_prefix(request(list(range(12)))) == [kv.pool.blocks[0]]


def test_tokens_that_are_in_flight_have_no_name_yet() -> None:
    """Computed runs ahead of the known tokens when a sampled one is still on its way."""
    kv = KVCache(16, 4)
    first = run(kv, [1, 2, 3])
    first.computed = 4
    kv.register(first)
    assert not kv.pool.named
    first.token_ids.append(9)
    kv.register(first)
    assert kv.cached_prefix(request([1, 2, 3, 9, 5])) == first.blocks


def test_a_prefix_ends_at_the_first_missing_block() -> None:
    kv = KVCache(4, 4)
    prompt = list(range(13))
    first = run(kv, prompt)
    kv.free(first)
    blocks = kv.pool.allocate(2)  # the nameless last block, then the oldest named one: the prefix's end
    assert [block.block_id for block in blocks] == [3, 2]
    assert [block.block_id for block in kv.cached_prefix(request(prompt))] == [0, 1]


def test_a_hit_behind_a_miss_does_not_count() -> None:
    kv = KVCache(4, 4)
    prompt = list(range(13))
    first = run(kv, prompt)
    del kv.pool.named[first.block_names[0]]
    assert kv.cached_prefix(request(prompt)) == []


def test_salts_and_other_prefixes_do_not_share() -> None:
    kv = KVCache(16, 4)
    run(kv, list(range(9)), salt="a")
    assert len(kv.cached_prefix(request(list(range(9)), salt="a"))) == 2
    assert kv.cached_prefix(request(list(range(9)), salt="b")) == []
    assert kv.cached_prefix(request(list(range(9)))) == []
    assert kv.cached_prefix(request([9, 9, 9, 9, *range(4, 9)], salt="a")) == []


PICTURE = Tensor("uint8", (0,), b"")
prompts = st.builds(
    lambda token_ids, places, adapter, salt: Prompt(
        token_ids,
        [Media(start, length, name, PICTURE) for (start, length), name in places],
        adapter,
        salt,
    ),
    st.lists(st.integers(0, 1), min_size=12, max_size=12),
    st.lists(
        st.tuples(
            st.sampled_from([(0, 2), (0, 3), (3, 4), (4, 4), (9, 3)]), st.sampled_from([b"cat", b"dog"])
        ),
        max_size=1,
    ),
    st.sampled_from([b"", b"a", b"b"]),
    st.sampled_from([None, "a", "b"]),
)


@given(prompts, prompts, st.booleans())
def test_two_prompts_share_a_block_only_if_everything_up_to_it_agrees(
    a: Prompt, b: Prompt, equal: bool
) -> None:
    b = msgspec.structs.replace(b, token_ids=a.token_ids) if equal else b
    kv = KVCache(16, 4)
    names = []
    for prompt in (a, b):
        (sequence,) = sequences(
            Request(1, "r", prompt, SamplingParams(), seed=0),
            *(b"c", 0, 0.0),
            max_model_len=100,
            share_prefixes=True,
            tenant=Account(b"c"),
        )
        kv.cached_prefix(sequence)
        names.append(sequence.block_names)
    agree = (a.adapter, a.cache_salt) == (b.adapter, b.cache_salt)
    for i in range(3):
        here = slice(4 * i, 4 * i + 4)
        seen = [
            [
                (m.name, m.start - 4 * i, m.num_tokens)
                for m in prompt.media
                if m.start < 4 * i + 4 and m.start + m.num_tokens > 4 * i
            ]
            for prompt in (a, b)
        ]
        agree = agree and a.token_ids[here] == b.token_ids[here] and seen[0] == seen[1]
        assert (names[0][i] == names[1][i]) == agree


def test_the_kinds_of_keys_are_apart() -> None:
    """A salt, an adapter, a medium and a namespace differ, whatever bytes they consist of."""
    extras: list[dict[str, Any]] = [
        {"cache_salt": "a"},
        {"adapter": b"a"},
        {"media": [Media(0, 1, b"a", PICTURE)]},
        {"cache_salt": "|c|0"},
    ]
    keys = {
        sequences(
            Request(1, "r", Prompt([1, 2], **extra), SamplingParams(), seed=0),
            *(b"c", 0, 0.0),
            max_model_len=9,
            share_prefixes=shared,
            tenant=Account(b"c"),
        )[0].block_keys(0, 4)
        for extra in extras
        for shared in (True, False)
    }
    assert len(keys) == 2 * len(extras)


def test_prompt_logprobs_read_no_cache_but_fill_it() -> None:
    kv = KVCache(16, 4)
    run(kv, list(range(9)), prompt_logprobs=0)
    assert kv.cached_prefix(request(list(range(9)), prompt_logprobs=0)) == []
    assert len(kv.cached_prefix(request(list(range(9))))) == 2


def test_admission_counts_idle_cached_blocks_as_taken() -> None:
    kv = KVCache(3, 4)
    kv.free(run(kv, list(range(9))))  # 2 of 3 free blocks hold its beginning
    again = request(list(range(13)))  # 2 cached and 2 new: one too many
    assert not kv.admit(again, watermark=0)
    assert again.blocks == [] and kv.pool.num_free == 3
    assert kv.admit(request(list(range(12))), watermark=0)
    assert kv.pool.num_free == 0


def test_blocks_in_use_are_shared_for_free() -> None:
    kv = KVCache(4, 4)
    first = run(kv, list(range(9)))
    second = request(list(range(9)))
    assert kv.admit(second, watermark=0)
    assert block_ids(first) == [0, 1, 2] and block_ids(second) == [0, 1, 3]
    assert [block.num_refs for block in kv.pool.blocks] == [2, 2, 1, 1]


def test_the_watermark_stays_free() -> None:
    kv = KVCache(4, 4)
    assert not kv.admit(request(list(range(9))), watermark=2)
    assert kv.admit(request(list(range(8))), watermark=2)


def test_growing() -> None:
    kv = KVCache(4, 4)
    new = run(kv, list(range(6)))
    assert [kv.missing(new, n) for n in (1, 8, 9, 13)] == [0, 0, 1, 2]
    assert kv.grow(new, 1) == [2]
    assert block_ids(new) == [0, 1, 2]


def test_blocks_come_back_last_first() -> None:
    kv = KVCache(6, 4)
    new = run(kv, list(range(13)))
    kv.free(new)
    assert list(kv.pool.free_order()) == [3, 4, 5, 2, 1, 0]
    assert (new.blocks, new.computed, new.num_registered) == ([], 0, 0)


def test_equal_content_computed_twice_is_named_once() -> None:
    kv = KVCache(8, 4)
    first = run(kv, list(range(9)), prompt_logprobs=0)
    second = run(kv, list(range(9)), prompt_logprobs=0)
    assert kv.cached_prefix(request(list(range(9)))) == first.blocks[:2]
    kv.free(second)
    assert kv.cached_prefix(request(list(range(9)))) == first.blocks[:2]
