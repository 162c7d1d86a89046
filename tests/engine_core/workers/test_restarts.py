"""When lost workers are started again."""

from __future__ import annotations

import pytest

from pagewire.engine_core.workers.restarts import (
    DECAY_SECONDS,
    MAX_FAILED_RESTARTS,
    MAX_FAILED_STARTS,
    Restarts,
)


def lost_after(restarts: Restarts, served: float) -> float:
    """The pause after workers that were ready have served so many seconds."""
    restarts.ready(5000.0)
    pause = restarts.lost(5000.0 + served)
    assert restarts.due == 5000.0 + served + pause
    return pause


def test_pauses_grow_while_workers_serve_no_longer() -> None:
    restarts = Restarts()
    pauses = [lost_after(restarts, 1.0) for _ in range(9)]
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert lost_after(restarts, 3 * DECAY_SECONDS) == 16.0
    assert lost_after(restarts, 100 * DECAY_SECONDS) == 0.0
    assert not restarts.hopeless, "workers that get ready and are killed are started again for ever"


def test_the_time_of_pauses_and_starts_is_none_of_service() -> None:
    restarts = Restarts()
    for _ in range(4):
        pause = restarts.lost(1e6)
    assert restarts.lost(1e6 + 100 * DECAY_SECONDS) == 2 * pause


@pytest.mark.parametrize(("ever_ready", "limit"), [(False, MAX_FAILED_STARTS), (True, MAX_FAILED_RESTARTS)])
def test_failed_starts_in_a_row_are_limited(ever_ready: bool, limit: int) -> None:
    restarts = Restarts()
    if ever_ready:
        lost_after(restarts, 1.0)
    for _ in range(limit - 1):
        restarts.lost(0.0)
    assert not restarts.hopeless
    restarts.lost(0.0)
    assert restarts.hopeless
    restarts.ready(0.0)
    assert not restarts.hopeless
