"""Who may connect: decided on both sides before a message goes over; and nobody may once the gate is gone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.auth

from pagewire.ipc.host.gate import Gate, Peer, owner_of, read_peer
from pagewire.ipc.wire.sockets import CurveKeys, bind_router, new_dealer, next_event, receive_from, send

WAIT_MS = 20_000
UNANSWERED_MS = 300  # after which a handshake that nobody answers is given up
REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_DISCONNECTED
)


def somebody(peer: Peer) -> str:
    return "somebody"


def nobody(peer: Peer) -> str:
    raise PermissionError("not you")


def broken(peer: Peer) -> str:
    raise KeyError("a mistake")


@pytest.fixture
def new_gate() -> Iterator[Callable[..., tuple[Gate, zmq.Context[Any]]]]:
    """A context with a gate that runs on a thread."""
    gates: list[tuple[Gate, zmq.Context[Any]]] = []

    def new(admit: Callable[[Peer], str]) -> tuple[Gate, zmq.Context[Any]]:
        context: zmq.Context[Any] = zmq.Context()
        gate = Gate(context, admit)
        gate.start()
        gates.append((gate, context))
        return gates[-1]

    yield new
    for gate, context in gates:
        gate.stop()
        context.destroy(linger=0)


def connected(
    context: zmq.Context[Any],
    address: str,
    curve: CurveKeys | None = None,
    guarded: bool = False,
    patience_ms: int = WAIT_MS,
) -> bool:
    """Whether a connection comes about, rather than being refused, or not answered for `patience_ms`."""
    dealer = new_dealer(context, address, os.urandom(8).hex().encode(), curve, guarded=guarded)
    dealer.handshake_ivl = patience_ms
    events = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | REFUSED)
    dealer.connect(address)
    with suppress(zmq.Again):  # refused already: a socket without a connection has no queue
        send(dealer, [b"hello"], zmq.NOBLOCK)
    assert events.poll(WAIT_MS), "neither admitted nor refused"
    succeeded = next_event(events) == zmq.EVENT_HANDSHAKE_SUCCEEDED
    dealer.disable_monitor()
    dealer.close(WAIT_MS if succeeded else 0)
    return succeeded


Gates = Callable[..., tuple[Gate, "zmq.Context[Any]"]]


def test_an_ipc_peer_is_known_by_its_user(new_gate: Gates, tmp_path: Path) -> None:
    seen: list[Peer] = []
    _, core = new_gate(lambda peer: seen.append(peer) or f"uid:{peer.user}")  # type: ignore[func-returns-value]
    router = bind_router(core, f"ipc://{tmp_path}/s.sock", guarded=True)
    with zmq.Context() as context:
        assert connected(context, f"ipc://{tmp_path}/s.sock")
        assert router.poll(WAIT_MS)
        _, name, frames = receive_from(router)
    assert (name, frames) == (f"uid:{os.geteuid()}", [b"hello"])
    assert [(peer.user, peer.key) for peer in seen] == [(os.geteuid(), None)]


@pytest.mark.parametrize("admit", [nobody, broken])
def test_a_refused_peer_sends_nothing(
    new_gate: Gates, tmp_path: Path, admit: Callable[[Peer], str], caplog: pytest.LogCaptureFixture
) -> None:
    gate, core = new_gate(admit)
    router = bind_router(core, f"ipc://{tmp_path}/s.sock", guarded=True)
    with zmq.Context() as context:
        assert not connected(context, f"ipc://{tmp_path}/s.sock")
    assert not router.poll(0) and isinstance(gate.refusal, PermissionError)
    assert f"refused a connection: {gate.refusal}" in caplog.messages[0]


def test_a_guarded_frontend_sends_nothing_to_another_users_core(new_gate: Gates, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/s.sock"
    _, core = new_gate(somebody)
    router = bind_router(core, address, guarded=True)
    gate, context = new_gate(owner_of(address, os.geteuid() + 1))
    assert not connected(context, address, guarded=True)
    assert not router.poll(0)
    assert f"runs as user {os.geteuid()}" in str(gate.refusal) and "--peer-uid" in str(gate.refusal)
    _, context = new_gate(owner_of(address, None))
    assert connected(context, address, guarded=True)


def test_without_a_gate_or_after_its_end_nobody_connects(new_gate: Gates, tmp_path: Path) -> None:
    gate, core = new_gate(somebody)
    router = bind_router(core, f"ipc://{tmp_path}/s.sock", guarded=True)
    with zmq.Context() as context, zmq.Context() as without:
        assert connected(context, f"ipc://{tmp_path}/s.sock")
        gate.stop()
        assert not connected(context, f"ipc://{tmp_path}/s.sock", patience_ms=UNANSWERED_MS)
        with bind_router(without, f"ipc://{tmp_path}/t.sock", guarded=True):
            assert not connected(context, f"ipc://{tmp_path}/t.sock", patience_ms=UNANSWERED_MS)
    assert router.poll(WAIT_MS) and receive_from(router)[1] == "somebody"


def test_with_keys_a_socket_is_guarded_by_itself(new_gate: Gates, tmp_path: Path) -> None:
    """An authenticator that is gone must not let in every key."""
    certificates = {name: zmq.auth.create_certificates(tmp_path, name)[1] for name in ("core", "frontend")}
    keys = CurveKeys.load(Path(certificates["frontend"]), tmp_path / "core.key")
    seen: list[Peer] = []
    gate, core = new_gate(lambda peer: seen.append(peer) or "frontend")  # type: ignore[func-returns-value]
    router = bind_router(core, "tcp://127.0.0.1:0", CurveKeys.load(Path(certificates["core"])))
    address = router.last_endpoint.decode()
    with zmq.Context() as context:
        assert connected(context, address, keys)
        assert seen == [Peer("127.0.0.1", None, keys.public)]
        gate.stop()
        assert not connected(context, address, keys, patience_ms=UNANSWERED_MS)


def test_a_library_that_tells_no_user_ids_lets_nobody_in() -> None:
    assert read_peer(b"tcp", b"::1", b"", b"NULL") == Peer("::1")
    assert read_peer(b"ipc", b"localhost:1000:100:42", b"", b"NULL") == Peer("localhost:1000:100:42", 1000)
    with pytest.raises(PermissionError, match="does not report the user"):
        read_peer(b"ipc", b"localhost", b"", b"NULL")


def test_a_certificate_that_others_can_change_is_refused(tmp_path: Path) -> None:
    _, secret = zmq.auth.create_certificates(tmp_path, "core")
    shutil.copy(secret, tmp_path / "open.key_secret")
    (tmp_path / "open.key_secret").chmod(0o666)
    with pytest.raises(PermissionError, match="every user may write to it"):
        CurveKeys.load(tmp_path / "open.key_secret")
