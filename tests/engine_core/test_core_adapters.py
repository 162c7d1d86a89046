"""Adapters in a whole core: who waits for one, who does not, and what becomes of them when a worker is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from pagewire.engine_core.clients.access import Access
from pagewire.ipc.errors import AdapterCrashedWorkerError
from pagewire.ipc.wire.lora import AdapterSource
from tests.engine_core.conftest import RawFrontend, RunningCore
from tests.engine_core.fake_worker import next_token

Start = Callable[..., RunningCore]
BASE = b""


def roll_out(prompt: list[int], count: int, adapter: bytes, seed: int = 7) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed, adapter))
    return tokens[len(prompt) :]


class Folder:
    """The folder of an adapter for the fake worker."""

    def __init__(self, path: Path, number: int, **fields: Any) -> None:
        self.path, self.number = path, number
        path.mkdir(exist_ok=True)
        self.write(**fields)

    def write(self, **fields: Any) -> None:
        """Replace the adapter."""
        text = json.dumps(fields).encode()
        (self.path / "adapter_config.json").write_bytes(text)
        self.content = sha256(text).digest()

    def source(self, name: str = "", version: str = "") -> AdapterSource:
        return AdapterSource(name or f"a{self.number}", self.number, str(self.path), version)


@pytest.fixture
def new(tmp_path: Path) -> Callable[..., Folder]:
    """Makes adapters: `new(1, rank=8)`."""
    return lambda number, **fields: Folder(tmp_path / f"adapter{number}", number, **fields)


@pytest.fixture
def start(start_core: Start, tmp_path: Path) -> Callable[..., tuple[RunningCore, RawFrontend]]:
    """Starts a core that serves adapters, and attaches to it as its own user."""

    def begin(rights: str | None = None, **options: Any) -> tuple[RunningCore, RawFrontend]:
        file = None
        if rights is not None:
            file = tmp_path / "rights.yaml"
            file.write_text(rights)
            file.chmod(0o600)
        core = start_core(access=Access(rights=file), **{"enable_lora": True, "max_loras": 2} | options)
        frontend = core.frontend()
        frontend.attach()
        return core, frontend

    return begin


def num_loaded(frontend: RawFrontend) -> int:
    """How many adapters the worker has."""
    return int(frontend.call("collective_rpc", "num_adapters").result[0])


def finish_loads(frontend: RawFrontend) -> int:
    """Let the worker answer its slow loads; how many these were."""
    return int(frontend.call("collective_rpc", "finish_loads").result[0])


def test_rows_run_with_their_adapters_and_others_do_not_wait_for_a_cold_one(
    start: Callable[..., Any], new: Callable[..., Folder]
) -> None:
    _, frontend = start()
    cold, quick = new(1, slow=True), new(2)
    frontend.submit(1, [1, 2], adapter=cold.source())
    frontend.submit(2, [1, 2])
    frontend.submit(3, [1, 2], adapter=quick.source())
    frontend.finish((2, 0), (3, 0))
    assert (1, 0) not in frontend.outputs and frontend.status()["waiting"] == 1
    assert finish_loads(frontend) == 1
    frontend.submit(4, [1, 2], adapter=cold.source())
    frontend.finish((1, 0), (4, 0))
    for key, content in ((1, cold.content), (2, BASE), (3, quick.content), (4, cold.content)):
        assert frontend.outputs[key, 0] == roll_out([1, 2], 8, content)
    rows = {row["name"]: row for row in frontend.call("metrics").result}
    assert rows["vllm:lora_requests_info"]["labels"]["max_lora"] == "2"
    assert rows["pagewire:adapters_resident"]["value"] == rows["pagewire:adapter_loads_total"]["value"] == 2


def test_an_adapter_that_cannot_be_read_ends_its_requests_alone(
    start: Callable[..., Any], new: Callable[..., Folder]
) -> None:
    _, frontend = start()
    missing = AdapterSource("gone", 9, "/no/such/folder")
    frontend.submit(1, [1, 2], adapter=missing, n=2)
    frontend.submit(2, [1, 2], adapter=new(1).source())
    frontend.submit(3, [1, 2])
    frontend.finish((1, 0), (1, 1), (2, 0), (3, 0))
    for index in (0, 1):
        end = frontend.ends[1, index]
        assert (end.finish_reason, end.error_type) == ("error", "ValueError")
        assert end.error is not None and end.error.startswith("adapter 'gone': cannot read it")
    assert frontend.ends[2, 0].finish_reason == frontend.ends[3, 0].finish_reason == "length"


@pytest.mark.parametrize("event", ["crash", "hang"])
def test_an_adapter_that_workers_do_not_return_from_is_refused_after_two(
    start: Callable[..., Any], new: Callable[..., Folder], monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    monkeypatch.setattr("pagewire.engine_core.calls.health.FRESH_SECONDS", 0.0)
    monkeypatch.setattr("pagewire.engine_core.core.TICK_SECONDS", 0.1)
    monkeypatch.setenv("PAGEWIRE_ENGINE_ITERATION_TIMEOUT_S", "0.5")
    core, frontend = start()
    bad, good = new(1, **{event: True}), new(2)
    frontend.submit(1, [1, 2], adapter=good.source(), max_tokens=100)
    answer = frontend.call("register_adapter", "a1", 1, str(bad.path))
    assert answer.error_type == "AdapterCrashedWorkerError"
    assert "adapter 'a1': 2 workers were lost while they read it" in str(answer.error)
    frontend.submit(2, [1, 2], adapter=bad.source())
    frontend.submit(3, [1, 2])
    frontend.finish((1, 0), (2, 0), (3, 0))
    assert frontend.ends[2, 0].error_type == "AdapterCrashedWorkerError"
    assert frontend.outputs[1, 0] == roll_out([1, 2], 100, good.content)
    assert core.workers.num_starts == 3 and frontend.call("list_loras").result == [2]


def test_blocks_are_shared_by_content_and_never_with_a_replaced_file(
    start: Callable[..., Any], new: Callable[..., Folder], tmp_path: Path
) -> None:
    _, frontend = start(max_loras=4)
    prompt = [5] * 40
    adapter = new(1)
    frontend.submit(1, prompt, adapter=adapter.source())
    frontend.finish((1, 0))
    shutil.copytree(adapter.path, tmp_path / "copy")
    copy = AdapterSource("copy", 2, str(tmp_path / "copy"))
    frontend.submit(2, prompt, adapter=copy)
    frontend.submit(3, prompt)
    adapter.write(rank=16)
    frontend.submit(4, prompt, adapter=adapter.source(version="2"))
    frontend.finish((2, 0), (3, 0), (4, 0))
    cached = [frontend.ends[key, 0].num_cached_tokens for key in (1, 2, 3, 4)]
    assert cached == [0, 32, 0, 0]
    assert frontend.outputs[4, 0] == roll_out(prompt, 8, adapter.content) != frontend.outputs[2, 0]
    assert frontend.ends[4, 0].adapter == adapter.content


def test_a_killed_worker_loads_what_is_needed_again(
    start: Callable[..., Any], new: Callable[..., Folder]
) -> None:
    core, frontend = start(max_loras=3)
    kept, lost = new(1), new(2)
    frontend.submit(1, [1, 2], adapter=kept.source(), max_tokens=100)
    frontend.submit(2, [1, 2], adapter=lost.source(), max_tokens=100)
    frontend.submit(3, [1, 2], max_tokens=100)
    while not all(frontend.outputs.get((key, 0)) for key in (1, 2, 3)):
        frontend.take(frontend.hear())
    lost.write(rank=16)
    os.kill(core.workers.pids[0], signal.SIGKILL)
    frontend.finish((1, 0), (2, 0), (3, 0))
    assert frontend.outputs[1, 0] == roll_out([1, 2], 100, kept.content)
    assert frontend.outputs[3, 0] == roll_out([1, 2], 100, BASE)
    end = frontend.ends[2, 0]
    if end.finish_reason == "error":  # it may have ended before the worker did
        assert end.error_type == "ValueError" and "replaced" in str(end.error)
    frontend.wait_for_start(2)


def test_an_unloaded_adapter_finishes_its_requests(
    start: Callable[..., Any], new: Callable[..., Folder]
) -> None:
    _, frontend = start()
    adapter = new(1)
    source = adapter.source("mine")
    fields = (source.name, source.adapter_id, source.path, source.version)
    assert frontend.call("register_adapter", *fields).result is True
    assert frontend.call("list_loras").result == [1]
    assert frontend.call("pin_lora", 1).result is True
    (entry,) = frontend.call("adapters").result
    assert (entry["name"], entry["resident"], entry["rank"]) == ("mine", True, 8)
    frontend.submit(1, [1, 2], adapter=AdapterSource("mine", 1), max_tokens=100)
    assert frontend.call("remove_lora", 1).result is True
    frontend.submit(2, [1, 2], adapter=AdapterSource("mine", 1))
    frontend.finish((1, 0), (2, 0))
    assert frontend.outputs[1, 0] == roll_out([1, 2], 100, adapter.content)
    assert frontend.ends[2, 0].error == "no adapter is registered as 'mine': add it, or give its path"
    assert frontend.call("remove_lora", 1).result is False
    while num_loaded(frontend):  # until the last step with it is over
        pass


def test_only_the_engines_own_user_with_the_right_control_may_name_paths(
    start: Callable[..., Any], new: Callable[..., Folder]
) -> None:
    _, frontend = start(rights=f"uid:{os.geteuid()}: [generate, read]")
    source = new(1).source()
    frontend.submit(1, [1, 2], adapter=source)
    frontend.finish((1, 0))
    assert frontend.ends[1, 0].error_type == "PermissionError"
    assert "needs the right 'control'" in str(frontend.call("register_adapter", "a", 1, source.path).error)


def test_an_engine_without_adapters_says_so(start: Callable[..., Any], new: Callable[..., Folder]) -> None:
    _, frontend = start(enable_lora=False, max_loras=1)
    frontend.submit(1, [1, 2], adapter=new(1).source())
    frontend.finish((1, 0))
    assert frontend.ends[1, 0].error == "this engine serves no adapters: start it with enable_lora"
    answer = frontend.call("list_loras")
    assert answer.error_type == "ValueError" and "enable_lora" in str(answer.error)


def test_the_bytes_of_all_ranks_count(start: Callable[..., Any], new: Callable[..., Folder]) -> None:
    _, frontend = start(num_workers=2, max_lora_bytes=150)
    frontend.submit(1, [1, 2], adapter=new(1).source())
    frontend.submit(2, [1, 2])
    frontend.finish((1, 0), (2, 0))
    assert "takes 200 bytes" in str(frontend.ends[1, 0].error)
    assert frontend.call("collective_rpc", "num_adapters").result == [0, 0]


def test_an_adapter_is_on_all_ranks_or_on_none(start: Callable[..., Any], new: Callable[..., Folder]) -> None:
    _, frontend = start(num_workers=2, worker_options=["--fail", "1", "load_adapter"])
    frontend.submit(1, [1, 2], adapter=new(1).source())
    frontend.submit(2, [1, 2])
    frontend.finish((1, 0), (2, 0))
    assert str(frontend.ends[1, 0].error).endswith("adapter 'a1': no such folder (rank 1)")
    assert frontend.outputs[2, 0] == roll_out([1, 2], 8, BASE)
    assert frontend.call("collective_rpc", "num_adapters").result == [0, 0]


def test_the_adapter_that_the_engine_starts_with_is_pinned_or_ends_it(
    start_core: Start, new: Callable[..., Folder]
) -> None:
    adapter = new(1)
    core = start_core(access=Access(), enable_lora=True, first_adapter=adapter.source("qlora"))
    frontend = core.frontend()
    frontend.attach()
    while not any(entry["pinned"] for entry in frontend.call("adapters").result):
        pass  # it is being read
    frontend.submit(1, [1, 2], adapter=AdapterSource("qlora", 1))
    frontend.finish((1, 0))
    assert frontend.outputs[1, 0] == roll_out([1, 2], 8, adapter.content)
    adapter.write(error="its rank is 99")
    broken = start_core(access=Access(), enable_lora=True, first_adapter=adapter.source("qlora"))
    broken.thread.join(20)
    assert "adapter 'qlora': its rank is 99" in str(broken.error)
    adapter.write(crash=True)
    broken = start_core(access=Access(), enable_lora=True, first_adapter=adapter.source("qlora"))
    broken.thread.join(20)
    assert isinstance(broken.error, AdapterCrashedWorkerError)
