"""Socket addresses, their access control, and sending and receiving of frames.

The core binds ROUTER sockets; frontends and workers connect DEALER sockets. Addresses are `ipc://PATH` in a
directory of mode 0700, or `tcp://HOST:PORT`, which needs CURVE keys unless it is a loopback address.
"""

from __future__ import annotations

import ipaddress
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import zmq

from pagewire.ipc.host.owned import open_owned
from pagewire.ipc.wire.codec import MAX_MESSAGE_BYTES, Buffer

MAX_IPC_PATH = 107  # size of sockaddr_un.sun_path less its NUL
HIGH_WATER = 1000  # messages that ZeroMQ queues per peer, in each direction, before sending fails or waits


class CurveKeys(msgspec.Struct, frozen=True):
    """CURVE keys (Z85) of one side: its own pair and, for the connecting side, the server's public key."""

    public: bytes
    secret: bytes
    server: bytes | None = None

    @classmethod
    def load(cls, own: Path, server: Path | None = None) -> CurveKeys:
        """Read certificate files in the format of `zmq.auth.create_certificates`.

        Raises:
            ValueError: `own` has no secret key. PermissionError: other users can change a file.
            OSError: a file cannot be read.
        """
        from zmq.auth import load_certificate  # few frontends have keys

        for path in (own, server):
            if path is not None and path.exists():
                os.close(open_owned(path.resolve()))
        public, secret = load_certificate(own)
        if secret is None:
            raise ValueError(f"{own} holds no secret key: use the .key_secret file")
        return cls(public, secret, load_certificate(server)[0] if server else None)


def runtime_dir() -> Path:
    """The user's private directory for sockets, created with mode 0700 if necessary.

    Raises:
        PermissionError: it exists, but has another owner or is accessible to others.
    """
    from tempfile import gettempdir  # a frontend that attaches has no sockets of its own

    base = os.environ.get("PAGEWIRE_RPC_BASE_PATH") or os.environ.get("XDG_RUNTIME_DIR")
    path = Path(base) / "pagewire" if base else Path(gettempdir()) / f"pagewire-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise PermissionError(
            f"{path} must be a directory owned by you with mode 0700; remove it or fix its mode"
        )
    return path


def private_address(name: str) -> str:
    """An `ipc://` address in `runtime_dir()`.

    Raises:
        ValueError: the path is too long for a UNIX socket.
    """
    return check_address(f"ipc://{runtime_dir() / name}.sock")


def check_address(address: str, *, encrypted: bool = True) -> str:
    """Validate and return an address.

    encrypted: whether CURVE keys are used; without them, only loopback TCP is allowed.

    Raises:
        ValueError: not ipc:// or tcp://, path too long, no port, or unencrypted TCP beyond loopback.
    """
    url = urlsplit(address)
    if url.scheme == "ipc":
        path = address.removeprefix("ipc://")
        if not path.startswith("/"):
            raise ValueError(f"{address!r} needs an absolute path: ipc:///path/to/socket")
        if len(os.fsencode(path)) > MAX_IPC_PATH:
            raise ValueError(f"the path of {address!r} is over {MAX_IPC_PATH} bytes; choose a shorter one")
        return address
    if url.scheme == "tcp":
        host = (url.hostname or "").strip("[]")
        if address != f"tcp://{url.netloc}" or set("@;") & set(url.netloc):
            raise ValueError(f"{address!r} must be tcp://HOST:PORT, and nothing else")
        if url.port is None:
            raise ValueError(f"{address!r} needs a port: tcp://127.0.0.1:5555")
        if not encrypted and not is_loopback(host):
            raise ValueError(f"{address!r} is open to other machines: give CURVE keys, or use loopback")
        return address
    raise ValueError(f"{address!r} must begin with ipc:// or tcp://")


def is_loopback(host: str) -> bool:
    """True for "localhost" and loopback IP addresses."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def new_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A socket that does not block at exit, with limited queues and message size."""
    socket = context.socket(kind)
    socket.linger = 0
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    socket.sndhwm = HIGH_WATER
    socket.rcvhwm = HIGH_WATER
    return socket


def bind_router(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    curve: CurveKeys | None = None,
    *,
    guarded: bool = False,
    mode: int = 0o600,
    receive_queue: int = HIGH_WATER,
    send_queue: int = HIGH_WATER,
) -> zmq.Socket[bytes]:
    """A bound ROUTER socket. Sending to a peer that is gone raises `EHOSTUNREACH`.

    guarded: only those connect whom the `Gate` of the context admits; with CURVE keys that is always so.
    mode: of the file of an ipc socket. receive_queue, send_queue: messages that ZeroMQ keeps for each peer.

    Raises:
        ValueError: see `check_address`. OSError: the address cannot be bound.
    """
    check_address(address, encrypted=curve is not None)
    socket = new_socket(context, zmq.ROUTER)
    socket.router_mandatory = 1
    socket.rcvhwm, socket.sndhwm = receive_queue, send_queue
    if guarded or curve is not None:
        guard(socket, address)
    if curve is not None:
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = curve.public, curve.secret
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        raise OSError(f"cannot listen on {address}: {error.strerror}") from error
    if address.startswith("ipc://"):
        Path(address.removeprefix("ipc://")).chmod(mode)
    return socket


def guard(socket: zmq.Socket[bytes], address: str) -> None:
    """Let only those peers connect whom the `Gate` of the socket's context admits; without a gate, none."""
    socket.zap_domain = address.partition("://")[0].encode()
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def new_dealer(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    identity: bytes,
    curve: CurveKeys | None = None,
    *,
    guarded: bool = False,
) -> zmq.Socket[bytes]:
    """An unconnected DEALER socket for `address`, so that a monitor can be attached before it connects.

    guarded: it sends nothing to a listener whom the `Gate` of the context does not admit.

    Raises:
        ValueError: see `check_address`; or `curve` lacks the server's public key.
    """
    check_address(address, encrypted=curve is not None)
    socket = new_socket(context, zmq.DEALER)
    socket.identity = identity
    if guarded:
        guard(socket, address)
    if curve is not None:
        if curve.server is None:
            raise ValueError("connecting with CURVE needs the server's public key")
        socket.curve_publickey, socket.curve_secretkey = curve.public, curve.secret
        socket.curve_serverkey = curve.server
    return socket


def connect_dealer(
    context: zmq.Context[zmq.Socket[bytes]], address: str, identity: bytes, curve: CurveKeys | None = None
) -> zmq.Socket[bytes]:
    """A DEALER socket that connects to `address` in the background.

    Raises:
        ValueError: see `new_dealer`.
    """
    socket = new_dealer(context, address, identity, curve)
    socket.connect(address)
    return socket


def next_event(monitor: zmq.Socket[bytes]) -> int:
    """The next event of a socket's monitor, as one of the `zmq.EVENT_` values; waits for it.

    As `zmq.utils.monitor.recv_monitor_message` (the layout is that of zmq_socket_monitor(3)), whose module imports
    asyncio: a frontend attaches sooner without.
    """
    described, _ = monitor.recv_multipart()
    return int.from_bytes(described[:2], sys.byteorder)


def send(socket: zmq.Socket[bytes], frames: Sequence[Buffer], flags: int = 0) -> None:
    """Send one message. Large frames are not copied, so their buffers must not be changed afterwards.

    Raises:
        zmq.Again: the queue is full, with `zmq.NOBLOCK`. zmq.ZMQError: the peer is gone (ROUTER).
    """
    socket.send_multipart(frames, flags=flags, copy=len(frames) == 1)


def receive(socket: zmq.Socket[bytes], flags: int = 0) -> list[Buffer]:
    """The frames of the next message: small ones as bytes, large ones as read-only views of the received buffer.

    Raises:
        zmq.Again: there is no message, with `zmq.NOBLOCK`.
    """
    return [content(frame) for frame in socket.recv_multipart(flags=flags, copy=False)]


def receive_from(socket: zmq.Socket[bytes], flags: int = 0) -> tuple[bytes, str, list[Buffer]]:
    """The next message of a ROUTER: its sender's identity, the sender's name with the gate, and the frames.

    The name belongs to the connection, so no sender can claim another's; it is empty without a gate.

    Raises:
        zmq.Again: there is no message, with `zmq.NOBLOCK`.
    """
    first, *frames = socket.recv_multipart(flags=flags, copy=False)
    try:
        name = str(first.get("User-Id"))
    except zmq.ZMQError:  # the socket is not guarded
        name = ""
    return first.bytes, name, [content(frame) for frame in frames]


def content(frame: zmq.Frame) -> Buffer:
    """The bytes of a frame: a copy of a small one, a read-only view of a large one."""
    return frame.bytes if len(frame) < 4096 else frame.buffer.toreadonly()
