"""How a worker introduces itself: the machine, and where other ranks reach it."""

from __future__ import annotations

import socket

import pytest

from pagewire.workers.ranks.introduction import introduce, machine_name


def test_a_worker_of_the_machine_of_its_core_listens_nowhere() -> None:
    hello, listener = introduce("ipc:///tmp/core.sock")
    assert (hello.machine, hello.host, listener) == (machine_name(), "", None)


def test_a_worker_reached_over_tcp_listens_where_the_core_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hello, listener = introduce("tcp://127.0.0.1:5710")
    assert listener is not None and listener.getsockname() == ("127.0.0.1", hello.port)
    assert hello.host == "127.0.0.1"
    # A port that is in use is passed over.
    monkeypatch.setenv("PAGEWIRE_PORT", str(hello.port))
    second, other = introduce("tcp://127.0.0.1:5710")
    assert other is not None and second.port > hello.port
    monkeypatch.setenv("PAGEWIRE_HOST_IP", "192.0.2.1")
    with pytest.raises(OSError, match=r"cannot listen at 192.0.2.1"):
        monkeypatch.delenv("PAGEWIRE_PORT")
        introduce("tcp://127.0.0.1:5710")
    for opened in (listener, other):
        with socket.create_connection(opened.getsockname()):
            opened.close()
