"""What the pool records of names, against the names that it has."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.engine_core.schedule.block_changes import CLEARED, Removed, Stored, net_effect
from pagewire.engine_core.schedule.kv_cache import KVCache
from pagewire.engine_core.schedule.sequence import Sequence, sequences
from pagewire.engine_core.tenants.accounts import Account
from pagewire.ipc.wire.block_names import ROOT, prompt_names
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.lora import AdapterSource
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.requests import Request

SIZE = 4
steps = st.lists(
    st.tuples(st.sampled_from(["run", "end", "forget", "look"]), st.integers(0, 5), st.integers(1, 14)),
    max_size=40,
)


def sequence(token_ids: list[int], salt: str | None = None) -> Sequence:
    request = Request(1, "r", Prompt(token_ids, cache_salt=salt), SamplingParams(max_tokens=4), 7)
    return sequences(
        request, b"client", 0, 0.0, max_model_len=100, share_prefixes=True, tenant=Account(b"client")
    )[0]


@given(steps)
@settings(deadline=None, max_examples=60)
def test_changes_come_to_the_names_of_the_pool(steps: list[tuple[str, int, int]]) -> None:
    kv = KVCache(12, SIZE)
    kv.pool.changes = []
    known: set[bytes] = set()
    running: list[Sequence] = []
    for action, kind, length in steps:
        if action == "run":
            new = sequence([kind] * length)
            if kv.admit(new, 0):
                new.computed = length
                kv.register(new)
                running.append(new)
        elif action == "end" and running:
            kv.free(running.pop(kind % len(running)))
        elif action == "forget" and not running:
            kv.pool.forget()
        elif action == "look":
            changes, kv.pool.changes = kv.pool.changes, []
            cleared, came, went = net_effect(changes)
            assert not set(came) & set(went)
            known = (set() if cleared else known - set(went)) | set(came)
            assert known == set(kv.pool.named)


def test_stored_blocks_have_tokens_and_parents() -> None:
    kv = KVCache(8, SIZE)
    kv.pool.changes = []
    tokens = list(range(10))
    new = sequence(tokens, salt="mine")
    assert kv.admit(new, 0)
    new.computed = 10
    kv.register(new)
    first, second = prompt_names(Prompt(tokens, cache_salt="mine"), SIZE)
    assert kv.pool.changes == [Stored(first, ROOT, [0, 1, 2, 3]), Stored(second, first, [4, 5, 6, 7])]
    assert first != prompt_names(Prompt(tokens), SIZE)[0]


def test_stored_blocks_name_their_adapter() -> None:
    kv = KVCache(8, SIZE)
    kv.pool.changes = []
    new = sequence([1, 2, 3, 4, 5])
    new.request.adapter, new.request.prompt.adapter = AdapterSource("sql", 3, "/sql"), b"content"
    assert kv.admit(new, 0)
    new.computed = 5
    kv.register(new)
    (name,) = prompt_names(Prompt([1, 2, 3, 4], adapter=b"content"), SIZE)
    assert kv.pool.changes == [Stored(name, ROOT, [1, 2, 3, 4], 3, "sql")]


def test_nothing_is_recorded_while_nobody_reads() -> None:
    kv = KVCache(8, SIZE)
    new = sequence(list(range(10)))
    assert kv.admit(new, 0)
    new.computed = 10
    kv.register(new)
    kv.free(new)
    kv.pool.allocate(8)
    kv.pool.forget()
    assert kv.pool.changes is None


def test_only_the_last_change_of_a_name_counts() -> None:
    a, b, c = (Stored(name, ROOT, []) for name in (b"a", b"b", b"c"))
    assert net_effect([a, Removed(b"a"), b]) == (False, [b"b"], [b"a"])
    assert net_effect([a, Removed(b"a"), a]) == (False, [b"a"], [])
    assert net_effect([a, CLEARED, Removed(b"b"), c]) == (True, [b"c"], [])
