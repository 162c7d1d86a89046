"""What is kept of media is bounded by what it holds, whatever clients send."""

from __future__ import annotations

from pagewire.frontend.media.cache import DecodedCache, RecentKeys
from pagewire.frontend.media.items import MAX_NAMES, Decoded
from pagewire.ipc.recent import ENTRY_BYTES, Recent
from pagewire.ipc.wire.budget import MAX_OPTIONS_CHARS
from pagewire.ipc.wire.codec import Tensor


def content(num_bytes: int) -> Decoded:
    return Decoded("audio", Tensor("float32", (num_bytes // 4,), bytes(num_bytes)))


def test_what_was_used_least_recently_is_dropped_first() -> None:
    kept: Recent[str, int] = Recent(3 * (100 + ENTRY_BYTES))
    for number, name in enumerate("abc"):
        kept.put(name, number, 100)
    assert kept.get("a") == 0
    kept.put("d", 3, 100)
    assert [kept.get(name) for name in "abcd"] == [0, None, 2, 3]
    kept.put("c", 5, 50)
    assert (kept.num_bytes, len(kept), list(kept)) == (250 + 3 * ENTRY_BYTES, 3, [0, 3, 5])
    kept.put("large", 6, 10_000)
    assert list(kept) == [0, 3, 5], "it is not kept, and drops no other"


def test_values_are_kept_up_to_a_number_of_bytes() -> None:
    keys = RecentKeys(60.0, 10_000)
    for number in range(100):
        keys.put(number, number, 1000)
    assert keys.get(99) == 99 and keys.get(0) is None
    assert keys.num_bytes <= 10_000


def test_names_of_a_medium_are_few_however_many_arguments_it_comes_with() -> None:
    medium = content(40)
    names = {medium.name(f'{{"a":{number}}}') for number in range(100)}
    assert len(names) == 100 and len(medium._names) <= MAX_NAMES
    cache = DecodedCache(10 * (MAX_NAMES * MAX_OPTIONS_CHARS + 1000))
    for number in range(100):
        cache.get_or_make(number, lambda: content(40))
    assert len(cache) == 10
