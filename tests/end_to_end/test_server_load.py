"""Many requests of many kinds at once: every answer right, nothing left behind, nobody hurt by another's death."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from tests.end_to_end.server_process import ServerProcess
from tests.end_to_end.server_scenarios import kill_one_server, mixed_load


@pytest.fixture
def start_server() -> Iterator[Callable[[str], ServerProcess]]:
    """Start a server on the core at an address."""
    servers: list[ServerProcess] = []

    def start(address: str) -> ServerProcess:
        servers.append(ServerProcess(address))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def test_mixed_requests_with_clients_that_leave(
    address: str, start_server: Callable[[str], ServerProcess]
) -> None:
    first, second = asyncio.run(mixed_load(address, start_server(address), 160, 32, num_rounds=1))
    for one in (first, second):
        assert one.wrong == []
        assert one.leaks == ""
    assert second.counts["left"] > 10 and second.counts["whole"] > 100
    assert second.tasks == first.tasks


def test_a_killed_server_hurts_nobody_else(
    address: str, start_server: Callable[[str], ServerProcess]
) -> None:
    killed, other = start_server(address), start_server(address)
    found = asyncio.run(kill_one_server(address, killed, other, 32))
    assert found.wrong == []
    assert (found.unharmed, found.afterwards) == (32, True)
    assert found.cut > 0
    assert found.status["num_free_blocks"] == found.status["num_blocks"]
