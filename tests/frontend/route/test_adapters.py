"""Adapters that are registered at a router: cores that join or come back get them, and requests where they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pagewire.frontend.core import core_source
from pagewire.frontend.core.mailbox import Inbox
from pagewire.frontend.core.session import Session
from pagewire.frontend.requests.lora import LoRARequest
from pagewire.frontend.requests.outputs import RequestState
from pagewire.frontend.route import members
from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.wire.lora import LoRAConfig
from pagewire.ipc.wire.messages import Call, CallAnswer, EngineInfo, Submit
from pagewire.ipc.wire.params import SamplingParams
from tests.frontend.conftest import PATIENCE, FakeCore
from tests.frontend.mortal_core import MortalCore, output
from tests.frontend.route.conftest import NEVER, Cores, ends, wait_for, wait_until


class Registry:
    """What the fake cores do with adapters. By address: those that were registered; and what a core does not do."""

    def __init__(self) -> None:
        self.registered: dict[str, list[tuple[Any, ...]]] = {}
        self.broken: set[str] = set()
        self.silent: set[str] = set()

    def answer(self, core: FakeCore, call: Call) -> CallAnswer:
        if core.address in self.silent:
            return CallAnswer(1 << 40)  # to no call: the router still waits for an answer
        if core.address in self.broken:
            return CallAnswer(call.call_id, error="its rank is 99", error_type="ValueError")
        if call.method == "register_adapter":
            self.registered.setdefault(core.address, []).append(tuple(call.args))
        return CallAnswer(call.call_id, True)

    def names(self, address: str) -> list[str]:
        return [name for name, *_ in self.registered.get(address, [])]


@pytest.fixture
def engine_info(engine_info: EngineInfo) -> EngineInfo:
    """An engine that serves adapters."""
    return msgspec.structs.replace(engine_info, lora=LoRAConfig(max_loras=4))


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    registry, called = Registry(), FakeCore._called

    def answer(core: FakeCore, call: Call) -> CallAnswer:
        known = call.method in ("register_adapter", "remove_lora")
        return registry.answer(core, call) if known else called(core, call)

    monkeypatch.setattr(FakeCore, "_called", answer)
    monkeypatch.setattr(core_source, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(members, "RETRY_SECONDS", 0.02)
    return registry


@pytest.fixture
def sql(tmp_path: Path) -> LoRARequest:
    return adapter(tmp_path, "sql", 7)


def adapter(tmp_path: Path, name: str, adapter_id: int) -> LoRARequest:
    folder = tmp_path / "adapters" / name
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    return LoRARequest(name, adapter_id, str(folder))


def submit(session: Session, inbox: Inbox, *names: str, adapter: str | None = "sql") -> list[RequestState]:
    """Requests that name an adapter as programs name a registered one: without its folder."""
    params = SamplingParams(max_tokens=5, temperature=0.0, detokenize=False)
    named = None if adapter is None else LoRARequest(adapter, 7)
    return session.submit(
        [
            session.intake.prepare({"prompt_token_ids": [5, 6]}, params, name, lora_request=named)
            for name in names
        ],
        inbox,
    )


def submitted(core: FakeCore) -> list[tuple[str, str]]:
    """The id of each request that a core got so far, and the folder that it names."""
    found = []
    while not core.seen.empty():
        if isinstance(message := core.seen.get(), Submit):
            found += [
                (each.request_id, each.adapter.path if each.adapter else "") for each in message.requests
            ]
    return found


def test_a_core_that_joins_gets_the_adapters_that_were_registered(
    cores: Cores, registry: Registry, sql: LoRARequest, tmp_path: Path
) -> None:
    first = cores.new()
    session, inbox = cores.open(first), Inbox()
    gone = adapter(tmp_path, "gone", 8)
    for each in (gone, sql, adapter(tmp_path, "code", 9)):
        assert session.add_lora(each).result(PATIENCE) is True
    assert session.call("remove_lora", gone.lora_int_id).result(PATIENCE) is True
    second = cores.new()
    added = cores.fleet.add(second)
    wait_until(lambda: registry.names(second) == ["sql", "code"])
    assert registry.registered[second] == registry.registered[first][1:]
    wait_until(lambda: added.adapters == {"sql": None, "code": None})
    states = submit(session, inbox, *"abcdef")
    wait_for(inbox, states)
    assert ends(states) == [(None, output(5))] * 6
    assert [len(submitted(core)) for core in cores.cores] == [3, 3]  # type: ignore[arg-type]


def test_a_core_that_cannot_load_an_adapter_gets_no_requests_for_it(
    cores: Cores, registry: Registry, sql: LoRARequest
) -> None:
    first, second = cores.new(), cores.new()
    session, inbox = cores.open(first), Inbox()
    session.add_lora(sql).result(PATIENCE)
    registry.broken.add(second)
    added = cores.fleet.add(second)
    wait_until(lambda: str(added.adapters.get("sql")) == "its rank is 99")
    states = submit(session, inbox, *"abcd") + submit(session, inbox, *"efgh", adapter=None)
    wait_for(inbox, states)
    assert ends(states) == [(None, output(5))] * 8
    one, other = (submitted(core) for core in cores.cores)  # type: ignore[arg-type]
    assert {*"abcd"} <= {name for name, _ in one} and {name for name, _ in other} <= {*"efgh"} and other
    cores.cores[0].close()
    wait_until(lambda: len(cores.fleet.members.up()) == 1)
    with pytest.raises(
        EngineBusyError, match="no engine core that is up could load the adapter 'sql': its rank"
    ):
        submit(session, inbox, "i")
    later = submit(session, inbox, "j", adapter=None)
    wait_for(inbox, later)
    assert ends(later) == [(None, output(5))]


def test_a_core_that_comes_back_gets_them_and_meanwhile_requests_that_name_the_folder(
    cores: Cores, registry: Registry, sql: LoRARequest
) -> None:
    address = cores.new()
    session, inbox = cores.open(address), Inbox()
    session.add_lora(sql).result(PATIENCE)
    registry.silent.add(address)
    cores.cores[0].close()
    wait_until(lambda: not cores.fleet.members.up())
    again = MortalCore(address, cores.info, NEVER)
    cores.cores.append(again)
    wait_until(lambda: len(cores.fleet.members.up()) == 1)
    states = submit(session, inbox, "a")
    wait_for(inbox, states)
    assert submitted(again) == [("a", sql.lora_path)]
    (replica,) = cores.fleet.members
    assert not replica.adapters
    registry.silent.clear()
    again.close()
    wait_until(lambda: not cores.fleet.members.up())
    last = MortalCore(address, cores.info, NEVER)
    cores.cores.append(last)
    wait_until(lambda: replica.adapters == {"sql": None})
    assert registry.names(address) == ["sql", "sql"]
    states = submit(session, inbox, "b")
    wait_for(inbox, states)
    assert submitted(last) == [("b", "")]


def test_an_adapter_that_one_core_could_not_load_at_first_is_not_kept(
    cores: Cores, registry: Registry, sql: LoRARequest
) -> None:
    first, second = cores.new(), cores.new()
    session = cores.open(first, second)
    registry.broken.add(second)
    with pytest.raises(ValueError, match="its rank is 99"):
        session.add_lora(sql).result(PATIENCE)
    third = cores.new()
    cores.fleet.add(third)
    assert not registry.names(third)
    registry.broken.clear()
    assert session.add_lora(sql).result(PATIENCE) is True
    assert [registry.names(address) for address in (first, second, third)] == [["sql"] * 2, ["sql"], ["sql"]]
