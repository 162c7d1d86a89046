"""Publishes which KV blocks come and go in vLLM's wire format, for routers that understand it (llm-d, Dynamo).

    PUB     [topic, number (8 bytes, big-endian), msgpack of a batch]
    ROUTER  [first number] -> [number, batch] for each that is kept, then [-1, empty]

A batch is [time, events, rank]; an event is written by position or by field name (`KVEventsConfig.form`), with the
name of its kind. Block hashes are the last 64 bits of block names, as vLLM sends them by default.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from pagewire.engine_core.schedule.block_changes import CLEARED, Change, Removed, Stored
from pagewire.ipc.wire.block_names import ROOT
from pagewire.ipc.wire.kv_events import KVEventsConfig

logger = logging.getLogger("pagewire.core")

MEDIUM = "GPU"  # vLLM's name of the memory that attention reads, whatever the device is
RANK = 0  # among data-parallel engines that share an address; a core is alone at its own
END = (-1).to_bytes(8, "big", signed=True)
BUFFER_BYTES = 64 << 20  # of batches that are kept to be sent again
FLUSH_MS = 500  # how long closing may take to send what is queued

STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
REMOVED = ("block_hashes", "medium")


class KVPublisher:
    """The sockets of the publisher. `publish` and `close` are called on the core's thread.

    Raises:
        OSError: an address cannot be used.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], config: KVEventsConfig, block_size: int
    ) -> None:
        self._by_name = config.form == "map"
        self._block_size = block_size
        self._topic = config.topic.encode()
        self._number = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._num_kept = config.buffer_steps
        self._num_bytes = 0
        self._lock = threading.Lock()  # guards what is kept
        self._socket = context.socket(zmq.PUB)
        self._socket.sndhwm, self._socket.linger = config.hwm, FLUSH_MS
        self._thread: threading.Thread | None = None
        try:
            attach(self._socket, config.endpoint, config.binds)
            if config.replay_endpoint is not None:
                self._start_replay(context, config.replay_endpoint, config.buffer_steps)
        except BaseException:
            self._socket.close(0)
            raise
        logger.info("KV events are published at %s", config.endpoint)
        self.publish([CLEARED])  # what subscribers know of an earlier core at this address no longer holds

    def publish(self, changes: Iterable[Change]) -> None:
        """Send changes as one batch. Subscribers that do not read lose it; they can have it sent again."""
        events: list[Any] = list(events_of(changes, self._block_size))
        if self._by_name:
            events = [by_name(event) for event in events]
        payload = msgspec.msgpack.encode([time.time(), events, RANK])
        with self._lock:
            self._kept.append((self._number, payload))
            self._num_bytes += len(payload)
            while len(self._kept) > self._num_kept or self._num_bytes > BUFFER_BYTES:
                self._num_bytes -= len(self._kept.popleft()[1])
        self._socket.send_multipart([self._topic, self._number.to_bytes(8, "big"), payload], zmq.NOBLOCK)
        self._number += 1

    def close(self) -> None:
        """Close the sockets, and end the thread."""
        if self._thread is not None:
            os.close(self._stop_fd)
            self._thread.join()
        self._socket.close(FLUSH_MS)

    # -------------------------------------------------------------- the thread that sends again

    def _start_replay(self, context: zmq.Context[zmq.Socket[bytes]], address: str, num_kept: int) -> None:
        socket = context.socket(zmq.ROUTER)
        socket.sndhwm, socket.linger, socket.maxmsgsize = num_kept + 16, 0, 1024
        try:
            attach(socket, address, binds=True)
        except BaseException:
            socket.close(0)
            raise
        stopped, self._stop_fd = os.pipe()
        name = "pagewire-kv-replay"
        self._thread = threading.Thread(target=self._replay, args=(socket, stopped), name=name, daemon=True)
        self._thread.start()

    def _replay(self, socket: zmq.Socket[bytes], stopped: int) -> None:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(stopped, zmq.POLLIN)
        while stopped not in dict(poller.poll()):
            peer, *frames = socket.recv_multipart()
            if len(frames) != 2 or len(frames[1]) != 8:
                logger.warning("a request for KV events is no number of 8 bytes after an empty frame")
                continue
            first = int.from_bytes(frames[1], "big")
            with self._lock:
                kept = [(number, payload) for number, payload in self._kept if number >= first]
            for number, payload in kept:
                socket.send_multipart([peer, b"", number.to_bytes(8, "big"), payload])
            socket.send_multipart([peer, b"", END, b""])
        socket.close(0)
        os.close(stopped)


def events_of(changes: Iterable[Change], block_size: int) -> Iterator[list[Any]]:
    """Events as their kind and fields; blocks that follow each other in a sequence are one event."""
    stored: list[Stored] = []
    for change in changes:
        if stored and not (isinstance(change, Stored) and change.parent == stored[-1].name):
            yield stored_event(stored, block_size)
            stored = []
        if isinstance(change, Stored):
            stored.append(change)
        elif isinstance(change, Removed):
            yield ["BlockRemoved", [block_hash(change.name)], MEDIUM]
        else:
            yield ["AllBlocksCleared"]
    if stored:
        yield stored_event(stored, block_size)


def stored_event(blocks: Sequence[Stored], block_size: int) -> list[Any]:
    """The event for blocks, each of which follows the one before."""
    hashes = [block_hash(block.name) for block in blocks]
    parent = None if blocks[0].parent == ROOT else block_hash(blocks[0].parent)
    token_ids = [token_id for block in blocks for token_id in block.token_ids]
    lora_id, lora_name = blocks[0].lora_id, blocks[0].lora_name
    return ["BlockStored", hashes, parent, token_ids, block_size, lora_id, MEDIUM, lora_name]


def by_name(event: Sequence[Any]) -> dict[str, Any]:
    """An event with the names of its fields."""
    kind, *fields = event
    names = STORED if kind == "BlockStored" else REMOVED
    return {"type": kind} | dict(zip(names, fields, strict=False))


def block_hash(name: bytes) -> int:
    """The hash of a block: the last 64 bits of its name."""
    return int.from_bytes(name[-8:], "big")


def attach(socket: zmq.Socket[bytes], address: str, binds: bool) -> None:
    """Bind a socket, for this user alone if it is an ipc one, or connect it.

    Raises:
        OSError: that is not possible.
    """
    try:
        (socket.bind if binds else socket.connect)(address)
    except zmq.ZMQError as error:
        raise OSError(f"KV events cannot be published at {address}: {error.strerror}") from error
    if binds and address.startswith("ipc://"):
        Path(address.removeprefix("ipc://")).chmod(0o600)
