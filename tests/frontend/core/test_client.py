"""The connection: what goes over, and every way in which a core can be lost."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from pagewire.frontend.core.client import CoreClient
from pagewire.frontend.core.outbox import SUBMIT_BATCH, too_large
from pagewire.ipc.errors import (
    DetachedError,
    EngineDeadError,
    EngineStoppedError,
    ModelNotFoundError,
    ProtocolError,
)
from pagewire.ipc.host.gate import Gate, Peer
from pagewire.ipc.host.lifeline import Child
from pagewire.ipc.wire.codec import MAX_FRAMES, Codec
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.messages import (
    Abort,
    Call,
    CallAnswer,
    CoreDying,
    Deltas,
    Detached,
    EngineInfo,
    Goodbye,
    Hello,
    Refused,
    Request,
    Submit,
    TokenDelta,
)
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.sockets import CurveKeys, bind_router
from pagewire.ipc.wire.window import WINDOW_REQUESTS

PATIENCE = 20.0


class Watched:
    """A client, and what it called back."""

    def __init__(self, address: str, **options: Any) -> None:
        self.deltas: queue.Queue[Deltas] = queue.Queue()
        self.deaths: queue.Queue[EngineDeadError] = queue.Queue()
        self.refusals: queue.Queue[tuple[list[int], Exception]] = queue.Queue()
        self.client = CoreClient.connect(
            address,
            on_deltas=self.deltas.put,
            on_dead=self.deaths.put,
            on_refused=lambda keys, error: self.refusals.put((keys, error)),
            **options,
        )


@pytest.fixture
def attach() -> Iterator[Callable[..., Watched]]:
    clients: list[CoreClient] = []

    def new(address: str, **options: Any) -> Watched:
        watched = Watched(address, **options)
        clients.append(watched.client)
        return watched

    yield new
    for client in clients:
        client.close()


def request(key: int) -> Request:
    return Request(key, f"r{key}", Prompt([2, 3]), SamplingParams(), seed=0)


def test_submit_deltas_abort_goodbye(core: Any, attach: Callable[..., Watched]) -> None:
    watched = attach(core.address)
    assert watched.client.info == core.info
    watched.client.submit([request(1), request(2)])
    assert [r.key for r in core.expect(Submit).requests] == [1, 2]
    core.tokens(1, [7], finish_reason="stop")
    assert list(watched.deltas.get(timeout=PATIENCE)) == [TokenDelta(1, 0, [7], finish_reason="stop")]
    watched.client.abort([2], [(1, 0)])
    assert core.expect(Abort) == Abort([2], [(1, 0)])
    watched.client.close()
    core.expect(Goodbye)
    assert watched.deaths.empty()


def test_messages_of_many_threads_all_arrive_in_each_ones_order(
    core: Any, attach: Callable[..., Watched]
) -> None:
    client = attach(core.address).client
    threads = [
        threading.Thread(target=lambda start=start: [client.submit([request(start + i)]) for i in range(200)])
        for start in (0, 1000, 2000)
    ]
    for thread in threads:
        thread.start()
    keys = [core.expect(Submit).requests[0].key for _ in range(600)]
    for start in (0, 1000, 2000):
        assert [key for key in keys if start <= key < start + 200] == list(range(start, start + 200))


def test_a_tenants_requests_wait_here_while_the_core_has_enough_of_them(
    core: Any, attach: Callable[..., Watched]
) -> None:
    """Those of another do not; what is called behind them does."""
    core.fences, core.calls["echo"] = False, lambda text: text
    client = attach(core.address).client
    count = WINDOW_REQUESTS + SUBMIT_BATCH
    client.submit([msgspec.structs.replace(request(key), tenant="many") for key in range(count)])
    echo = client.call("echo", "behind")
    client.submit([msgspec.structs.replace(request(count), tenant="one")])
    keys: list[int] = []
    fences: list[int] = []
    while len(keys) <= WINDOW_REQUESTS:
        message = core.seen.get(timeout=PATIENCE)
        keys += [one.key for one in getattr(message, "requests", [])]
        fences += [message.call_id] if isinstance(message, Call) else []
    assert sorted(keys) == [*range(WINDOW_REQUESTS), count]
    while not fences:
        fences.append(core.expect(Call).call_id)
    assert not echo.done()
    client.submit([msgspec.structs.replace(request(-1), tenant="many")])
    client.abort([-1])  # it is given up before it is sent
    core.send(CallAnswer(fences[0]))
    assert [one.key for one in core.expect(Submit).requests] == list(range(WINDOW_REQUESTS, count))
    assert echo.result(PATIENCE) == "behind"
    while not isinstance(message := core.seen.get(timeout=PATIENCE), Abort):
        assert not isinstance(message, Submit)
    assert message.keys == [-1]


def test_call_gives_results_and_named_errors(core: Any, attach: Callable[..., Watched]) -> None:
    core.calls = {"add": lambda a, b=1: a + b, "fail": lambda: [][1], "refuse": lambda: int("x")}
    client = attach(core.address).client
    assert client.call("add", 1, b=2).result(PATIENCE) == 3
    with pytest.raises(ValueError, match="invalid literal"):
        client.call("refuse").result(PATIENCE)
    with pytest.raises(RuntimeError, match="out of range"):
        client.call("fail").result(PATIENCE)


def test_what_the_wire_cannot_hold_fails_at_the_caller(core: Any, attach: Callable[..., Watched]) -> None:
    client = attach(core.address).client
    core.calls = {"echo": lambda value: value}
    with pytest.raises(OverflowError):
        client.call("echo", 2**70)
    with pytest.raises(TypeError):
        client.call("echo", object())
    assert client.call("echo", 5).result(PATIENCE) == 5


def test_a_vanished_core_is_noticed(core: Any, attach: Callable[..., Watched]) -> None:
    watched = attach(core.address)
    core.calls = {"hang": lambda: core._stop.wait()}
    future = watched.client.call("hang")
    core.close()
    assert "closed the connection" in str(watched.deaths.get(timeout=PATIENCE))
    with pytest.raises(EngineDeadError, match="closed the connection"):
        watched.client.submit([request(1)])
    with pytest.raises((EngineDeadError, RuntimeError)):
        future.result(PATIENCE)
    watched.client.abort([1])


def test_a_new_core_at_the_same_address_is_not_ours(
    core: Any, new_core: Callable[..., Any], attach: Callable[..., Watched]
) -> None:
    watched = attach(core.address)
    core.close()
    other = new_core()
    watched.deaths.get(timeout=PATIENCE)
    with pytest.raises(EngineDeadError):
        watched.client.submit([request(1)])
    assert attach(other.address).client.dead is None


def test_last_words_are_the_cause(core: Any, attach: Callable[..., Watched]) -> None:
    watched = attach(core.address)
    core.send(CoreDying("the GPU fell off the bus"))
    assert str(watched.deaths.get(timeout=PATIENCE)) == "the GPU fell off the bus"


def test_a_silent_core_is_dead(
    core: Any, attach: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEWIRE_HEARTBEAT_TIMEOUT_S", "0.2")
    core.pongs = False
    watched = attach(core.address)
    assert "has not answered for 0.2 s" in str(watched.deaths.get(timeout=PATIENCE))


def test_a_refused_message_ends_what_was_in_it_and_no_more(core: Any, attach: Callable[..., Watched]) -> None:
    watched = attach(core.address)
    core._called = lambda call: Refused("no such argument", "ValueError", call_id=call.call_id)
    with pytest.raises(ValueError, match="no such argument"):
        watched.client.call("add", 1, 2).result(PATIENCE)
    core.send(Refused("n must be at most 64", "ValueError", keys=[1, 2]))
    keys, error = watched.refusals.get(timeout=PATIENCE)
    assert (keys, type(error), str(error)) == ([1, 2], ValueError, "n must be at most 64")
    core.send(Refused("not a message of this protocol"))  # names nothing
    core.tokens(3, [7])
    assert list(watched.deltas.get(timeout=PATIENCE)) == [TokenDelta(3, 0, [7])]
    assert watched.client.dead is None and watched.deaths.empty() and watched.refusals.empty()


def test_a_core_that_stops_and_one_that_detaches_are_told_apart(
    core: Any, new_core: Callable[..., Any], attach: Callable[..., Watched]
) -> None:
    watched = attach(core.address)
    core.send(CoreDying("it has shut down", stopped=True))
    assert type(watched.deaths.get(timeout=PATIENCE)) is EngineStoppedError
    other = new_core("other")
    watched = attach(other.address)
    other.send(Detached("it was silent"))
    error = watched.deaths.get(timeout=PATIENCE)
    assert type(error) is DetachedError and "it was silent" in str(error)


class SlowCallback:
    """A client whose callback waits for `go`."""

    def __init__(self, core: Any) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        self.deaths: queue.Queue[EngineDeadError] = queue.Queue()
        self.client = CoreClient.connect(core.address, on_deltas=self.wait, on_dead=self.deaths.put)
        core.tokens(1, [7])
        assert self.entered.wait(PATIENCE)

    def wait(self, deltas: Deltas) -> None:
        self.entered.set()
        assert self.go.wait(PATIENCE)


def test_a_slow_callback_does_not_silence_the_frontend(core: Any) -> None:
    slow = SlowCallback(core)
    while not core.pings.empty():
        core.pings.get()
    for _ in range(3):  # while the callback waits
        core.pings.get(timeout=PATIENCE)
    slow.go.set()
    slow.client.close()
    assert slow.deaths.empty()


def test_the_frontends_own_slowness_is_not_the_cores_silence(
    core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No message comes for longer than the limit, while the callback waits."""
    monkeypatch.setenv("PAGEWIRE_HEARTBEAT_TIMEOUT_S", "1")
    core.calls = {"add": lambda a, b: a + b}
    slow = SlowCallback(core)
    core.pongs = False
    while not core.pings.empty():
        core.pings.get()
    for _ in range(25):  # at an interval of 0.05 s
        core.pings.get(timeout=PATIENCE)
    core.pongs = True
    slow.go.set()
    assert slow.client.call("add", 1, 2).result(PATIENCE) == 3
    slow.client.close()
    assert slow.deaths.empty()


def sized_request(key: int, size: int) -> Request:
    return Request(key, f"r{key}", Prompt([2] * size), SamplingParams(), seed=0)


def test_messages_stay_below_the_limit_of_the_cores_socket(
    core: Any, attach: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request is too large for any message: it is refused alone, and nothing of it is sent."""
    monkeypatch.setattr(EngineInfo, "max_message_bytes", 10_000)
    client = attach(core.address).client
    requests = [sized_request(key, 20_000 if key == 5 else 3_000) for key in range(12)]
    [(refused, error)] = client.submit(requests)
    assert refused.key == 5
    assert "request 'r5'" in str(error) and "10000" in str(error) and "20" in str(error)
    with pytest.raises(ValueError, match="at most 10000"):
        client.call("echo", "x" * 20_000)
    client.submit([request(99)])
    keys: list[int] = []
    while 99 not in keys:
        submit = core.expect(Submit)
        assert len(Codec[Any](Submit).encode(submit)[0]) <= 10_000
        keys += [one.key for one in submit.requests]
    assert keys == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 99]


def test_several_requests_have_less_room_than_one(
    core: Any, attach: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewire.frontend.core.outbox.MAX_BATCH_BYTES", 5_000)
    client = attach(core.address).client
    assert client.submit([sized_request(key, 20_000 if key == 5 else 2_000) for key in range(9)]) == []
    submits = [core.expect(Submit)]
    while submits[-1].requests[-1].key != 8:
        submits.append(core.expect(Submit))
    sizes = [len(Codec[Any](Submit).encode(submit)[0]) for submit in submits]
    assert all(
        size <= 5_000 or len(submit.requests) == 1 for size, submit in zip(sizes, submits, strict=True)
    )
    assert max(sizes) > 20_000 and any(len(submit.requests) == 2 for submit in submits)
    assert [one.key for submit in submits for one in submit.requests] == list(range(9))


def test_an_error_in_a_callback_is_not_swallowed(core: Any) -> None:
    deaths: queue.Queue[EngineDeadError] = queue.Queue()

    def broken(deltas: Deltas) -> None:
        raise KeyError("oops")

    client = CoreClient.connect(core.address, on_deltas=broken, on_dead=deaths.put)
    core.tokens(1, [7])
    assert "KeyError: 'oops'" in str(deaths.get(timeout=PATIENCE))
    client.close()


def test_another_protocol_is_a_clear_error(core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewire.frontend.core.link.PROTOCOL", 99)
    with pytest.raises(ProtocolError, match="protocol 99"):
        Watched(core.address)


def test_a_core_that_hangs_is_not_waited_for(core: Any) -> None:
    """It has accepted the connection, and answers nothing at all; one that loads its model answers pings."""
    core.welcomes = core.pongs = False
    with pytest.raises(EngineDeadError, match="answers nothing for"):
        Watched(core.address, timeout=0.1, patience=0.2)


def test_a_wait_for_a_core_can_be_cancelled(core: Any) -> None:
    core.welcomes = False
    cancelled, errors = threading.Event(), []

    def connect() -> None:
        with pytest.raises(EngineDeadError) as error:
            Watched(core.address, timeout=None, cancelled=cancelled)
        errors.append(str(error.value))

    thread = threading.Thread(target=connect)
    thread.start()
    core.expect(Hello)
    cancelled.set()
    thread.join(PATIENCE)
    assert errors == ["the engine was shut down"]


@pytest.mark.parametrize("address", ["ipc:///nowhere/at/all.sock", "tcp://127.0.0.1:1"])
def test_nobody_there(address: str) -> None:
    with pytest.raises(EngineDeadError, match="no engine core answers"):
        Watched(address, timeout=0.2)


def test_a_loading_core_may_take_longer_than_the_timeout(core: Any, attach: Callable[..., Watched]) -> None:
    core.welcomes = False
    found: list[Watched] = []
    thread = threading.Thread(target=lambda: found.append(attach(core.address, timeout=0.1)))
    thread.start()
    core.seen.get(timeout=PATIENCE)
    thread.join(0.3)
    assert thread.is_alive()
    from pagewire.ipc.wire.messages import Welcome

    core.send(Welcome(core.info, "0", ping_seconds=1.0))
    thread.join(PATIENCE)
    assert found


@pytest.mark.parametrize(
    ("refused", "kind", "text"),
    [
        (Refused("no model folder /x", "ModelNotFoundError"), ModelNotFoundError, "no model folder /x"),
        (
            Refused("no model folder /protocol/x", "ModelNotFoundError"),
            ModelNotFoundError,
            "no model folder /protocol/x",
        ),
        (Refused("dtype must be float32", "ValueError"), ValueError, "dtype must be float32"),
        (Refused("TypeError: it is text", "ValueError"), ValueError, "TypeError: it is text"),
        (Refused("cannot read x", "FileNotFoundError"), FileNotFoundError, "cannot read x"),
        (Refused("it would not do"), ProtocolError, "it would not do"),
        (
            Refused("the GPU is on fire", "EngineDeadError"),
            EngineDeadError,
            "the engine core did not start: the GPU is on fire",
        ),
        (Refused("'x'", "KeyError"), EngineDeadError, "the engine core did not start: KeyError: \"'x'\""),
    ],
)
def test_a_refused_attachment_keeps_type_and_text(
    core: Any, refused: Refused, kind: type[Exception], text: str
) -> None:
    core.welcomes = False
    errors: list[Exception] = []

    def connect() -> None:
        try:
            Watched(core.address)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    core.seen.get(timeout=PATIENCE)
    core.send(refused)
    thread.join(PATIENCE)
    assert (type(errors[0]), str(errors[0])) == (kind, text)


def test_a_child_that_exits_ends_the_wait(tmp_path: Path) -> None:
    child = Child([sys.executable, "-c", "raise SystemExit(3)"], stderr=subprocess.DEVNULL)
    with pytest.raises(EngineDeadError, match="exited with status 3"):
        Watched(f"ipc://{tmp_path}/none.sock", child=child, timeout=None)


def test_curve(core: Any, new_core: Callable[..., Any], attach: Callable[..., Watched]) -> None:
    server, ours, other = (CurveKeys(*zmq.curve_keypair()) for _ in range(3))
    locked = new_core("locked", curve=server)
    keys = CurveKeys(ours.public, ours.secret, server.public)
    assert attach(locked.address, curve=keys).client.info == locked.info
    with pytest.raises(EngineDeadError):
        Watched(locked.address, curve=CurveKeys(ours.public, ours.secret, other.public), timeout=0.5)
    with pytest.raises(EngineDeadError):
        Watched(locked.address, timeout=0.5)


def test_a_core_of_another_user_gets_nothing(core: Any, attach: Callable[..., Watched]) -> None:
    """A core that claims to be ours; the user id comes from the kernel."""
    with pytest.raises(PermissionError, match=f"runs as user {os.geteuid()}, not as user {os.geteuid() + 1}"):
        Watched(core.address, peer_uid=os.geteuid() + 1)
    assert core.seen.empty()
    assert attach(core.address, peer_uid=os.geteuid()).client.info == core.info


def test_a_core_that_does_not_admit_us(tmp_path: Path) -> None:
    def refuse(peer: Peer) -> str:
        raise PermissionError("a stranger")

    with zmq.Context() as context:
        gate = Gate(context, refuse)
        gate.start()
        with (
            bind_router(context, f"ipc://{tmp_path}/core.sock", guarded=True),
            pytest.raises(PermissionError, match="does not admit this user or CURVE key: see its log"),
        ):
            Watched(f"ipc://{tmp_path}/core.sock")
        gate.stop()


def test_without_keys_nothing_goes_beyond_this_machine() -> None:
    with pytest.raises(ValueError, match="is open to other machines: give CURVE keys, or use loopback"):
        Watched("tcp://192.0.2.1:5555")


def test_messages_of_too_many_bytes_or_parts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings are parts of their own; the first part has the limit of this engine."""
    monkeypatch.setattr("pagewire.frontend.core.outbox.MAX_MESSAGE_BYTES", 100)
    assert too_large([b"x" * 10, b"y" * 90], "it", 10) is None
    for frames in ([b"x" * 10, b"y" * 91], [b"x", *[b""] * MAX_FRAMES]):
        error = too_large(frames, "it", 10)
        assert error is not None and "send fewer embeddings" in str(error)
    assert "shorten the prompt" in str(too_large([b"x" * 11], "it", 10))
