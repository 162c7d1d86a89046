"""Hostile bytes on real sockets: heads without end, silent and slow clients, and what follows the body."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from pagewire.frontend.server.http.limits import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    MAX_TARGET_BYTES,
    MAX_UNREAD_BYTES,
)
from pagewire.frontend.server.http.listener import Handshake
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.frontend.server.http.uvicorn_server import bind_socket
from pagewire.ipc.wire.messages import Abort, Submit
from tests.frontend.conftest import FakeCore
from tests.serving import serving

PATIENCE = 20.0
HEAD = b"GET /version HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def listening(core: FakeCore, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Starts a server on a port: `with listening(head_seconds=1.0) as port:`."""

    @contextmanager
    def start(**options: Any) -> Iterator[int]:
        given = ServerOptions(**{"port": 0} | options)
        with serving(core.address, given, request.param) as url:
            yield int(url.rpartition(":")[2]) if given.uds is None else 0

    yield start


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), PATIENCE)


def read_all(client: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    received = b""
    try:
        while data := client.recv(1 << 16):
            received += data
    except ConnectionResetError:  # it was closed with input of ours unread
        pass
    return received


def read_answer(client: socket.socket) -> tuple[int, bytes]:
    """Status and body of the next answer, which has a Content-Length."""
    with client.makefile("rb", 0) as file:
        status, length = int(file.readline().split()[1]), 0
        while (line := file.readline()) != b"\r\n":
            name, _, value = line.lower().partition(b":")
            length = int(value) if name == b"content-length" else length
        body = b""
        while len(body) < length:
            body += file.read(length - len(body)) or b""
    return status, body


def exchange(port: int, *parts: bytes) -> tuple[int, bytes]:
    """Send, and return status and body of the answer, after which the connection must be closed."""
    with connect(port) as client:
        for part in parts:
            client.sendall(part)
        answer = read_all(client)
    assert answer.startswith(b"HTTP/1.1 "), answer
    return int(answer.split()[1]), answer.partition(b"\r\n\r\n")[2]


def flood(port: int, begin: bytes, piece: bytes) -> tuple[int, int]:
    """Send a piece again and again; return the status of the answer, and how many bytes were taken until then."""
    with connect(port) as client:
        client.sendall(begin)
        sent = 0
        try:
            while sent < 64 << 20:
                client.sendall(piece)
                sent += len(piece)
        except OSError:
            pass
        answer = read_all(client)
    return int(answer.split()[1]) if answer else 0, sent


ENDLESS: dict[str, tuple[bytes, bytes, tuple[int, ...]]] = {  # what comes first, what comes then, the status
    "headers": (HEAD, b"".join(b"a%d: b\r\n" % number for number in range(1000)), (431, 0)),
    "value": (HEAD + b"x: ", b"a" * 65536, (431, 0)),
    "name": (HEAD, b"a" * 65536, (431, 0)),
    "target": (b"GET /", b"a" * 65536, (414, 0)),
    "blank lines": (b"", b"\r\n" * 32768, (431, 0)),
    "chunk extension": (
        POST + b"transfer-encoding: chunked\r\n\r\n",
        b"1;" + b"x" * 65536,
        (431, 400, 415, 0),
    ),
    "trailers": (
        POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n",
        b"x: " + b"a" * 65533,
        (431, 400, 0),
    ),
}
HEADS = [
    (b"GET /version?" + b"a" * (MAX_TARGET_BYTES - 9) + HEAD[12:], 200),
    (b"GET /version?" + b"a" * (MAX_TARGET_BYTES - 8) + HEAD[12:], 414),
    (HEAD + b"a: b\r\n" * (MAX_HEADERS - 2), 200),
    (HEAD + b"a: b\r\n" * (MAX_HEADERS - 1), 431),
    (HEAD + b"a: " + b"b" * (MAX_HEAD_BYTES - 1024) + b"\r\n", 200),
    (HEAD + b"a: " + b"b" * MAX_HEAD_BYTES + b"\r\n", 431),
    (b"GET /version\r\n", 505),
    (b"GET /version HTTP/0.9\r\nhost: localhost\r\n", 505),
    (b"GET /version HTTP/2.0\r\nhost: localhost\r\n", 505),
    (b"GET /version HTTP/1.0\r\n", 200),  # older than the header
    (b"GET /version HTTP/1.1\r\n", 400),
    (HEAD + b"Host: evil.example\r\n", 400),
    (HEAD + b"HOST: localhost\r\n", 400),
    (b"GET /version HTTP/1.0\r\nhost: a\r\nhost: a\r\n", 400),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),  # TLS, to a port without it
]


def test_what_never_ends_is_cut(listening: Callable[..., Any]) -> None:
    """After no more than what waits in the buffers of two sockets."""
    with listening() as port:
        for name, (begin, piece, statuses) in ENDLESS.items():
            status, sent = flood(port, begin, piece)
            assert status in statuses and sent < 32 << 20, name
            assert exchange(port, HEAD + b"connection: close\r\n\r\n")[0] == 200, name


def test_chunks_of_one_byte_are_cut(listening: Callable[..., Any], core: FakeCore) -> None:
    """Before and after the answer. Each costs as much work as a large one; a body may have some of them."""
    core.auto = True
    chunked = b"transfer-encoding: chunked\r\n\r\n"
    piece = b"1\r\n \r\n" * (64 << 10)
    with listening() as port, listening(api_key=["k"]) as keyed:
        status, sent = flood(port, POST + chunked, piece)
        assert status in (400, 0) and sent < 16 << 20
        status, sent = flood(keyed, POST + chunked, piece)
        assert status in (401, 400, 0) and sent < 16 << 20
        body = b'{"prompt": "w5"%b}' % (b" " * 2000)
        single = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
        with connect(port) as client:
            client.sendall(POST + chunked + single)
            assert read_answer(client)[0] == 200
            client.sendall(POST + b"connection: close\r\n" + chunked + piece)
            assert b"chunks_too_small" in read_all(client)


def test_small_requests_in_chunks_have_no_end(listening: Callable[..., Any]) -> None:
    """Their share of small parts is not that of the connection."""
    request = (
        HEAD.replace(b"GET", b"PUT")
        + b"transfer-encoding: chunked\r\n\r\n"
        + b"1\r\n \r\n" * 10
        + b"0\r\n\r\n"
    )
    with listening() as port, connect(port) as client:
        for _ in range(1000):
            client.sendall(request)
            assert read_answer(client)[0] == 405
        client.sendall(HEAD + b"connection: close\r\n\r\n")
        assert read_all(client).startswith(b"HTTP/1.1 200 OK")


def test_a_long_body_is_not_read_after_its_answer(listening: Callable[..., Any]) -> None:
    """A short rest is, so that clients that send first and read then get the answer."""
    with listening(api_key=["k"]) as port:
        status, sent = flood(port, POST + b"content-length: %d\r\n\r\n" % (1 << 40), b" " * (1 << 20))
        assert status in (401, 0) and sent < 32 << 20
        with connect(port) as client:
            client.sendall(POST + b"content-length: %d\r\n\r\n" % MAX_UNREAD_BYTES + b" " * MAX_UNREAD_BYTES)
            assert read_answer(client)[0] == 401
            client.sendall(HEAD + b"connection: close\r\nauthorization: Bearer k\r\n\r\n")
            assert read_all(client).startswith(b"HTTP/1.1 200 OK")


def test_heads(listening: Callable[..., Any]) -> None:
    """The largest that are taken, and what is not; in any case with an answer of JSON."""
    with listening() as port:
        for request_bytes, status in HEADS:
            given, body = exchange(port, request_bytes + b"connection: close\r\n\r\n")
            assert given == status, request_bytes[:100]
            assert json.loads(body).keys() == ({"version"} if status == 200 else {"error"})


def test_pipelined_requests_are_answered_in_order_and_bounded(
    listening: Callable[..., Any], core: FakeCore
) -> None:
    with listening() as port:
        with connect(port) as client:
            client.sendall((HEAD + b"\r\n") * MAX_PIPELINED + HEAD + b"connection: close\r\n\r\n")
            assert read_all(client).count(b"HTTP/1.1 200 OK") == MAX_PIPELINED + 1
        with connect(port) as client:  # none is answered while the first one waits for the core
            body = b'{"prompt": "w5"}'
            client.sendall(POST + b"content-length: %d\r\n\r\n%b" % (len(body), body))
            core.expect(Submit)
            client.sendall((HEAD + b"\r\n") * 1000)
            assert read_all(client) == b""
        assert core.expect(Abort).keys  # the first one has been told, too


def test_trailers_are_not_headers(listening: Callable[..., Any], core: FakeCore) -> None:
    """They come after all checks of headers."""
    core.auto = True
    with listening(api_key=["k"]) as port:
        trailer = b"2\r\n{}\r\n0\r\nauthorization: Bearer k\r\nhost: evil.example\r\n\r\n"
        chunked = POST + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
        assert exchange(port, chunked + trailer)[0] == 401


def test_silent_and_slow_clients_are_closed(listening: Callable[..., Any]) -> None:
    unfinished = b"content-length: 100\r\n\r\n{"
    with listening(head_seconds=0.3, body_seconds=0.3) as port:
        sent: dict[str, bytes] = {
            "nothing": b"",
            "half a head": HEAD,
            "half a body": POST + unfinished,
            "half a body that is not read": POST.replace(b"application/json", b"text/x") + unfinished,
            "a second head": HEAD + b"\r\n" + HEAD,
        }
        clients = {}
        for name, content in sent.items():
            clients[name] = connect(port)
            clients[name].sendall(content)
        answers = {name: read_all(client) for name, client in clients.items()}
        for client in clients.values():
            client.close()
    statuses = {
        name: [int(part[:3]) for part in text.split(b"HTTP/1.1 ")[1:]] for name, text in answers.items()
    }
    assert statuses == {
        "nothing": [],
        "half a head": [408],
        "half a body": [408],
        "half a body that is not read": [415],
        "a second head": [200, 408],
    }


def test_a_client_that_drips_has_no_more_time(listening: Callable[..., Any]) -> None:
    with listening(head_seconds=0.3) as port, connect(port) as client:
        client.sendall(HEAD + b"x: ")
        client.settimeout(0.05)
        answer = b""
        while not answer:
            try:
                client.sendall(b"a")
                answer = client.recv(1000)
            except TimeoutError:
                continue
        assert answer.startswith(b"HTTP/1.1 408 ")


def test_silent_connections_keep_nobody_out(listening: Callable[..., Any], core: FakeCore) -> None:
    with listening(max_connections=8, max_connections_per_address=8) as port:
        silent = [connect(port) for _ in range(40)]
        assert exchange(port, HEAD + b"connection: close\r\n\r\n")[0] == 200
        for client in silent:
            client.close()


def test_requests_on_their_way_get_an_answer_when_their_place_is_taken(listening: Callable[..., Any]) -> None:
    """Not a reset. A connection that has been answered, and waits for the next request, is only closed."""
    with listening(max_connections=2, max_connections_per_address=2) as port:
        halves = [connect(port) for _ in range(2)]
        for client in halves:
            client.sendall(HEAD)
            assert exchange(port, HEAD + b"connection: close\r\n\r\n")[0] == 200
        for client in halves[:1]:
            status, body = read_answer(client)
            assert status == 503 and b"--max-connections" in body
        for client in halves:
            client.close()
        with connect(port) as kept:
            kept.sendall(HEAD + b"\r\n")
            assert read_answer(kept)[0] == 200
            others = [connect(port) for _ in range(2)]
            assert read_all(kept) == b""
            for client in others:
                client.close()


@pytest.mark.parametrize("is_handed_over", [False, True])
def test_a_connection_that_the_event_loop_takes_over_gets_an_answer_too(is_handed_over: bool) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(HEAD)  # unread, it would reset a connection that is closed
        handshake = Handshake(ours, b"HTTP/1.1 503 no place")
        handshake.is_handed_over = is_handed_over
        handshake.evict()
        assert read_all(theirs) == b"HTTP/1.1 503 no place"
        assert (ours.fileno() >= 0) == is_handed_over


def test_over_the_limit_new_connections_are_refused(listening: Callable[..., Any], core: FakeCore) -> None:
    """Where all connections have requests: those go on."""
    body = b'{"prompt": "w5"}'
    request = POST + b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    for options in ({"max_connections": 3}, {"max_connections": 9, "max_connections_per_address": 3}):
        with listening(**{"max_connections_per_address": 3} | options) as port:
            busy, keys = [], []
            for _ in range(3):
                busy.append(connect(port))
                busy[-1].sendall(request)
                keys.append(core.expect(Submit).requests[0].key)
            with connect(port) as client:
                answer = read_all(client)
            assert answer.startswith(b"HTTP/1.1 503 ") and b"--max-connections" in answer
            for key in keys:
                core.tokens(key, [7], finish_reason="stop")
            for client in busy:
                assert read_all(client).startswith(b"HTTP/1.1 200 OK")
                client.close()
            assert exchange(port, HEAD + b"connection: close\r\n\r\n")[0] == 200


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Options of a server with TLS."""
    folder: Path = tmp_path_factory.mktemp("tls")
    files = {"ssl_keyfile": str(folder / "key.pem"), "ssl_certfile": str(folder / "cert.pem")}
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    make += ["-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    make += ["-keyout", files["ssl_keyfile"], "-out", files["ssl_certfile"]]
    subprocess.run(make, check=True, capture_output=True)
    return files


def test_handshakes_count_and_end(listening: Callable[..., Any], certificate: dict[str, str]) -> None:
    context = ssl.create_default_context(cafile=certificate["ssl_certfile"])

    def version(port: int) -> bytes:
        with context.wrap_socket(connect(port), server_hostname="127.0.0.1") as client:
            client.sendall(HEAD + b"connection: close\r\n\r\n")
            return read_all(client)

    with listening(**certificate, max_connections=4, max_connections_per_address=4) as port:
        silent = [connect(port) for _ in range(20)]
        assert version(port).startswith(b"HTTP/1.1 200 OK")
        assert read_all(silent[0]) == b""  # it has been closed for others
        for client in silent:
            client.close()
    with listening(**certificate, head_seconds=0.6) as port:
        with connect(port) as client:
            assert read_all(client) == b""
        with connect(port) as client:
            client.sendall(b"GET / HTTP/1.1\r\n\r\n")
            read_all(client)
        assert version(port).startswith(b"HTTP/1.1 200 OK")


def test_clients_show_certificates(listening: Callable[..., Any], certificate: dict[str, str]) -> None:
    """ssl_cert_reqs=2 asks for one that an authority of ssl_ca_certs has signed: here it is its own."""
    without = ssl.create_default_context(cafile=certificate["ssl_certfile"])
    shown = ssl.create_default_context(cafile=certificate["ssl_certfile"])
    shown.load_cert_chain(certificate["ssl_certfile"], certificate["ssl_keyfile"])

    def version(port: int, context: ssl.SSLContext) -> bytes:
        try:
            with context.wrap_socket(connect(port), server_hostname="127.0.0.1") as client:
                client.sendall(HEAD + b"connection: close\r\n\r\n")
                return read_all(client)
        except OSError as error:  # an SSLError, or the reset that follows it
            return str(error).encode()

    authorities = certificate["ssl_certfile"]
    with listening(**certificate, ssl_ca_certs=authorities, ssl_cert_reqs=ssl.CERT_REQUIRED) as port:
        assert version(port, shown).startswith(b"HTTP/1.1 200 OK")
        assert not version(port, without).startswith(b"HTTP/1.1")
    with listening(**certificate, ssl_ca_certs=authorities, ssl_cert_reqs=ssl.CERT_OPTIONAL) as port:
        assert version(port, without).startswith(b"HTTP/1.1 200 OK")


def test_a_unix_socket_has_the_permissions_of_the_options(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    for mode in ("660", "606"):
        options = ServerOptions(uds=str(path), uds_mode=mode, uds_group=str(os.getgid()))
        options.check()
        with bind_socket(options):
            assert path.stat().st_mode & 0o777 == int(mode, 8) and path.stat().st_gid == os.getgid()
    for group in ("no-such-group", "9" * 20):
        path.unlink(missing_ok=True)
        with pytest.raises(OSError, match="cannot listen on"):
            bind_socket(ServerOptions(uds=str(path), uds_group=group))
        assert not path.exists()
    for options in (ServerOptions(uds=str(path), uds_mode="888"), ServerOptions(uds_mode="660")):
        with pytest.raises(ValueError, match="uds_mode"):
            options.check()


def test_a_unix_socket(listening: Callable[..., Any], core: FakeCore, tmp_path: Path) -> None:
    path = str(tmp_path / "http.sock")
    with listening(uds=path, max_connections=4):
        clients = [socket.socket(socket.AF_UNIX) for _ in range(10)]
        for client in clients:
            client.settimeout(PATIENCE)
            client.connect(path)
        clients[-1].sendall(HEAD + b"connection: close\r\n\r\n")
        assert read_all(clients[-1]).startswith(b"HTTP/1.1 200 OK")
        for client in clients:
            client.close()
