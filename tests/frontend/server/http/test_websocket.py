"""WebSockets on real sockets: the handshake, frames that hold and that do not, and clients that leave."""

from __future__ import annotations

import json
import os
import random
import select
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from wsproto import ConnectionType, WSConnection
from wsproto.connection import ConnectionState
from wsproto.events import CloseConnection, Ping, Pong, TextMessage

from pagewire.frontend.server.http import websocket
from pagewire.frontend.server.http.body import LARGE_BODIES
from pagewire.frontend.server.http.limits import MAX_SMALL_PARTS, MAX_UNREAD_BYTES, SOCKET_READ_AHEAD_BYTES
from pagewire.ipc.wire.messages import Abort, Submit
from tests.frontend.conftest import FakeCore
from tests.frontend.server.http.test_protocol import (
    PATIENCE,
    certificate,
    connect,
    exchange,
    listening,
    read_all,
)

__all__ = ["certificate", "listening"]  # fixtures

PATH = "/v1/responses"
KEY = "dGhlIHNhbXBsZSBub25jZQ=="  # the one of RFC 6455, whose answer stands there
OPENING = {
    "host": "localhost",
    "connection": "keep-alive, Upgrade",
    "upgrade": "websocket",
    "sec-websocket-version": "13",
    "sec-websocket-key": KEY,
}
TEXT, BINARY, CLOSE, PING = 1, 2, 8, 9


def opening(path: str = PATH, method: str = "GET", **headers: str | None) -> bytes:
    """The head of a request that opens a WebSocket. headers: further ones, or None for those to leave out."""
    given = OPENING | {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{name}: {value}\r\n" for name, value in given.items() if value is not None]
    return f"{method} {path} HTTP/1.1\r\n{''.join(lines)}\r\n".encode()


def frame(
    opcode: int, payload: bytes, *, last: bool = True, length: int | None = None, mask: bool = True
) -> bytes:
    """One frame of a client. length: the one that it claims, of 8 bytes."""
    claimed = len(payload) if length is None else length
    head = bytes([opcode | (0x80 if last else 0)])
    flag = 0x80 if mask else 0
    head += bytes([flag | claimed]) if claimed < 126 else bytes([flag | 127]) + claimed.to_bytes(8, "big")
    if not mask:
        return head + payload
    key = os.urandom(4)
    return head + key + bytes(byte ^ key[index % 4] for index, byte in enumerate(payload))


class Peer:
    """A client, and what it has received: whole messages of JSON, and the code with which the server closed."""

    def __init__(self, client: socket.socket, **headers: str | None) -> None:
        self.client = client
        client.sendall(opening(**headers))
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += client.recv(1)
        self.head = head.decode().lower()
        assert self.head.startswith("http/1.1 101 "), self.head
        self._frames = WSConnection(ConnectionType.CLIENT)
        self._frames.connection = websocket.Connection(ConnectionType.CLIENT)
        self.pongs = self.pings = 0

    def send(self, message: Any) -> None:
        """Send one message of JSON."""
        self.client.sendall(self._frames.send(TextMessage(json.dumps(message))))

    def close(self) -> None:
        """Close as the protocol wants it."""
        self.client.sendall(self._frames.send(CloseConnection(1000)))
        assert self.read_to_the_end() == 1000

    def events(self) -> list[Any]:
        """The messages up to one that ends a response, or an error."""
        found: list[Any] = []
        while not (found and (found[-1]["type"] in ("error", "response.completed", "response.incomplete"))):
            found.append(self.message())
        return found

    def message(self) -> Any:
        """The next message."""
        text = ""
        while True:
            for event in self._frames.events():
                assert not isinstance(event, CloseConnection), event
                if isinstance(event, TextMessage):
                    text += event.data
                    if event.message_finished:
                        return json.loads(text)
                self.pongs += isinstance(event, Pong)
                self.pings += isinstance(event, Ping)
            data = self.client.recv(1 << 16)
            assert data, "the server has closed"
            self._frames.receive_data(data)

    def read_to_the_end(self) -> int:
        """The code with which the server closes; what comes before is dropped. 0: it was cut."""
        code = 0
        while True:
            try:
                for event in self._frames.events():
                    if isinstance(event, CloseConnection) and not code:
                        code = event.code
                        if self._frames.state is ConnectionState.REMOTE_CLOSING:
                            self.client.sendall(self._frames.send(event.response()))
                data = self.client.recv(1 << 16)
            except OSError:  # it was cut, or nothing can be sent any more
                return code
            if not data:
                return code
            if not code:
                self._frames.receive_data(data)


def create(**fields: Any) -> dict[str, Any]:
    return {"type": "response.create", "input": "w5"} | fields


# ---------------------------------------------------------------- the handshake


def test_the_answer_is_that_of_the_standard(listening: Callable[..., Any], core: FakeCore) -> None:
    """And it counts among the requests once it has ended."""
    core.calls["metrics"] = list
    with listening() as port, connect(port) as client:
        peer = Peer(client, x_request_id="mine")
        assert "sec-websocket-accept: s3pplmbitxaq9kygzzhzrbk+xoo=\r\n" in peer.head
        assert "x-request-id: mine\r\n" in peer.head and "extensions" not in peer.head
        peer.close()
        head = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        counted = b'http_requests_total{handler="/v1/responses",method="GET",status="1xx"} 1.0'
        assert counted in exchange(port, head)[1]


FAULTS: list[tuple[bytes, int]] = [
    (opening(sec_websocket_version="8"), 400),
    (opening(sec_websocket_version=None), 400),
    (opening(sec_websocket_key=None), 400),
    (opening(sec_websocket_key="short"), 400),
    (opening(host="evil.example"), 403),
    (opening(origin="http://evil.example"), 403),
    (opening(host=None), 400),
    (opening("/v1/nothing"), 404),
    (opening("/%ff%00"), 404),
    (opening(connection="close"), 405),  # it is no upgrade
    (opening(upgrade="h2c", connection="upgrade, close"), 405),
    (opening(method="DELETE", connection="upgrade, close"), 405),
]


@pytest.mark.parametrize(("head", "status"), FAULTS)
def test_what_is_refused_gets_an_answer_of_http(
    listening: Callable[..., Any], head: bytes, status: int
) -> None:
    with listening() as port:
        given, body = exchange(port, head)
        assert given == status and set(json.loads(body)) == {"error"}


def test_a_key_is_checked_before_the_upgrade_and_with_every_message(
    listening: Callable[..., Any], core: FakeCore, tmp_path: Any
) -> None:
    """A key that is taken out of the file is good for no further message."""
    core.auto, core.reason = True, "stop"
    keys = tmp_path / "keys"
    keys.write_text("a secret-a\nb secret-b\n")
    keys.chmod(0o600)
    with listening(api_key_file=str(keys)) as port:
        for wrong in ({}, {"authorization": "Bearer other"}):
            assert exchange(port, opening(**wrong))[0] == 401
        with connect(port) as client:
            peer = Peer(client, authorization="Bearer secret-a")
            peer.send(create())
            assert peer.events()[-1]["type"] == "response.completed"
            keys.write_text("b secret-b\n")
            keys.chmod(0o600)
            peer.send(create())
            (error,) = peer.events()
            assert (error["status"], error["error"]["code"]) == (401, "invalid_api_key")
            peer.close()


def test_over_tls(listening: Callable[..., Any], core: FakeCore, certificate: dict[str, str]) -> None:
    core.auto, core.reason = True, "stop"
    context = ssl.create_default_context(cafile=certificate["ssl_certfile"])
    with (
        listening(**certificate) as port,
        context.wrap_socket(connect(port), server_hostname="127.0.0.1") as client,
    ):
        peer = Peer(client)
        peer.send(create())
        assert peer.events()[-1]["type"] == "response.completed"
        peer.close()


# ---------------------------------------------------------------- frames


def test_a_message_may_come_in_pieces_with_pings_between(
    listening: Callable[..., Any], core: FakeCore
) -> None:
    core.auto, core.reason = True, "stop"
    text = json.dumps(create(input="w5 w6 w7", metadata={"a": "é😀"}), ensure_ascii=False).encode()
    with listening() as port, connect(port) as client:
        peer = Peer(client)
        for cut in (1, 7, len(text) - 30):
            sent = frame(TEXT, text[:cut], last=False) + frame(PING, b"x") + frame(0, text[cut:])
            for byte in sent:  # and however the network cuts it
                client.sendall(bytes([byte]))
            events = peer.events()
            assert events[-1]["type"] == "response.completed"
            assert events[-1]["response"]["metadata"] == {"a": "é😀"}
        assert peer.pongs == 3
        peer.close()


HOSTILE: dict[str, tuple[bytes, int]] = {  # what is sent, and the code with which the server closes
    "no mask": (frame(TEXT, b"{}", mask=False), 1002),
    "a reserved opcode": (frame(3, b"{}"), 1002),
    "a reserved bit": (frame(TEXT | 0x40, b"{}"), 1002),
    "a long ping": (frame(PING, b"x" * 126), 1002),
    "half a ping": (frame(PING, b"x", last=False), 1002),
    "a continuation of nothing": (frame(0, b"{}"), 1002),
    "a second beginning": (frame(TEXT, b"{", last=False) + frame(TEXT, b"}"), 1002),
    "a length of 2^63": (frame(TEXT, b"", length=1 << 63), 1002),
    "text that is not UTF-8": (frame(TEXT, b"\xff\xfe"), 1007),
    "half a character": (frame(TEXT, "é".encode()[:1]), 1007),
    "binary": (frame(BINARY, b"{}"), 1003),
    "a close with half a code": (frame(CLOSE, b"x"), 1002),
    "a close with a code of nobody": (frame(CLOSE, (999).to_bytes(2, "big")), 1002),
    "small frames": (
        frame(TEXT, b"", last=False) + frame(0, b" ", last=False) * (MAX_SMALL_PARTS + 100),
        1008,
    ),
    "pings": (frame(PING, b"") * (MAX_SMALL_PARTS + 100), 1008),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_frames_close_the_connection(
    listening: Callable[..., Any], name: str, core: FakeCore
) -> None:
    """With the code that the standard has for it; the server goes on."""
    core.auto, core.reason = True, "stop"
    sent, code = HOSTILE[name]
    with listening() as port:
        with connect(port) as client:
            peer = Peer(client)
            try:
                client.sendall(sent)
                client.shutdown(socket.SHUT_WR)
            except OSError:  # it was cut meanwhile
                pass
            assert peer.read_to_the_end() == code
        with connect(port) as client:
            peer = Peer(client)
            peer.send(create())
            assert peer.events()[-1]["type"] == "response.completed"
            peer.close()


def test_frames_before_the_answer_are_not_read(listening: Callable[..., Any]) -> None:
    with listening() as port, connect(port) as client:
        client.sendall(opening() + frame(TEXT, b"{}"))
        answer = b""
        while not answer.endswith(b"\r\n\r\n"):
            answer += client.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 101 ")
        client.shutdown(socket.SHUT_WR)
        assert read_all(client) == b""


# ---------------------------------------------------------------- limits


def test_a_large_message_is_refused_while_it_comes(listening: Callable[..., Any]) -> None:
    """A frame may claim any length: what counts is what has come."""
    with listening(max_request_bytes=200_000) as port, connect(port) as client:
        peer = Peer(client)
        client.sendall(frame(TEXT, b" " * 300_000, length=1 << 40))
        (error,) = peer.events()
        assert (error["status"], error["error"]["code"]) == (413, "request_too_large")
        assert peer.read_to_the_end() == 1008


def test_a_message_that_never_ends_is_cut(listening: Callable[..., Any]) -> None:
    with listening(max_request_bytes=200_000) as port, connect(port) as client:
        Peer(client)
        sent, piece = 0, frame(0, b" " * 65536, last=False)
        try:
            client.sendall(frame(TEXT, b"{", last=False))
            while sent < 64 << 20:
                client.sendall(piece)
                sent += len(piece)
        except OSError:
            pass
        assert sent < 200_000 + MAX_UNREAD_BYTES + (16 << 20)  # the rest waits in the buffers of two sockets


def test_a_slow_message_is_refused(listening: Callable[..., Any]) -> None:
    with listening(body_seconds=0.3) as port, connect(port) as client:
        peer = Peer(client)
        client.sendall(frame(TEXT, b"{", last=False))
        (error,) = peer.events()
        assert error["status"] == 408
        assert peer.read_to_the_end() == 1008


def test_a_silent_one_is_kept_alive_and_closed_at_last(
    listening: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "SOCKET_PING_SECONDS", 0.1)
    monkeypatch.setattr(websocket, "SOCKET_IDLE_SECONDS", 3.0)
    with listening() as port, connect(port) as client:
        peer = Peer(client)
        peer.send({"type": "response.processed", "response_id": "resp_1"})  # has no answer
        with pytest.raises(AssertionError, match="1001"):
            peer.message()
        assert peer.pings >= 1


def test_a_silent_one_makes_place(listening: Callable[..., Any]) -> None:
    """As connections without a request do."""
    with listening(max_connections=2, max_connections_per_address=2) as port:
        silent = [connect(port) for _ in range(2)]
        peers = [Peer(client) for client in silent]
        assert (
            exchange(port, b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")[0] == 200
        )
        assert peers[0].read_to_the_end() in (0, 1013)
        peers[1].close()
        silent[0].close()


def test_a_busy_one_keeps_its_place(listening: Callable[..., Any], core: FakeCore) -> None:
    with listening(max_connections=1, max_connections_per_address=1) as port, connect(port) as client:
        peer = Peer(client)
        peer.send(create())
        key = core.expect(Submit).requests[0].key
        with connect(port) as other:
            assert read_all(other).startswith(b"HTTP/1.1 503 ")
        core.tokens(key, [7], finish_reason="stop")
        assert peer.events()[-1]["type"] == "response.completed"
        peer.close()


# ---------------------------------------------------------------- clients that leave, and the server's end


@pytest.mark.parametrize("way", ["close", "end", "reset"])
def test_a_client_that_leaves_aborts_its_request(
    listening: Callable[..., Any], core: FakeCore, way: str
) -> None:
    with listening() as port, connect(port) as client:
        peer = Peer(client)
        peer.send(create())
        key = core.expect(Submit).requests[0].key
        core.tokens(key, [7])
        assert [peer.message()["type"] for _ in range(2)] == ["response.created", "response.in_progress"]
        if way == "close":
            client.sendall(frame(CLOSE, b""))
        elif way == "end":
            client.shutdown(socket.SHUT_WR)
        else:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            client.close()
        assert key in core.expect(Abort).keys


def test_messages_wait_for_the_one_before(listening: Callable[..., Any], core: FakeCore) -> None:
    with listening() as port, connect(port) as client:
        peer = Peer(client)
        for _ in range(3):
            peer.send(create())
        for number in range(3):
            key = core.expect(Submit).requests[0].key
            assert core.seen.empty()
            core.tokens(key, [7 + number], finish_reason="stop")
            assert peer.events()[-1]["response"]["status"] == "completed"
        peer.close()


def test_what_comes_too_early_is_not_read(listening: Callable[..., Any], core: FakeCore) -> None:
    """So it waits in the buffers of two sockets, and takes no memory of the server."""
    with listening() as port, connect(port) as client:
        peer = Peer(client)
        peer.send(create())
        key = core.expect(Submit).requests[0].key
        client.settimeout(1.0)
        sent, piece = 0, frame(0, b" " * 65536, last=False)
        client.sendall(frame(TEXT, b"{", last=False))
        with pytest.raises(TimeoutError):
            while sent < 64 << 20:
                client.sendall(piece)
                sent += len(piece)
        assert SOCKET_READ_AHEAD_BYTES <= sent < 32 << 20
        core.tokens(key, [7], finish_reason="stop")
        client.settimeout(PATIENCE)
        assert peer.events()[-1]["type"] == "response.completed"


def test_the_server_finishes_what_it_has_begun(listening: Callable[..., Any], core: FakeCore) -> None:
    """Connections without a request are closed at once."""
    server = listening()
    port = server.__enter__()
    with connect(port) as first, connect(port) as second:
        busy, idle = Peer(first), Peer(second)
        busy.send(create())
        key = core.expect(Submit).requests[0].key
        core.tokens(key, [7])
        busy.message()
        ending = threading.Thread(target=server.__exit__, args=(None, None, None))
        ending.start()
        assert idle.read_to_the_end() == 1001
        busy.send(create())  # it comes too late
        core.tokens(key, [8], finish_reason="stop")
        assert busy.events()[-1]["type"] == "response.completed"
        assert busy.read_to_the_end() in (1001, 0)
    ending.join(PATIENCE)
    assert not ending.is_alive()


def test_messages_that_arrive_have_a_limit_in_all(listening: Callable[..., Any]) -> None:
    """That of bodies: many halves of messages do not fill the memory."""
    with listening(max_request_bytes=300_000) as port, ExitStack() as stack:
        clients = [stack.enter_context(connect(port)) for _ in range(2 * LARGE_BODIES)]
        peers = {client: Peer(client) for client in clients}
        half = frame(TEXT, b" " * 290_000, length=1 << 40)
        for client in clients:
            client.sendall(half)
        (refused, *_), _, _ = select.select(clients, [], [], PATIENCE)
        error = peers[refused].message()
        assert error["status"] == 503 and "are arriving" in error["error"]["message"]


def noise(chance: random.Random) -> bytes:
    """Frames of any kind, some of them damaged, and bytes that are none."""
    parts = []
    for _ in range(chance.randint(1, 6)):
        payload = chance.randbytes(chance.choice([0, 1, 2, 5, 125, 126, 4000]))
        if chance.random() < 0.5:
            payload = json.dumps(create(input=payload.hex())).encode()
        length = chance.choice([None, None, None, 0, len(payload) + 1, 1 << 16, (1 << 63) - 1])
        part = frame(chance.randrange(256) & 0x7F, payload, last=chance.random() < 0.7, length=length)
        part = frame(chance.choice([0, TEXT, TEXT, PING]), payload) if chance.random() < 0.4 else part
        cut = chance.randrange(len(part) + 1) if chance.random() < 0.1 else len(part)
        parts.append(part[:cut])
    return b"".join(parts)


def test_noise_is_survived(
    listening: Callable[..., Any], core: FakeCore, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever comes, nothing fails but the connection that it came by."""
    core.auto, core.reason = True, "stop"
    with listening() as port:
        for seed in range(60):
            chance = random.Random(seed)
            with connect(port) as client:
                peer = Peer(client)
                try:
                    client.sendall(noise(chance))
                    client.shutdown(socket.SHUT_WR)
                except OSError:
                    pass
                peer.read_to_the_end()
        with connect(port) as client:
            peer = Peer(client)
            peer.send(create())
            assert peer.events()[-1]["type"] == "response.completed"
            peer.close()
    assert [record.message for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []
