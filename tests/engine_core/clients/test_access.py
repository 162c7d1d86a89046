"""Which peers may attach, what they may do, and that changes of certificates and rights take effect at once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.auth

from pagewire.engine_core.clients.access import ALL, Access, may_name_paths
from pagewire.engine_core.clients.clients import Clients
from pagewire.engine_core.daemon import Listen
from pagewire.ipc.errors import received_error
from pagewire.ipc.host.gate import Gate, Peer
from pagewire.ipc.wire.budget import MAX_HELLO_BYTES
from pagewire.ipc.wire.calls import CALLS, Right
from pagewire.ipc.wire.codec import Codec
from pagewire.ipc.wire.messages import PROTOCOL, Call, CallAnswer, Hello, Refused, ToFrontend
from pagewire.ipc.wire.sockets import bind_router, connect_dealer, send
from tests.engine_core.conftest import WAIT_MS, RawFrontend, RunningCore

ME = f"uid:{os.geteuid()}"
STRANGER = 65533


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rights.yaml"


def certificate(folder: Path, name: str) -> bytes:
    """Make a certificate, put its public half into `clients`, and return its key."""
    (folder / "clients").mkdir(exist_ok=True)
    public, _ = zmq.auth.create_certificates(folder, name)
    shutil.copy(public, folder / "clients")
    return zmq.auth.load_certificate(public)[0]


# ---------------------------------------------------------------- who may attach


def test_this_user_and_root_may_attach_and_others_if_they_are_allowed() -> None:
    for user in (os.geteuid(), 0):
        assert Access().admit(Peer("localhost", user)) == f"uid:{user}"
    with pytest.raises(
        PermissionError, match=f"user {STRANGER} may not attach; --allow-uid {STRANGER} would"
    ):
        Access().admit(Peer("localhost", STRANGER))
    assert Access([STRANGER]).admit(Peer("localhost", STRANGER)) == f"uid:{STRANGER}"


def test_paths_of_adapters_are_for_those_who_could_read_them_and_control_the_engine() -> None:
    assert may_name_paths(ME, ALL) and may_name_paths("uid:0", ALL)
    assert not may_name_paths(ME, ALL - {Right.CONTROL})
    for peer in ("tcp", "curve:alice", f"uid:{STRANGER}", ""):
        assert not may_name_paths(peer, ALL)


def test_a_withdrawn_certificate_lets_nobody_in(tmp_path: Path) -> None:
    alice = Peer("192.0.2.1", key=certificate(tmp_path, "alice"))
    access = Access(certificates=tmp_path / "clients")
    assert access.admit(alice) == "curve:alice" and access.rights("curve:alice") == ALL
    bob = Peer("192.0.2.1", key=certificate(tmp_path, "bob"))
    assert access.admit(bob) == "curve:bob"
    (tmp_path / "clients" / "alice.key").unlink()
    with pytest.raises(PermissionError, match="of which there is no certificate here"):
        access.admit(alice)
    assert access.rights("curve:alice") == frozenset() and access.rights("curve:bob") == ALL
    shutil.rmtree(tmp_path / "clients")
    with pytest.raises(PermissionError):
        access.admit(bob)


def test_a_folder_of_certificates_to_which_others_may_write_lets_nobody_in(tmp_path: Path) -> None:
    alice = Peer("192.0.2.1", key=certificate(tmp_path, "alice"))
    access = Access(certificates=tmp_path / "clients")
    (tmp_path / "clients").chmod(0o777)
    with pytest.raises(PermissionError, match="open to other users"):
        Access(certificates=tmp_path / "clients")
    certificate(tmp_path, "mallory")  # so that it is read again
    with pytest.raises(PermissionError, match="no certificate here"):
        access.admit(alice)


def test_a_certificate_that_others_may_change_is_ignored(tmp_path: Path) -> None:
    alice, bob = (Peer("192.0.2.1", key=certificate(tmp_path, name)) for name in ("alice", "bob"))
    (tmp_path / "clients" / "alice.key").chmod(0o666)
    (tmp_path / "clients" / "broken.key").write_text("nothing")
    access = Access(certificates=tmp_path / "clients")
    assert access.admit(bob) == "curve:bob"
    with pytest.raises(PermissionError):
        access.admit(alice)


def test_allowed_users_need_ipc() -> None:
    with pytest.raises(ValueError, match="--allow-uid has no effect at tcp"):
        Listen("tcp://127.0.0.1:5555", allowed_users=(1000,))


# ---------------------------------------------------------------- the file of rights


def test_rights_by_peer(file: Path) -> None:
    file.write_text("uid:5: [read]\ncurve:web: [read, generate]\ntcp: []\ndefault: [control]\n")
    access = Access([5, 6], rights=file)
    assert access.rights("uid:5") == {Right.READ}
    assert access.rights("uid:6") == {Right.CONTROL}
    with pytest.raises(PermissionError, match="tcp has no rights"):
        access.admit(Peer("127.0.0.1"))
    file.write_text("uid:5: [read, generate, events, blocks, control]\n")
    access.refresh()
    assert (access.rights("uid:5"), access.rights("uid:6")) == (ALL, frozenset())


def test_a_file_of_rights_that_has_become_invalid_changes_nothing(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.write_text("uid:5: [read]\n")
    access = Access(rights=file)
    file.write_text("uid:5: [read, all]\n")
    access.refresh()
    access.refresh()
    assert access.rights("uid:5") == {Right.READ}
    assert len(caplog.messages) == 1 and "the rights of uid:5 must be a list of read" in caplog.messages[0]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("- read\n", "must hold a mapping of peers"),
        ("{", "is not valid YAML"),
        ("alice: [read]\n", "a peer is uid:NUMBER, curve:NAME, tcp or default, not 'alice'"),
        ("uid:me: [read]\n", "a peer is uid:NUMBER"),
        ("uid:5: [write]\n", r"must be a list of read, generate, events, blocks, control, not \['write'\]"),
        ("uid:5: 7\n", "must be a list of"),
    ],
)
def test_a_file_of_something_else(file: Path, text: str, error: str) -> None:
    file.write_text(text)
    with pytest.raises(ValueError, match=error):
        Access(rights=file)


def test_a_file_of_rights_that_others_may_change(file: Path) -> None:
    file.write_text("default: [read]\n")
    file.chmod(0o666)
    with pytest.raises(PermissionError, match="every user may write to it"):
        Access(rights=file)


# ---------------------------------------------------------------- in a core


def refused(answer: CallAnswer) -> bool:
    """Whether a call was refused for want of a right, rather than for its arguments or not at all."""
    if answer.error is None:
        return False
    return isinstance(received_error(answer.error, answer.error_type), PermissionError)


def test_each_call_needs_its_right_and_losing_all_rights_ends_an_attachment(
    start_core: Callable[..., RunningCore], file: Path
) -> None:
    file.write_text(f"{ME}: [read]\n")
    frontend = attached(start_core(access=Access(rights=file)))
    for number, (name, call) in enumerate(CALLS.items()):
        frontend.begin_call(number, name, *(["x"] if call.right is Right.CONTROL else []))
        assert refused(frontend.answer()) is (call.right is not Right.READ), name
    frontend.submit(1, [1, 1])
    answer = frontend.hear()
    assert isinstance(answer, Refused) and (answer.keys, answer.error_type) == ([1], "PermissionError")
    assert answer.error == f"a request needs the right 'generate', which {ME} does not have"

    file.write_text(f"{ME}: [generate]\n")  # takes effect with the core's next heartbeat
    while not refused(frontend.call("status")):
        pass
    frontend.submit(2, [1, 1])
    frontend.finish((2, 0))
    assert frontend.ends[2, 0].finish_reason == "length"

    file.write_text("default: []\n")
    farewell = frontend.hear()
    assert isinstance(farewell, Refused) and farewell.error_type == "PermissionError"
    assert f"{ME} may no longer be attached" in farewell.error


@pytest.mark.timeout(60)
def test_what_a_frontend_may_not_send_is_not_decoded(
    start_core: Callable[..., RunningCore], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(f"{ME}: [read]\n")
    core = start_core(access=Access(rights=file))
    frontend = attached(core)

    class Decoder:
        def decode(self, head: bytes) -> Any:
            decoded.append(len(head))
            return real.decode(head)

    decoded, real = list[int](), core.clients._codec._decoder
    monkeypatch.setattr(core.clients._codec, "_decoder", Decoder())
    medium = [0, 1, b"", ["float32", [127] * 1_000_000, b""], True]
    request = [7, "r", [[1, 5], [medium]], {"type": "sampling"}, 1]
    for requests, keys in ([request], [7]), ([[], 1, [b"x"], [2**63], [3, "r"]], [3]):
        send(frontend.socket, [msgspec.msgpack.encode({"type": "submit", "requests": requests})])
        answer = frontend.hear()
        assert isinstance(answer, Refused) and (answer.error_type, answer.keys) == ("PermissionError", keys)
    frontend.begin_call(5, "status", "x" * MAX_HELLO_BYTES)
    answer = frontend.hear()
    assert isinstance(answer, Refused) and (answer.error_type, answer.call_id) == ("ProtocolError", 5)
    assert f"over the limit of {MAX_HELLO_BYTES} for a frontend without the right 'generate'" in answer.error
    frontend.status()
    assert max(decoded) < 1000

    file.write_text(f"{ME}: [control]\n")
    while refused(frontend.call("reset_prefix_cache")):
        pass
    assert "x" * MAX_HELLO_BYTES in frontend.call("collective_rpc", "echo", ["x" * MAX_HELLO_BYTES]).result[0]


def attached(core: RunningCore) -> RawFrontend:
    frontend = core.frontend()
    frontend.attach()
    return frontend


def test_rights_follow_the_connection_and_not_the_identity(tmp_path: Path) -> None:
    """The identity of a frontend that has gone is free; with another name at the gate, it is another frontend."""
    names = chain(["curve:first"], repeat("curve:second"))
    address, codec = f"ipc://{tmp_path}/core.sock", Codec[Any](ToFrontend)
    with zmq.Context() as core, zmq.Context() as context:
        gate = Gate(core, lambda peer: next(names))
        gate.start()
        router = bind_router(core, address, guarded=True)
        clients = Clients(router, 30.0, AllRights())
        with connect_dealer(context, address, b"me") as first:
            send(first, codec.encode(Hello(PROTOCOL, "test", 1)))
            assert router.poll(WAIT_MS)
            [(identity, _, _)] = clients.messages(0.0)
            clients.attach(identity, "", 1, 0.0)
        assert clients.attached[b"me"].peer == "curve:first"
        arrived: list[Any] = []
        while not arrived:  # a connection with an identity that libzmq has not freed yet leads nowhere
            with connect_dealer(context, address, b"me") as second:
                send(second, codec.encode(Call(1, "pause")))
                router.poll(100)
                arrived = list(clients.messages(0.0))
        assert [message[:2] for message in arrived] == [(b"me", Call(1, "pause"))]  # which the core refuses
        assert not clients.attached
        gate.stop()
        core.destroy(linger=0)


class AllRights(Access):
    """Knows no peers, and gives all of them all rights."""

    def rights(self, name: str) -> frozenset[Right]:
        return ALL
