"""Which connections a server has, and which it gives up for others."""

from __future__ import annotations

import math
import random
import resource

import pytest

from pagewire.frontend.server.http import limits as limits_module
from pagewire.frontend.server.http.connections import Connections, HttpConnection
from pagewire.frontend.server.http.limits import (
    MOST_CONNECTIONS,
    RESERVED_DESCRIPTORS,
    ConnectionLimits,
    connection_limits,
    host_network,
)


class FakePeer:
    """Counts what happens to a connection."""

    def __init__(self) -> None:
        self.evicted = 0
        self.expired: list[float] = []

    def evict(self) -> None:
        self.evicted += 1

    def expire(self, now: float) -> None:
        self.expired.append(now)


def admitted(connections: Connections, host: str | None = "10.0.0.1") -> tuple[HttpConnection, FakePeer]:
    peer = FakePeer()
    connection = connections.admit(host, peer, 30.0)
    assert connection is not None
    return connection, peer


def test_the_oldest_without_a_request_makes_place() -> None:
    connections = Connections(ConnectionLimits(3, 3))
    first, second, third = (admitted(connections) for _ in range(3))
    connections.busy(first[0])
    admitted(connections, "10.0.0.2")
    assert (first[1].evicted, second[1].evicted, third[1].evicted) == (0, 1, 0)
    connections.idle(first[0], 5.0)
    admitted(connections, "10.0.0.2")
    assert (first[1].evicted, third[1].evicted, len(connections)) == (0, 1, 3)


def test_requests_are_not_given_up_for_connections() -> None:
    connections = Connections(ConnectionLimits(2, 2))
    for _ in range(2):
        connections.busy(admitted(connections)[0])
    assert connections.admit("10.0.0.2", FakePeer(), 30.0) is None
    assert connections.admit(None, FakePeer(), 30.0) is None


def test_one_address_takes_a_part_only() -> None:
    connections = Connections(ConnectionLimits(8, 2))
    mine = [admitted(connections) for _ in range(2)]
    other, other_peer = admitted(connections, "10.0.0.2")
    _, third = admitted(connections)
    assert (mine[0][1].evicted, other_peer.evicted, len(connections)) == (1, 0, 3)
    connections.busy(mine[1][0])
    admitted(connections)
    assert third.evicted == 1
    for connection in [*connections._open]:
        connections.busy(connection)
    assert connections.admit("10.0.0.1", FakePeer(), 30.0) is None
    assert all(connections.admit(None, FakePeer(), 30.0) for _ in range(3))  # a Unix socket has no addresses
    connections.remove(other)
    connections.remove(other)
    assert len(connections) == 5


def test_deadlines() -> None:
    connections = Connections(ConnectionLimits(9, 9))
    early, late, busy = (admitted(connections) for _ in range(3))
    late[0].deadline = 40.0
    connections.busy(busy[0])
    connections.expire(29.9)
    assert not early[1].expired
    connections.expire(30.0)
    assert (early[1].expired, late[1].expired, busy[1].expired) == ([30.0], [], [])
    connections.expire(1e9)
    assert late[1].expired and not busy[1].expired and busy[0].deadline == math.inf


def test_counts_add_up_under_random_events() -> None:
    rng = random.Random(5)
    connections = Connections(ConnectionLimits(20, 7))
    alive: dict[HttpConnection, FakePeer] = {}
    for _ in range(5000):
        event = rng.randrange(4)
        if event == 0:
            peer = FakePeer()
            connection = connections.admit(rng.choice(["10.0.0.1", "10.0.0.2", "::1", None]), peer, 1.0)
            alive = {one: its for one, its in alive.items() if not its.evicted}
            if connection is not None:
                alive[connection] = peer
        elif alive:
            chosen = rng.choice(list(alive))
            if event == 1:
                connections.busy(chosen)
            elif event == 2:
                connections.idle(chosen, 1.0)
            else:
                connections.remove(chosen)
                del alive[chosen]
        assert set(alive) == connections._open and len(alive) <= 20
        networks = [one.network for one in alive if one.network is not None]
        assert all(networks.count(network) <= 7 for network in networks)
        assert sum(connections._per_network.values()) == len(alive)
        assert set(connections._idle) <= connections._open


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:ffff:ffff:ffff", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_networks(host: str, network: str) -> None:
    assert host_network(host) == network


@pytest.mark.parametrize("descriptors", [32, 256, 1024, 20_000, 1 << 20, resource.RLIM_INFINITY])
def test_limits_follow_from_open_files(monkeypatch: pytest.MonkeyPatch, descriptors: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (descriptors, descriptors))
    monkeypatch.setattr(limits_module, "num_open_descriptors", lambda: 14)
    limits = connection_limits(None, None)
    if descriptors >= 256:
        assert (
            limits.most == min(MOST_CONNECTIONS, descriptors - 14 - RESERVED_DESCRIPTORS) or descriptors < 0
        )
        with pytest.raises(ValueError, match="max_connections must be at most"):
            connection_limits(2**31, None)
    assert 1 <= limits.most_per_address <= limits.most
    assert connection_limits(10, 3) == (10, 3) and connection_limits(10, None) == (10, 5)


def test_few_open_files_are_said_when_the_server_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (40, 40))
    monkeypatch.setattr(limits_module, "num_open_descriptors", lambda: 26)
    assert connection_limits(None, None) == (6, 3)
    assert "at most 6 connections at a time: this process may have 40 open files (ulimit -n)" in caplog.text
    with pytest.raises(
        ValueError, match=r"at most 6, got 10: this process may have 40 open files \(ulimit -n\)"
    ):
        connection_limits(10, None)
    monkeypatch.setattr(limits_module, "num_open_descriptors", lambda: 36)
    with pytest.raises(ValueError, match=r"no room for a connection: .* and has 36; 108 give 64 connections"):
        connection_limits(None, None)
