"""Random lives of a connection: whatever becomes of cores, no token of a request is lost or doubled."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewire.frontend.core.custody import MOVES, RequestPlace
from pagewire.frontend.core.supervisor import TRANSITIONS, ConnectionEvent, ConnectionStage
from pagewire.ipc.wire.messages import EngineInfo
from tests.frontend.core.simulated_cores import Simulation

# Every wrong entry of both tables: the table, where, and what stands there.
FAULTS = [
    *(
        (TRANSITIONS, at, wrong)
        for at, right in TRANSITIONS.items()
        for wrong in ConnectionStage
        if wrong is not right
    ),
    *((MOVES, at, wrong) for at, right in MOVES.items() for wrong in RequestPlace if wrong is not right),
]
# `close` comes at the end of a life, in these stages alone; and no simulated owner fails to resubmit.
CLOSED_IN = (ConnectionStage.ATTACHED, ConnectionStage.GONE)
NOT_SEEN = (ConnectionStage.RESUBMITTING, ConnectionEvent.NONE_LEFT)


def live(chance: random.Random, info: EngineInfo) -> None:
    """A random life; raises AssertionError, or KeyError for what a table has not, if something goes wrong."""
    with pytest.MonkeyPatch.context() as patch:
        simulation = Simulation(chance, info, patch, others=chance.choice([2, 1 << 30]))
        for _ in range(chance.randint(1, 40)):
            kind = chance.random()
            if kind < 0.3:
                simulation.submit(chance.randint(1, 60), chance.choice([None, None, None, 0, 2, 9]))
            elif kind < 0.7:
                simulation.happen()
            elif kind < 0.8:
                simulation.lose_core()
            elif kind < 0.9:
                simulation.abort()
            else:
                simulation.report_late()
            if chance.random() < 0.7:
                simulation.supervise(chance.choice([0, 3]))
        simulation.finish()


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])  # it is not changed
@given(chance=st.randoms(use_true_random=False))
def test_random_lives(engine_info: EngineInfo, chance: random.Random) -> None:
    live(chance, engine_info)


@pytest.mark.parametrize(
    ("table", "at", "wrong"),
    [
        (table, at, wrong)
        for table, at, wrong in FAULTS
        if at != NOT_SEEN and (at[1] is not ConnectionEvent.CLOSED or at[0] in CLOSED_IN)
    ],
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
def test_a_fault_in_a_table_is_found(
    table: dict[Any, Any], at: Any, wrong: Any, engine_info: EngineInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(table, at, wrong)
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(100):
            live(random.Random(seed), engine_info)
