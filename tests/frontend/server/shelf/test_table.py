"""The table of models: under random operations, with its rules one by one."""

from __future__ import annotations

import math
import random

import pytest

from pagewire.frontend.server.shelf.table import Action, ActionKind, ModelState, ShelfTable

NEEDS = {"a": 3, "b": 4, "c": 5, "d": 9}


def drive(table: ShelfTable, now: float = 0.0) -> list[Action]:
    """Do what the table decides, at once, until there is nothing left to do; all models can be started."""
    done = []
    while (action := table.next_action(now)) is not None:
        done.append(action)
        if action.kind is ActionKind.MEASURE:
            table.measured(action.name, NEEDS[action.name])
        elif action.kind is ActionKind.START:
            table.started(action.name, now)
        elif action.kind is ActionKind.STOP:
            table.stopped(action.name)
        else:
            for _ in range(table.entries[action.name].waiting):
                table.withdraw(action.name)
        table.validate()
    return done


def used(table: ShelfTable, name: str, now: float = 0.0) -> int:
    """Load a model for a request, and let it in."""
    table.ask(name)
    drive(table, now)
    return table.grant(name)


def names(actions: list[Action], kind: ActionKind) -> list[str]:
    return [action.name for action in actions if action.kind is kind]


def test_the_least_recently_used_ends_when_memory_is_needed() -> None:
    table = ShelfTable(NEEDS, (), capacity=12)
    for now, name in enumerate("abc"):
        table.release(name, used(table, name, now), now)
    table.release("a", used(table, "a", 5.0), 5.0)
    table.ask("d")  # takes the room of two, and b and c are older
    actions = drive(table, 6.0)
    assert names(actions, ActionKind.STOP) == ["b", "c"] and names(actions, ActionKind.START) == ["d"]
    assert table.entries["a"].state is ModelState.IDLE


def test_a_busy_model_yields_to_a_demand_that_waits_and_not_longer() -> None:
    table = ShelfTable(NEEDS, (), capacity=9)
    generation = used(table, "a")
    table.ask("d")
    assert names(drive(table), ActionKind.STOP) == [] and not table.may_enter("a")
    table.withdraw("d")
    drive(table)
    assert table.may_enter("a")
    table.ask("d")
    drive(table)
    table.release("a", generation, 1.0)
    assert names(drive(table, 1.0), ActionKind.START) == ["d"]


def test_pinned_models_stay_and_what_does_not_fit_beside_them_is_refused() -> None:
    table = ShelfTable(NEEDS, ("b",), capacity=10, idle_seconds=1.0)
    table.release("b", used(table, "b"), 0.0)
    assert drive(table, 100.0) == []
    table.ask("d")
    assert names(drive(table, 100.0), ActionKind.REFUSE) == ["d"]
    assert table.entries["b"].state is ModelState.IDLE
    with pytest.raises(ValueError, match="no model 'x'"):
        ShelfTable(NEEDS, ("x",), 10)


def test_idle_models_end_in_time() -> None:
    table = ShelfTable(NEEDS, (), capacity=12, idle_seconds=10.0)
    generation = used(table, "a")
    assert drive(table, 1000.0) == []
    table.release("a", generation, 1000.0)
    assert table.expires_at(table.entries["a"]) == 1010.0
    table.keep("a", math.inf)
    assert drive(table, 2000.0) == []
    table.keep("a", 0.0)
    assert names(drive(table, 1000.0), ActionKind.STOP) == ["a"]
    assert table.entries["a"].keep is None


def test_demands_are_served_in_turn() -> None:
    """A small model that would fit does not overtake a large one, which would else wait for ever."""
    table = ShelfTable(NEEDS, (), capacity=9)
    generation = used(table, "b")
    table.ask("d")
    table.ask("a")
    assert names(drive(table), ActionKind.START) == []
    table.release("b", generation, 1.0)
    assert names(drive(table, 1.0), ActionKind.START) == ["d"]
    generation = table.grant("d")
    assert drive(table, 2.0) == [] and not table.may_enter("d")
    table.release("d", generation, 3.0)
    assert names(drive(table, 3.0), ActionKind.START) == ["a"]


@pytest.mark.parametrize("seed", range(20))
def test_random_operations(seed: int) -> None:
    """Whatever comes in whatever order, the table stays valid; and once all is quiet, everybody was served."""
    random_ = random.Random(seed)
    table = ShelfTable(
        NEEDS, random_.choice([(), ("a",)]), capacity=random_.choice([9, 12, 16]), idle_seconds=5.0
    )
    uses: list[tuple[str, int]] = []
    pending: list[Action] = []
    now, served = 0.0, 0

    def answer(action: Action) -> None:
        kind, name = action
        if kind is ActionKind.MEASURE:
            table.measured(name, NEEDS[name]) if random_.random() < 0.9 else table.failed(name)
        elif kind is ActionKind.START:
            table.started(name, now) if random_.random() < 0.9 else table.failed(name)
        else:
            table.stopped(name)

    def decide() -> None:
        nonlocal served
        for _ in range(2):
            for name, entry in table.entries.items():
                while entry.waiting and table.may_enter(name):
                    uses.append((name, table.grant(name)))
                    served += 1
            while (action := table.next_action(now)) is not None:
                if action.kind is ActionKind.REFUSE:
                    for _ in range(table.entries[action.name].waiting):
                        table.withdraw(action.name)
                else:
                    pending.append(action)
                table.validate()

    for _ in range(1500):
        now += random_.random()
        name, choice = random_.choice(list(NEEDS)), random_.random()
        entry = table.entries[name]
        if choice < 0.3:
            table.ask(name, waits=random_.random() < 0.9)
        elif choice < 0.4 and entry.waiting:
            table.withdraw(name)
        elif choice < 0.65 and uses:
            held, generation = uses.pop(random_.randrange(len(uses)))
            table.release(held, generation, now)
        elif choice < 0.67 and entry.state in (ModelState.READY, ModelState.IDLE):
            table.lost(name)
            pending.append(Action(ActionKind.STOP, name))
        elif choice < 0.7:
            table.keep(name, random_.choice([None, 0.0, 3.0, math.inf]))
        elif choice < 0.72:  # it leaves, and comes back at once, or later
            while entry.waiting:
                table.withdraw(name)
            table.forget(name)
            table.validate()
            decide()
            table.take_out()
            table.add(name)
        elif pending:
            answer(pending.pop(random_.randrange(len(pending))))
        table.validate()
        decide()
        table.validate()
    while uses or pending or any(entry.waiting for entry in table.entries.values()):
        now += 1.0
        if pending:
            answer(pending.pop(0))
        elif uses:
            held, generation = uses.pop(0)
            table.release(held, generation, now)
        table.validate()
        before = len(pending), len(uses)
        decide()
        waiting = sum(entry.waiting for entry in table.entries.values())
        assert not waiting or before != (0, 0) or pending or uses, "nobody is served any more"
    assert served > 100


def test_models_leave_once_their_requests_have_ended() -> None:
    table = ShelfTable(NEEDS, ("a",), capacity=12)
    first = used(table, "a")
    table.forget("a")
    assert drive(table) == [] and table.take_out() == []
    table.release("a", first, 1.0)
    assert names(drive(table, 1.0), ActionKind.STOP) == ["a"] and table.take_out() == ["a"]
    table.release("a", first, 2.0)  # of a core that was lost
    assert table.take_out() == [] and "a" not in table.entries
    table.add("a")
    again = used(table, "a")
    table.release("a", first, 3.0)
    assert again != first and table.entries["a"].uses == 1 and table.entries["a"].pinned
    table.forget("a")
    table.add("a")
    table.release("a", again, 4.0)
    assert drive(table, 100.0) == [] and table.take_out() == []
    table.forget("b")
    assert table.take_out() == ["b"]
