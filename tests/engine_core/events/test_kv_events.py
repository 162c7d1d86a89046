"""KV events, read by structs as vLLM declares them (vllm/distributed/kv_events.py), and asked for again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from pagewire.engine_core.events.kv_events import END, KVPublisher, block_hash
from pagewire.engine_core.schedule.block_changes import CLEARED, Removed, Stored
from pagewire.ipc.options.engine_args import EngineArgs
from pagewire.ipc.wire.block_names import ROOT, prompt_names
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.kv_events import KVEventsConfig, kv_events_config

WAIT_MS = 20_000


class Event(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """vLLM's KVCacheEvent, up to 0.22."""


class BlockStored(Event):
    """Blocks were cached."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    lora_name: str | None = None


class BlockRemoved(Event):
    """Blocks were evicted."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(Event):
    """All were."""


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """vLLM's batch."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class MapEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """vLLM's KVCacheEvent since 0.23."""


class StoredMap(MapEvent, tag="BlockStored"):
    """Blocks were cached. The last fields have defaults, which are left out."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class RemovedMap(MapEvent, tag="BlockRemoved"):
    """Blocks were evicted."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class ClearedMap(MapEvent, tag="AllBlocksCleared"):
    """All were."""


class MapBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A batch of these."""

    ts: float
    events: list[StoredMap | RemovedMap | ClearedMap]
    data_parallel_rank: int | None = None


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    """A context, destroyed after the test."""
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(0)


def subscribe(context: zmq.Context[Any], address: str, topic: bytes = b"") -> zmq.Socket[Any]:
    socket = context.socket(zmq.SUB)
    socket.subscribe(topic)
    socket.connect(address)
    return socket


CHANGES = [
    Stored(b"a" * 32, ROOT, [1, 2]),
    Stored(b"b" * 32, b"a" * 32, [3, 4]),
    Stored(b"c" * 32, b"a" * 32, [5, 6], 3, "sql"),
    Removed(b"b" * 32),
    CLEARED,
]
A, B, C = (block_hash(name * 32) for name in (b"a", b"b", b"c"))


@pytest.mark.parametrize("form", ["array", "map"])
def test_events_are_those_of_vllm(context: zmq.Context[Any], tmp_path: Path, form: str) -> None:
    address, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    values = {"endpoint": address, "replay_endpoint": replay, "topic": "kv@here@demo", "form": form}
    config = kv_events_config(None, values)
    assert config is not None
    publisher = KVPublisher(context, config, 2)
    assert (tmp_path / "events").stat().st_mode & 0o777 == 0o600
    publisher.publish(CHANGES)
    socket = context.socket(zmq.DEALER)
    socket.connect(replay)
    socket.send_multipart([b"", (0).to_bytes(8, "big")])
    answers = []
    while not answers or answers[-1][1] != END:
        assert socket.poll(WAIT_MS)
        answers.append(socket.recv_multipart())
    assert [int.from_bytes(answer[1], "big") for answer in answers[:-1]] == [0, 1]
    assert answers[-1] == [b"", END, b""]
    batches = [msgspec.msgpack.decode(answer[2], type=BATCHES[form]) for answer in answers[:-1]]
    stored, removed, cleared = EVENTS[form]
    assert batches[0].events == [cleared()]
    assert batches[1].events == [
        stored([A, B], None, [1, 2, 3, 4], 2, None, "GPU", None),
        stored([C], A, [5, 6], 2, 3, "GPU", "sql"),
        removed([B], "GPU"),
        cleared(),
    ]
    assert batches[1].ts > 1e9
    assert batches[1].data_parallel_rank == 0
    publisher.close()


BATCHES: dict[str, Any] = {"array": KVEventBatch, "map": MapBatch}
EVENTS: dict[str, Any] = {
    "array": (BlockStored, BlockRemoved, AllBlocksCleared),
    "map": (StoredMap, RemovedMap, ClearedMap),
}


def test_what_is_kept_is_bounded(context: zmq.Context[Any], tmp_path: Path) -> None:
    replay = f"ipc://{tmp_path}/replay"
    config = KVEventsConfig(endpoint=f"ipc://{tmp_path}/events", replay_endpoint=replay, buffer_steps=2)
    publisher = KVPublisher(context, config, 2)
    for _ in range(5):
        publisher.publish([CLEARED])
    socket = context.socket(zmq.DEALER)
    socket.connect(replay)
    socket.send_multipart([b"", b"no number"])  # is no request
    socket.send_multipart([b"", (2).to_bytes(8, "big")])
    numbers = []
    while not numbers or numbers[-1] != END:
        assert socket.poll(WAIT_MS)
        numbers.append(socket.recv_multipart()[1])
    assert [int.from_bytes(number, "big") for number in numbers[:-1]] == [4, 5]
    publisher.close()


def test_a_core_publishes_the_blocks_of_prompts(context: zmq.Context[Any], tmp_path: Path) -> None:
    """Through the pool of a scheduler, and a subscriber that was there before."""
    from pagewire.engine_core.events.block_events import BlockEvents
    from pagewire.engine_core.schedule.kv_cache import KVCache
    from tests.engine_core.schedule.test_block_changes import sequence

    address = f"ipc://{tmp_path}/events"
    socket = subscribe(context, address, b"kv")
    config = KVEventsConfig(endpoint=address, topic="kv")
    publisher = KVPublisher(context, config, 4)
    kv = KVCache(8, 4)

    events = BlockEvents(SimpleNamespace(attached={}), kv.pool, publisher)  # type: ignore[arg-type]
    known: set[int] = set()
    moment = 1.0
    tokens = 0
    while not known:  # a subscriber that is slow to connect misses the first batches
        tokens += 1
        new = sequence([tokens] * 9)
        assert kv.admit(new, 0)
        new.computed = 9
        kv.register(new)
        kv.free(new)
        moment += 1.0
        events.flush(moment)
        while socket.poll(10):
            topic, number, payload = socket.recv_multipart()
            batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
            assert (topic, len(number)) == (b"kv", 8)
            for event in batch.events:
                if isinstance(event, BlockStored):
                    known |= set(event.block_hashes)
                    names = prompt_names(Prompt(event.token_ids), 4)
                    assert event.block_hashes == [block_hash(name) for name in names]
    publisher.close()


@pytest.mark.parametrize(
    ("address", "values", "message"),
    [
        ("tcp://*:5557", {}, "reaches other machines"),
        ("tcp://10.0.0.1:5557", {}, "reaches other machines"),
        (None, {"endpoint": "ipc:///x", "replay_endpoint": "tcp://*:1"}, "replay_endpoint"),
        ("udp://x:1", {}, "must be ipc:///PATH or tcp://HOST:PORT"),
        ("ipc://x", {}, "must be ipc:///PATH"),
        ("tcp://127.0.0.1", {}, "must be"),
        ("ipc:///x", {"endpoint": "ipc:///y"}, "not both"),
        ("ipc:///x", {"max_queue_size": 5}, "max_queue_size"),
        ("ipc:///x", {"publisher": "kafka"}, "kafka"),
    ],
)
def test_bad_options_are_refused(address: str | None, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("*", r"\*")):
        EngineArgs(kv_events=address, kv_events_config=values).check()


def test_options_of_vllm_are_understood() -> None:
    values = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv"}
    config = kv_events_config(None, values | {"open_to_network": True})
    assert config is not None
    assert config.binds
    assert not KVEventsConfig(endpoint="tcp://epp:5557").binds
    assert KVEventsConfig(endpoint="tcp://127.0.0.1:5557", bind=True).binds
    assert kv_events_config(None, {"publisher": "null"}) is None
    assert kv_events_config(None, {}) is None
    with pytest.raises(ValueError, match="needs enable_prefix_caching"):
        EngineArgs(kv_events="ipc:///x", enable_prefix_caching=False).check()


def test_an_address_in_use_ends_the_start(context: zmq.Context[Any], tmp_path: Path) -> None:
    config = KVEventsConfig(endpoint="tcp://127.0.0.1:*", bind=True)
    publisher = KVPublisher(context, config, 4)
    used = publisher._socket.last_endpoint.decode()
    for address, why in ((used, "in use"), (f"ipc://{tmp_path}/none/events", "No such file")):
        with pytest.raises(OSError, match=f"cannot be published at {address}: .*{why}"):
            KVPublisher(context, KVEventsConfig(endpoint=address, bind=True), 4)
    publisher.close()
