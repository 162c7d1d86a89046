"""When lost workers are started again."""

from __future__ import annotations

import pytest

from pagewire.engine_core.workers.restarts import (
    DECAY_SECONDS,
    MAX_FAILED_RESTARTS,
    MAX_FAILED_STARTS,
    Restarts,
)


def test_pauses_grow_and_are_forgotten_with_time() -> None:
    restarts, now = Restarts(), 5000.0
    pauses = []
    for _ in range(9):
        pauses.append(restarts.lost(now, was_ready=True))
        assert restarts.due == now + pauses[-1]
        now += pauses[-1]
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert restarts.lost(now + 3 * DECAY_SECONDS, was_ready=True) == 16.0
    assert restarts.lost(now + 100 * DECAY_SECONDS, was_ready=True) == 0.0
    assert not restarts.hopeless, "workers that get ready and are killed are started again for ever"


@pytest.mark.parametrize(("ever_ready", "limit"), [(False, MAX_FAILED_STARTS), (True, MAX_FAILED_RESTARTS)])
def test_failed_starts_in_a_row_are_limited(ever_ready: bool, limit: int) -> None:
    restarts = Restarts()
    if ever_ready:
        restarts.ready()
    for _ in range(limit - 1):
        restarts.lost(0.0, was_ready=False)
    assert not restarts.hopeless
    restarts.lost(0.0, was_ready=False)
    assert restarts.hopeless
    restarts.ready()
    assert not restarts.hopeless
