"""The core refuses what is too large, quickly, and whatever frontend sends it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from pagewire.engine_core.clients.clients import Clients
from pagewire.ipc.wire.budget import MAX_BATCH_BYTES, MAX_HELLO_BYTES
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.messages import PROTOCOL, Hello, Refused, Submit
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.requests import Request
from pagewire.ipc.wire.sockets import bind_router, send
from tests.engine_core.conftest import WAIT_MS, RawFrontend, RunningCore


@pytest.fixture
def core(start_core: Callable[..., RunningCore]) -> RunningCore:
    return start_core()


def test_the_first_frame_of_a_message_is_bounded_by_the_sizes_of_the_engine(core: RunningCore) -> None:
    greedy, other = core.frontend("greedy"), core.frontend("other")
    info = greedy.attach().info
    other.attach()
    limit = info.max_message_bytes
    assert limit < 6 << 20  # for 128 tokens
    send(greedy.socket, [msgspec.msgpack.encode({"type": "submit", "requests": [1] * (limit + 1)})])
    refused = greedy.hear()
    assert isinstance(refused, Refused) and f"over the limit of {limit}" in refused.error
    for frontend in (other, greedy):  # it is still attached
        frontend.submit(1, [1, 2, 3], max_tokens=2)
        frontend.finish((1, 0))


def test_several_requests_have_less_room_than_one(core: RunningCore) -> None:
    """Decoding a message holds up the core; requests that are large come one by one."""
    greedy = core.frontend("greedy")
    greedy.attach()
    words = SamplingParams(bad_words=["x" * 250] * 100, max_tokens=2)
    large = [Request(key, "r", Prompt([1, 2]), words, 7) for key in range(100)]
    assert len(greedy.codec.encode(Submit(large))[0]) > MAX_BATCH_BYTES
    greedy.say(Submit(large))
    refused = greedy.hear()
    assert isinstance(refused, Refused) and "with 100 requests is over the limit" in refused.error
    long = Request(1, "r", Prompt([5] * (MAX_BATCH_BYTES + 1)), SamplingParams(), 7)
    greedy.say(Submit([long]))  # is decoded, and refused as any other
    greedy.finish((1, 0))
    assert "tokens" in (greedy.ends[1, 0].error or "")
    greedy.submit(2, [1, 2, 3], max_tokens=2)
    greedy.finish((2, 0))


def test_parameters_over_their_limits_are_refused(core: RunningCore) -> None:
    frontend = core.frontend()
    frontend.attach()
    request = [
        1,
        "r",
        [[1]],
        {"type": "sampling", "n": 64, "logit_bias": dict.fromkeys(range(1 << 15), 1.0)},
        7,
    ]
    send(frontend.socket, [msgspec.msgpack.encode({"type": "submit", "requests": [request]})])
    refused = frontend.hear()
    assert isinstance(refused, Refused) and "at most 1048576" in refused.error
    frontend.submit(1, [1, 2, 3], max_tokens=2)  # the key is free
    frontend.finish((1, 0))


def test_before_the_engine_is_ready_only_greetings_fit(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/core.sock"
    context: zmq.Context[Any] = zmq.Context()
    clients = Clients(bind_router(context, address), 30.0)
    stranger = RawFrontend(context, address, "stranger")
    try:
        send(stranger.socket, [bytes(MAX_HELLO_BYTES + 1)])
        stranger.say(Hello(PROTOCOL, "test", 1))
        clients.socket.poll(WAIT_MS)
        greetings: list[Any] = []
        while not greetings:
            greetings += [message for _, message, _ in clients.messages(0.0) if message is not None]
        assert isinstance(greetings[0], Hello)
        refused = stranger.hear()
        assert isinstance(refused, Refused) and f"over the limit of {MAX_HELLO_BYTES}" in refused.error
    finally:
        context.destroy(0)
