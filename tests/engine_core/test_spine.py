"""The spine of the core is what a plain request needs. Wings import it, and it imports none of them.

A wing plugs into what the spine calls: `Wing`, `CacheGroup`, `Speculation`, `ColdPrefixes`, `TurnQueue`, and the
protocols of `attachments.py`, of `engine.py` and of the lobby. `wiring.py` alone chooses which ones an engine has.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from tests.test_imports import MODULES, ROOT, imports, modules_imported, name_of

CORE = ROOT / "engine_core"
SPINE = ("admission", "clients", "schedule", "wings", "workers")
LOOP = ("core.py", "engine.py", "intake.py", "serving.py", "steps.py")
WIRING = ("__init__.py", "__main__.py", "config", "daemon.py", "wiring.py")

# The wings, and the names that others import of each: its door.
DOORS = {
    "adapters": {"AdapterLimits", "AdapterService", "AdapterTable"},
    "calls": {"Control", "PendingCalls", "WeightUpdates", "WorkerSleep"},
    "drafting": {"open_speculation"},
    "events": {"BlockEvents", "KVPublisher"},
    "grammar": {"Grammars", "LoadedTokenizer", "begin_tokenizer", "open_grammars"},
    "media": {"EncoderCache", "MediaStore", "open_encoder", "open_media", "start_media"},
    "metrics": {"Metrics", "MeasuredEngine", "ReportedEngine", "StatsLog", "metrics", "reports"},
    "retention": {"PrefixPromises", "PromiseTimer", "RetentionLimits"},
    "states": {"StateSlots", "open_states"},
    "tenants": {"Accounts", "WaitingQueue"},
    "tiers": {"ColdTier", "PeerLinks", "TierPlaces", "open_scheduler"},
    "weights": {"OpenWeights", "Upload", "check_tensors", "open_below"},
}
MAX_NAMES = 10

# Files of the spine that import a wing, or what chooses wings, with what they import. It may only shrink.
OFFENDERS: dict[str, set[str]] = {}

# Files that one reaches from here, by imports in functions and for type checkers too. They may only shrink.
REACHED = {
    "pagewire.engine_core.schedule.scheduler": 38,
    "pagewire.engine_core.core": 93,
}


def room_of(path: Path) -> str:
    """The part of the core that a file belongs to: a folder, or a file beside these."""
    return path.relative_to(CORE).parts[0]


def reached(module: str) -> set[str]:
    """The module, and all of ours that it imports, directly or not."""
    found: set[str] = set()
    pending = {module}
    while pending:
        found |= pending
        pending = {other for name in pending for other in modules_imported(MODULES[name])} - found
    return found


FILES = sorted(CORE.rglob("*.py"))


def test_every_file_is_of_the_spine_or_of_a_wing_or_chooses_wings() -> None:
    assert {room_of(path) for path in FILES} == {*SPINE, *LOOP, *DOORS, *WIRING}


def test_the_spine_imports_no_wing() -> None:
    offenders: dict[str, set[str]] = {}
    for path in FILES:
        if room_of(path) in (*SPINE, *LOOP):
            others = {name for name in modules_imported(path) if name.startswith("pagewire.engine_core.")}
            wrong = {name for name in others if room_of(MODULES[name]) in (*DOORS, *WIRING)}
            if wrong:
                offenders[name_of(path)] = wrong
    assert offenders == OFFENDERS


@pytest.mark.parametrize("module", REACHED)
def test_few_files_are_reached(module: str) -> None:
    names = reached(module)
    assert len(names) <= REACHED[module], sorted(names)


def test_wings_have_small_doors() -> None:
    """What others import of a wing is what one has to know of it."""
    used: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        for name in imports(path):
            room, _, _ = name.removeprefix("pagewire.engine_core.").partition(".")
            if room in DOORS and name.startswith("pagewire.engine_core.") and room_of(path) != room:
                used[room].add(name.rpartition(".")[2])
    assert used == DOORS
    assert max(map(len, DOORS.values())) <= MAX_NAMES


def test_wings_are_chosen_in_one_place() -> None:
    """Nothing but `wiring.py` imports `open.py` of a wing."""
    importers = {
        name_of(path)
        for path in FILES
        for name in modules_imported(path)
        if name.endswith(".open") and room_of(MODULES[name]) != room_of(path)
    }
    assert importers == {"engine_core/wiring.py"}
