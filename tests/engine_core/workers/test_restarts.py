"""When lost workers are started again."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pagewire.engine_core.workers.restarts import (
    DECAY_SECONDS,
    LONGEST_AWAITED_SECONDS,
    LONGEST_PAUSE_SECONDS,
    MAX_FAILED_RESTARTS,
    MAX_FAILED_STARTS,
    PATIENCE_SECONDS,
    Restarts,
)


def pause_after(restarts: Restarts, now: float, *, awaited: bool = False) -> float:
    """The pause before the next start of workers that were lost at `now`."""
    due = restarts.due(awaited=awaited)
    assert due is not None
    return due - now


def lost_after(restarts: Restarts, served: float) -> float:
    """The pause after workers that were ready have served so many seconds, with nobody waiting."""
    restarts.started(4990.0)
    restarts.ready(5000.0)
    assert restarts.due(awaited=True) is None
    restarts.lost(5000.0 + served)
    return pause_after(restarts, 5000.0 + served)


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
        restarts.lost(1e6)
    pause = pause_after(restarts, 1e6)
    restarts.lost(1e6 + 100 * DECAY_SECONDS)
    assert pause_after(restarts, 1e6 + 100 * DECAY_SECONDS) == 2 * pause


@pytest.mark.parametrize("loading", [1.0, 4.0])
def test_workers_that_are_awaited_are_started_at_once_if_they_have_run_for_a_while(loading: float) -> None:
    """Eight kills, one every 12 s."""
    restarts, silent = Restarts(), 0.0
    now = 0.0
    for kill in range(8):
        restarts.started(now)
        restarts.ready(now + loading)
        now = 12.0 * (kill + 1)
        restarts.lost(now)
        pause = pause_after(restarts, now, awaited=True)
        silent += pause + loading
        now += pause
    assert silent == 8 * loading


@pytest.mark.parametrize("ready", [True, False])
def test_workers_that_are_awaited_and_die_at_once_are_not_started_without_pause(ready: bool) -> None:
    restarts, now, starts = Restarts(), 0.0, []
    for _ in range(9):
        restarts.started(now)
        starts.append(now)
        if ready:
            restarts.ready(now + 0.1)
        restarts.lost(now + 0.2)
        now += 0.2 + pause_after(restarts, now + 0.2, awaited=True)
    between = [after - before for before, after in pairwise(starts)]
    assert between == pytest.approx([0.2, 0.5, 1.0, 2.0, 4.0, *[LONGEST_AWAITED_SECONDS] * 3])
    assert pause_after(restarts, now) > LONGEST_PAUSE_SECONDS - LONGEST_AWAITED_SECONDS


def test_failed_starts_in_a_row_are_limited() -> None:
    restarts = Restarts()
    for _ in range(MAX_FAILED_STARTS):
        assert not restarts.hopeless
        restarts.lost(0.0)
    assert restarts.hopeless
    restarts.ready(0.0)
    assert not restarts.hopeless


def test_failed_starts_of_workers_that_were_ready_are_limited_in_number_and_time() -> None:
    """The machine may lack memory for a while, also if somebody waits, so that starts follow each other soon."""
    restarts = Restarts()
    lost_after(restarts, 1.0)
    for _ in range(2 * MAX_FAILED_RESTARTS):
        restarts.lost(100.0)
        assert not restarts.hopeless
    restarts.lost(100.0 + PATIENCE_SECONDS)
    assert restarts.hopeless
    lost_after(restarts, 1.0)
    for now in range(MAX_FAILED_RESTARTS):
        assert not restarts.hopeless
        restarts.lost(now * PATIENCE_SECONDS)
    assert restarts.hopeless
