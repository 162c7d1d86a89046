"""Mortal cores side by side, and a session on all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pagewire.frontend.core import core_source
from pagewire.frontend.core.mailbox import Inbox
from pagewire.frontend.core.session import Session
from pagewire.frontend.requests.outputs import RequestState
from pagewire.frontend.route import members, places
from pagewire.frontend.route.engine import open_router
from pagewire.frontend.route.fleet import Fleet
from pagewire.frontend.route.places import running_place
from pagewire.ipc.wire.messages import EngineInfo
from tests.frontend.conftest import PATIENCE
from tests.frontend.mortal_core import Keeper, Kills, MortalCore

NEVER: Kills = lambda request, made: False  # noqa: E731


class Cores:
    """Mortal cores side by side, and a session on all of them."""

    def __init__(self, folder: Path, info: EngineInfo) -> None:
        self.folder, self.info = folder, info
        self.cores: list[MortalCore | Keeper] = []
        self.engine: Any = None

    def new(self, kills: Kills = NEVER, kept: bool = False, **fields: Any) -> str:
        """One more core; its address. kept: another takes its place when it dies."""
        address = f"ipc://{self.folder}/core{len(self.cores)}.sock"
        info = msgspec.structs.replace(self.info, **fields)
        core = Keeper(address, info, kills) if kept else MortalCore(address, info, kills)
        self.cores.append(core)
        return address

    def open(self, *addresses: str, **options: Any) -> Session:
        """A session on cores at these addresses."""
        self.engine = open_router([running_place(address) for address in addresses], **options)
        session: Session = self.engine.session
        return session

    @property
    def fleet(self) -> Fleet:
        fleet: Fleet = self.engine.session.connection
        return fleet

    def batches(self, number: int) -> list[list[int]]:
        """The keys of each message of requests to a core."""
        return self.cores[number].batches  # type: ignore[union-attr]

    def close(self) -> None:
        if self.engine is not None:
            self.engine.session.validate()
            self.engine.shutdown()
            self.engine.session.validate()
        for core in self.cores:
            core.close()


@pytest.fixture
def cores(tmp_path: Path, engine_info: EngineInfo, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cores]:
    """Cores that die of what a test says."""
    monkeypatch.setattr(core_source, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(members, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(places, "CONNECT_SECONDS", PATIENCE)  # a busy machine is slow; see `nowhere`
    opened = Cores(tmp_path, engine_info)
    yield opened
    opened.close()


def wait_for(inbox: Inbox, states: list[RequestState]) -> None:
    """Wait for the end of all."""
    while not all(state.finished for state in states):
        inbox.get()


def ends(states: list[RequestState]) -> list[tuple[type[Exception] | None, list[int]]]:
    """The exception of each request, and its tokens."""
    return [
        (None if state.error is None else type(state.exception()), state.output_token_ids[0])
        for state in states
    ]


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does without an event."""
    waiting = threading.Event()
    for _ in range(int(PATIENCE / 0.005)):
        try:
            if condition():
                return
        except KeyError:
            pass  # between two cores
        waiting.wait(0.005)
    raise AssertionError("waited in vain")
