"""Connections to other cores, of which one does its worst: every call ends, and the other one is not disturbed."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.auth

from pagewire.engine_core.clients.access import Access
from pagewire.engine_core.tiers import peer_link
from pagewire.engine_core.tiers.peer_link import MAX_UNASKED, PeerEvent
from pagewire.engine_core.tiers.peer_links import SPARE_BYTES, PeerLinks
from pagewire.ipc.host.gate import Gate
from pagewire.ipc.wire.calls import TICKET_BYTES
from pagewire.ipc.wire.codec import Codec
from pagewire.ipc.wire.messages import (
    Call,
    CallAnswer,
    Deltas,
    Detached,
    EngineInfo,
    Hello,
    Pong,
    Refused,
    ToCore,
    Welcome,
)
from pagewire.ipc.wire.sockets import CurveKeys, bind_router, send
from pagewire.ipc.wire.tier_messages import PART_BYTES

WAIT_MS = 60_000
IDENTITY = b"i" * 32
INFO = EngineInfo(
    model="other",
    model_path="",
    tokenizer="",
    served_model_names=["other"],
    architecture="",
    dtype="float32",
    device="cpu",
    vocab_size=10,
    max_model_len=100,
    block_size=16,
    num_blocks=10,
    max_num_seqs=4,
    max_logprobs=0,
    max_n=1,
    seed=0,
    eos_token_id=None,
    generation_config={},
)


class OtherCore:
    """A ROUTER that says what a test wants said. access: with it, it has keys."""

    def __init__(self, address: str, keys: CurveKeys | None = None, access: Access | None = None) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.gate = None if access is None else Gate(self.context, access.admit)
        if self.gate is not None:
            self.gate.start()
        self.socket = bind_router(self.context, address, keys)
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.codec: Codec[ToCore] = Codec(ToCore)
        self.peer = b""

    def hear(self) -> ToCore:
        """The next message that is no sign of life."""
        while True:
            assert self.socket.poll(WAIT_MS), "nothing is said"
            self.peer, *frames = self.socket.recv_multipart()
            message = self.codec.decode(frames)
            if isinstance(message, Hello | Call):
                return message

    def welcome(self) -> None:
        assert isinstance(self.hear(), Hello)
        self.say(Welcome(INFO, "test", 1.0))

    def call(self) -> Call:
        message = self.hear()
        assert isinstance(message, Call)
        return message

    def say(self, message: Any) -> None:
        self.raw(self.codec.encode(message))

    def raw(self, frames: list[Any]) -> None:
        send(self.socket, [self.peer, *frames])

    def close(self) -> None:
        if self.gate is not None:
            self.gate.stop()
        self.context.destroy(linger=0)


class Bench:
    """Links to cores, and what they have said."""

    def __init__(self, *addresses: str, curve: CurveKeys | None = None) -> None:
        self.told = threading.Event()
        self.links = PeerLinks(addresses, curve)
        self._events: list[PeerEvent] = []
        self.links.start(self.told.set, 100)

    def wait(self, until: Callable[[], object]) -> None:
        """Wait until something is so that the thread tells of."""
        while not until():
            assert self.told.wait(WAIT_MS / 1000), "nothing is told"
            self.told.clear()

    def event(self) -> PeerEvent:
        """The next event."""

        def has_events() -> bool:
            self._events += self.links.take()
            return bool(self._events)

        self.wait(has_events)
        return self._events.pop(0)


@pytest.fixture
def cores(tmp_path: Path) -> Iterator[list[OtherCore]]:
    """One that a test makes do its worst, and another one."""
    cores = [OtherCore(f"ipc://{tmp_path}/{number}.sock") for number in range(2)]
    yield cores
    for core in cores:
        core.close()


@pytest.fixture
def bench(cores: list[OtherCore]) -> Iterator[Bench]:
    bench = Bench(*(core.address for core in cores))
    for core in cores:
        core.welcome()
    bench.wait(lambda: bench.links.reachable == {0, 1})
    yield bench
    bench.links.close()


def said(event: PeerEvent) -> tuple[int, int, int | None, bytes]:
    return event.number, event.peer, event.first, event.content


def test_questions_and_blocks(cores: list[OtherCore], bench: Bench) -> None:
    core = cores[0]
    bench.links.find(0, 7, 1024, IDENTITY, b"names")
    call = core.call()
    assert (call.method, call.args) == ("find_blocks", [IDENTITY, b"names"])
    core.say(CallAnswer(call.call_id, b"\0\1"))
    assert said(bench.event()) == (7, 0, 1024, b"\0\1")
    tickets = [b"1" * TICKET_BYTES, b"2" * TICKET_BYTES]
    for number, ticket in enumerate(tickets):
        bench.links.fetch(0, number, IDENTITY, b"names")
        call = core.call()
        assert (call.method, call.args) == ("fetch_blocks", [IDENTITY, b"names", (b"", *tickets)[number]])
        core.say(CallAnswer(call.call_id, ticket + b"x" * PART_BYTES))
        event = bench.event()
        assert said(event) == (number, 0, None, b"x" * PART_BYTES) and event.seconds > 0


def garbage(core: OtherCore, call: Call) -> None:
    core.raw([b"\xc1 no message"])


def too_much(core: OtherCore, call: Call) -> None:
    core.say(CallAnswer(call.call_id, bytes(PART_BYTES + SPARE_BYTES)))


def many_frames(core: OtherCore, call: Call) -> None:
    core.raw([*core.codec.encode(CallAnswer(call.call_id, b"x")), *[b""] * 5000])


def another_type(core: OtherCore, call: Call) -> None:
    core.say(CallAnswer(call.call_id, [b"x"] * 1000))


def another_message(core: OtherCore, call: Call) -> None:
    core.say(Deltas(keys=[1], token_ids=[1]))


def another_greeting(core: OtherCore, call: Call) -> None:
    core.say(Welcome(INFO, "test", 1.0))


def answer_to_nothing(core: OtherCore, call: Call) -> None:
    core.say(CallAnswer(call.call_id + 1000, b"x"))


def signs_of_life(core: OtherCore, call: Call) -> None:
    try:
        for _ in range(2 * MAX_UNASKED):
            core.say(Pong())
    except zmq.ZMQError as error:  # it has left before the last of them
        assert error.errno == zmq.EHOSTUNREACH


def no_right(core: OtherCore, call: Call) -> None:
    core.say(CallAnswer(call.call_id, error="no right", error_type="PermissionError"))


def detached(core: OtherCore, call: Call) -> None:
    core.say(Detached("too slow"))


def refused(core: OtherCore, call: Call) -> None:
    core.say(Refused("bad"))


def ended(core: OtherCore, call: Call) -> None:
    core.close()


def silent(core: OtherCore, call: Call) -> None:
    """As a core that hangs."""


WORST = [
    garbage,
    too_much,
    many_frames,
    another_type,
    another_message,
    another_greeting,
    answer_to_nothing,
    signs_of_life,
    no_right,
    detached,
    refused,
    ended,
    silent,
]


@pytest.mark.parametrize("worst", WORST)
def test_a_core_that_does_its_worst_is_left_alone(
    worst: Callable[[OtherCore, Call], None],
    cores: list[OtherCore],
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bad, good = cores
    bench.links.fetch(0, 7, IDENTITY, b"names")
    bench.links.find(0, 8, 0, IDENTITY, b"names")
    call = bad.call()
    if worst is silent:
        monkeypatch.setattr(peer_link, "CALL_SECONDS", 0.1)
    worst(bad, call)
    ends = {said(bench.event()), said(bench.event())}
    monkeypatch.undo()
    assert ends == {(7, 0, None, b""), (8, 0, 0, b"")}
    bench.wait(lambda: bench.links.reachable == {1})
    bench.links.fetch(0, 9, IDENTITY, b"names")  # nothing is sent to it for a while
    assert said(bench.event()) == (9, 0, None, b"")
    bench.links.find(1, 10, 0, IDENTITY, b"names")
    good.say(CallAnswer(good.call().call_id, b"\1"))
    assert said(bench.event()) == (10, 1, 0, b"\1")


def test_a_core_that_is_busy_gives_nothing_now(cores: list[OtherCore], bench: Bench) -> None:
    bench.links.fetch(0, 7, IDENTITY, b"names")
    cores[0].say(CallAnswer(cores[0].call().call_id, error="busy", error_type="EngineBusyError"))
    assert said(bench.event()) == (7, 0, None, b"")
    bench.links.find(0, 8, 0, IDENTITY, b"names")
    cores[0].say(CallAnswer(cores[0].call().call_id, b"\1"))
    assert said(bench.event()) == (8, 0, 0, b"\1")


def test_a_core_may_come_later_and_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_link, "FAILED_SECONDS", 0.01)
    address = f"ipc://{tmp_path}/late.sock"
    bench = Bench(address)
    bench.links.find(0, 1, 0, IDENTITY, b"names")
    assert said(bench.event()) == (1, 0, 0, b"")
    for _ in range(2):
        core = OtherCore(address)
        core.welcome()
        bench.wait(lambda: bench.links.reachable)
        core.close()
        bench.wait(lambda: not bench.links.reachable)
    bench.links.close()
    bench.links.close()


def certified(folder: Path, name: str) -> CurveKeys:
    """A certificate, whose public half is admitted."""
    (folder / "clients").mkdir(parents=True, exist_ok=True)
    public, secret = zmq.auth.create_certificates(folder, name)
    shutil.copy(public, folder / "clients")
    return CurveKeys.load(Path(secret))


def test_over_tcp_both_sides_prove_the_same_key(tmp_path: Path) -> None:
    keys, mallory = certified(tmp_path, "core"), certified(tmp_path / "else", "mallory")
    access = Access(certificates=tmp_path / "clients")
    core = OtherCore("tcp://127.0.0.1:0", keys, access)
    bench = Bench(core.address, curve=keys)
    core.welcome()
    bench.wait(lambda: bench.links.reachable)
    bench.links.close()
    stranger = Bench(core.address, curve=mallory)
    deadline = time.monotonic() + WAIT_MS / 1000
    while not (stranger.links._links and stranger.links._links[0]._why):
        assert time.monotonic() < deadline, "it is neither admitted nor refused"
        time.sleep(0.005)
    assert not stranger.links.reachable
    stranger.links.close()
    while core.socket.poll(0):
        assert not isinstance(core.codec.decode(core.socket.recv_multipart()[1:]), Hello), "it was let in"
    core.close()


def test_beyond_loopback_it_takes_keys() -> None:
    with pytest.raises(ValueError, match=r"kv_peers: .*is open to other machines: give CURVE keys"):
        PeerLinks(["tcp://127.0.0.1:5555", "tcp://192.0.2.1:5555"])
