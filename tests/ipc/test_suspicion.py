"""What makes something suspect of crashes, and guilty, by each of the rules."""

from __future__ import annotations

import pytest

from pagewire.ipc.suspicion import (
    ADAPTER_RULE,
    NO_SUSPICION,
    REQUEST_RULE,
    SEQUENCE_RULE,
    Suspicion,
    SuspicionRule,
)

RULES = [SEQUENCE_RULE, ADAPTER_RULE, REQUEST_RULE]


def verdicts(rule: SuspicionRule, events: str) -> str:
    """What it is after each event: crash, Crash alone, step, Step alone. free, suspect, Guilty."""
    suspicion, said = NO_SUSPICION, ""
    for event in events:
        if event in "cC":
            suspicion = suspicion.after_crash(alone=event == "C")
        else:
            suspicion = suspicion.after_step(rule, alone=event == "S")
        said += "G" if suspicion.is_guilty(rule) else "s" if suspicion.is_suspect(rule) else "f"
    return said


@pytest.mark.parametrize(
    ("rule", "events", "expected"),
    [
        (SEQUENCE_RULE, "ccc", "fsG"),
        (SEQUENCE_RULE, "cscscsccc", "ffffsssGG"),
        (SEQUENCE_RULE, "ccS", "fsf"),
        (SEQUENCE_RULE, "cscsc" + "S" * 8 + "cc", "ffffs" + "s" * 7 + "f" + "fs"),
        (SEQUENCE_RULE, "cscsc" + "s" * 20, "ffffs" + "s" * 20),
        (ADAPTER_RULE, "cC", "sG"),
        (ADAPTER_RULE, "cccc", "sssG"),
        (REQUEST_RULE, "cccccC", "sssssG"),
        (REQUEST_RULE, "cs", "ss"),
    ],
)
def test_verdicts(rule: SuspicionRule, events: str, expected: str) -> None:
    assert verdicts(rule, events) == expected


@pytest.mark.parametrize("rule", RULES)
def test_whoever_is_guilty_was_suspect_or_is_it(rule: SuspicionRule) -> None:
    """So that nothing ends of a crash before it was tried alone, or could have been."""
    assert not NO_SUSPICION.is_suspect(rule) and not NO_SUSPICION.is_guilty(rule)
    assert not Suspicion().after_crash().is_guilty(rule)
    suspicion = NO_SUSPICION
    while not suspicion.is_guilty(rule):
        assert suspicion.num_in_all < 100
        before, suspicion = suspicion, suspicion.after_crash(alone=suspicion.is_suspect(rule))
    assert before.is_suspect(rule)


def test_a_suspicion_that_is_cleared_is_none_at_all() -> None:
    suspicion = NO_SUSPICION.after_crash()
    for _ in range(SEQUENCE_RULE.clear_after):
        assert suspicion is not NO_SUSPICION
        suspicion = suspicion.after_step(SEQUENCE_RULE, alone=True)
    assert suspicion is NO_SUSPICION
