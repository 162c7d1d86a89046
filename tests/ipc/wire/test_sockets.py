from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.auth

from pagewire.ipc.host.gate import Gate
from pagewire.ipc.wire.codec import INLINE_BYTES, MAX_MESSAGE_BYTES, Codec, Tensor
from pagewire.ipc.wire.items import LogprobRows
from pagewire.ipc.wire.messages import CallAnswer
from pagewire.ipc.wire.sockets import (
    HIGH_WATER,
    MAX_IPC_PATH,
    CurveKeys,
    bind_router,
    check_address,
    connect_dealer,
    is_loopback,
    new_dealer,
    next_event,
    private_address,
    receive,
    runtime_dir,
    send,
)
from pagewire.ipc.wire.worker_messages import RowResult, StepResult

WAIT_MS = 20_000


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s.sock"


def hear(socket: zmq.Socket[bytes]) -> list[Any]:
    assert socket.poll(WAIT_MS), "nothing came"
    return receive(socket)


# ---------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    "address",
    [
        "ipc:///run/a.sock",
        "ipc:///run/with space.sock",
        "tcp://127.0.0.1:5555",
        "tcp://localhost:5555",
        "tcp://[::1]:5555",
        "tcp://127.9.9.9:1",
    ],
)
def test_addresses_for_all(address: str) -> None:
    assert check_address(address, encrypted=False) == address


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("ipc://relative/path", "needs an absolute path"),
        ("ipc://", "needs an absolute path"),
        ("tcp://127.0.0.1", "needs a port"),
        ("tcp://localhost", "needs a port"),
        ("tcp://127.0.0.1:port", "[Pp]ort"),
        ("tcp://127.0.0.1:99999", "[Pp]ort"),
        ("tcp://", "needs a port"),
        ("tcp://127.0.0.1:1;192.0.2.1:2", "must be tcp://HOST:PORT"),
        ("tcp://me@127.0.0.1:1", "must be tcp://HOST:PORT"),
        ("tcp://127.0.0.1:1/x", "must be tcp://HOST:PORT"),
        ("tcp://127.0.0.1:1#@192.0.2.1:2", "must be tcp://HOST:PORT"),
        ("http://localhost:80", "must begin with ipc:// or tcp://"),
        ("inproc://a", "must begin with"),
        ("/run/a.sock", "must begin with"),
        ("", "must begin with"),
    ],
)
def test_addresses_for_nobody(address: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_address(address)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "*", "192.168.1.1", "[::]", "example.org", "eth0", "127.example.org"]
)
def test_beyond_loopback_only_with_keys(host: str, context: zmq.Context[Any]) -> None:
    address = f"tcp://{host}:5555"
    assert check_address(address, encrypted=True) == address
    with pytest.raises(ValueError, match="open to other machines: give CURVE keys"):
        check_address(address, encrypted=False)
    with pytest.raises(ValueError, match="open to other machines"):
        bind_router(context, address)
    with pytest.raises(ValueError, match="open to other machines"):
        connect_dealer(context, address, b"me")


def test_the_longest_path() -> None:
    path = "/" + "x" * (MAX_IPC_PATH - 1)
    assert check_address(f"ipc://{path}")
    with pytest.raises(ValueError, match="is over 107 bytes; choose a shorter one"):
        check_address(f"ipc://{path}x")
    with pytest.raises(ValueError, match="is over 107 bytes"):
        check_address("ipc:///" + "\u00e4" * 54)  # two bytes each


def test_the_longest_path_can_be_bound(tmp_path: Path, context: zmq.Context[Any]) -> None:
    path = str(tmp_path / "x")
    bind_router(context, "ipc://" + path + "x" * (MAX_IPC_PATH - len(path))).close()


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("", False), ("::", False)],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


# ---------------------------------------------------------------- the directory


def test_the_runtime_directory_is_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_RPC_BASE_PATH", str(tmp_path / "base"))
    path = runtime_dir()
    assert path == tmp_path / "base" / "pagewire" == runtime_dir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert private_address("core") == f"ipc://{path}/core.sock"


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o707, 0o701])
def test_a_runtime_directory_open_to_others_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    monkeypatch.setenv("PAGEWIRE_RPC_BASE_PATH", str(tmp_path))
    (tmp_path / "pagewire").mkdir()
    (tmp_path / "pagewire").chmod(mode)
    with pytest.raises(PermissionError, match="must be a directory owned by you with mode 0700"):
        runtime_dir()


def test_a_runtime_directory_that_is_a_link_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEWIRE_RPC_BASE_PATH", str(tmp_path))
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "pagewire").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="remove it or fix its mode"):
        runtime_dir()


def test_where_the_runtime_directory_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEWIRE_RPC_BASE_PATH", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert runtime_dir() == tmp_path / "pagewire"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert runtime_dir() == tmp_path / f"pagewire-{os.getuid()}"


def test_a_private_address_may_be_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_RPC_BASE_PATH", str(tmp_path / ("x" * 100)))
    with pytest.raises(ValueError, match="is over 107 bytes"):
        private_address("core")


# ---------------------------------------------------------------- messages


def message(num_values: int) -> StepResult:
    tensor = Tensor("int32", (num_values,), bytes(range(256)) * (num_values // 64))
    return StepResult(3, [RowResult([1], LogprobRows(tensor, tensor, tensor))])


@pytest.mark.parametrize("num_values", [64, INLINE_BYTES // 4, 100 * INLINE_BYTES])
def test_tensors_travel_both_ways(address: str, context: zmq.Context[Any], num_values: int) -> None:
    codec: Codec[StepResult] = Codec(StepResult)
    with bind_router(context, address) as router, connect_dealer(context, address, b"me") as dealer:
        send(dealer, codec.encode(message(num_values)))
        identity, *frames = hear(router)
        assert identity == b"me" and codec.decode(frames) == message(num_values)
        send(router, [identity, *codec.encode(message(num_values))])
        frames = hear(dealer)
        assert codec.decode(frames) == message(num_values)
        assert all(memoryview(frame).readonly for frame in frames)


def test_messages_keep_their_order(address: str, context: zmq.Context[Any]) -> None:
    codec: Codec[CallAnswer] = Codec(CallAnswer)
    with bind_router(context, address) as router, connect_dealer(context, address, b"me") as dealer:
        for i in range(100):
            send(dealer, codec.encode(CallAnswer(i, b"x" * 100 * i)))
        replies = [codec.decode(hear(router)[1:]) for _ in range(100)]
    assert replies == [CallAnswer(i, b"x" * 100 * i) for i in range(100)]


def test_nothing_there(address: str, context: zmq.Context[Any]) -> None:
    with bind_router(context, address) as router, pytest.raises(zmq.Again):
        receive(router, zmq.NOBLOCK)


def test_an_unknown_peer_is_reported(address: str, context: zmq.Context[Any]) -> None:
    with bind_router(context, address) as router, pytest.raises(zmq.ZMQError) as caught:
        send(router, [b"nobody", b"x"], zmq.NOBLOCK)
    assert caught.value.errno == zmq.EHOSTUNREACH


def test_a_socket_file_is_for_its_owner(address: str, context: zmq.Context[Any]) -> None:
    with bind_router(context, address):
        assert stat.S_IMODE(Path(address.removeprefix("ipc://")).stat().st_mode) == 0o600


def test_sockets_are_bounded_and_never_linger(address: str, context: zmq.Context[Any]) -> None:
    with bind_router(context, address) as router, connect_dealer(context, address, b"me") as dealer:
        for socket in (router, dealer):
            assert (socket.linger, socket.maxmsgsize) == (0, MAX_MESSAGE_BYTES)
            assert socket.sndhwm == socket.rcvhwm == HIGH_WATER
    with bind_router(context, address, receive_queue=3, send_queue=4) as router:
        assert (router.rcvhwm, router.sndhwm) == (3, 4)


def test_an_address_that_cannot_be_bound(context: zmq.Context[Any]) -> None:
    with pytest.raises(OSError, match="cannot listen on ipc:///proc/s"):
        bind_router(context, "ipc:///proc/s.sock")


def test_a_tcp_port_in_use(context: zmq.Context[Any]) -> None:
    with bind_router(context, "tcp://127.0.0.1:0") as router:
        address = router.last_endpoint.decode()
        with pytest.raises(OSError, match=f"cannot listen on {address}: Address already in use"):
            bind_router(context, address)


# ---------------------------------------------------------------- encryption


@pytest.fixture
def gate(context: zmq.Context[Any]) -> Iterator[Gate]:
    """Admits every key: the key of the core itself is what these tests are about."""
    gate = Gate(context, lambda peer: "frontend")
    gate.start()
    yield gate
    gate.stop()


@pytest.fixture
def certificates(tmp_path: Path) -> dict[str, tuple[Path, Path]]:
    """Public and secret certificate files by name."""
    return {
        name: tuple(map(Path, zmq.auth.create_certificates(tmp_path, name)))  # type: ignore[misc]
        for name in ("core", "frontend", "stranger")
    }


@pytest.mark.usefixtures("gate")
def test_the_right_keys(context: zmq.Context[Any], certificates: dict[str, tuple[Path, Path]]) -> None:
    core = CurveKeys.load(certificates["core"][1])
    frontend = CurveKeys.load(certificates["frontend"][1], certificates["core"][0])
    codec: Codec[StepResult] = Codec(StepResult)
    with bind_router(context, "tcp://127.0.0.1:0", core) as router:
        address = router.last_endpoint.decode()
        with connect_dealer(context, address, b"me", frontend) as dealer:
            send(dealer, codec.encode(message(INLINE_BYTES)))
            identity, *frames = hear(router)
            send(router, [identity, *frames])
            assert codec.decode(hear(dealer)) == message(INLINE_BYTES)


@pytest.mark.usefixtures("gate")
@pytest.mark.parametrize("keys", ["wrong server key", "none"])
def test_other_keys_get_nothing_through(
    context: zmq.Context[Any], certificates: dict[str, tuple[Path, Path]], keys: str
) -> None:
    core = CurveKeys.load(certificates["core"][1])
    wrong = CurveKeys.load(certificates["frontend"][1], certificates["stranger"][0])
    right = CurveKeys.load(certificates["frontend"][1], certificates["core"][0])
    with bind_router(context, "tcp://127.0.0.1:0", core) as router:
        address = router.last_endpoint.decode()
        stranger = new_dealer(context, address, b"stranger", None if keys == "none" else wrong)
        events = stranger.get_monitor_socket()
        stranger.connect(address)
        with suppress(zmq.Again):  # refused already: a socket without a connection has no queue
            send(stranger, [b"let me in"], zmq.NOBLOCK)
        await_refusal(events)
        with connect_dealer(context, address, b"friend", right) as friend:
            send(friend, [b"hello"])
            assert hear(router) == [b"friend", b"hello"]
        assert not router.poll(0)
        stranger.disable_monitor()
        stranger.close()


def await_refusal(events: zmq.Socket[bytes]) -> None:
    """Wait until the other side has hung up on a handshake."""
    refusals = (
        zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    )
    while True:
        assert events.poll(WAIT_MS), "nobody refused"
        event = next_event(events)
        assert event != zmq.EVENT_HANDSHAKE_SUCCEEDED
        if event & refusals:
            return


def test_connecting_needs_the_servers_key(
    context: zmq.Context[Any], certificates: dict[str, tuple[Path, Path]]
) -> None:
    with pytest.raises(ValueError, match="needs the server's public key"):
        connect_dealer(context, "tcp://127.0.0.1:5555", b"me", CurveKeys.load(certificates["core"][1]))


def test_a_public_certificate_is_not_enough(certificates: dict[str, tuple[Path, Path]]) -> None:
    with pytest.raises(ValueError, match=r"holds no secret key: use the \.key_secret file"):
        CurveKeys.load(certificates["core"][0])


def test_a_missing_certificate(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        CurveKeys.load(tmp_path / "none.key_secret")
