"""A real GGUF file that is pulled from a hub on loopback, served by its name, and loaded smaller by `--fit`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagewire.cli.console.models_on_demand import estimated
from pagewire.ipc.options.engine_args import EngineArgs
from tests.end_to_end.http_server import Server
from tests.end_to_end.test_gguf import FOLDER
from tests.ipc.files.stores import HubHandler, Store

PROMPT = {"prompt": "The history of the printing press", "max_tokens": 16, "temperature": 0}
SMALL = ("--dtype", "float32", "--kv-cache-memory-bytes", str(512 << 20))
OFFLINE = {"HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def model_file() -> Path:
    """SmolLM2-135M-Instruct, Q4_1."""
    files = sorted(FOLDER.glob("*.gguf"))
    if not files:
        pytest.skip("`make build/smollm2` downloads the model")
    return files[0]


@pytest.fixture
def hub(model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A hub that has the file; the processes that a test starts ask it."""
    files = {"smol/gguf/SmolLM2-Q4_1.gguf": model_file.read_bytes(), "smol/gguf/README.md": b"text"}
    with Store(files).serving(HubHandler) as store:
        monkeypatch.setenv("HF_ENDPOINT", store.address)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
        monkeypatch.setenv("PAGEWIRE_PULLED_DIR", str(tmp_path / "pulled"))
        yield store


def command(*words: str) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-m", "pagewire.cli.main", *words]
    return subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ
    )


def said(*words: str) -> str:
    process = command(*words)
    text, _ = process.communicate()
    assert process.returncode == 0, text
    return text


def completed(server: Server, model: str) -> Any:
    status, answer = server.request("POST", "/v1/completions", PROMPT | {"model": model})
    assert status == 200, answer
    return answer["choices"][0]["text"]


def test_a_killed_pull_goes_on_and_the_model_is_served_by_its_name(
    hub: Store, model_file: Path, tmp_path: Path
) -> None:
    gate = threading.Event()
    hub.gates = [(20_000_000, gate)]
    process = command("pull", "hf:smol/gguf")
    parts = tmp_path / "pulled"
    while not any(path.stat().st_size > 10_000_000 for path in parts.rglob("*.part")):
        assert process.poll() is None
    process.kill()
    process.communicate()
    gate.set()
    assert "hf:smol/gguf:Q4_1 is there" in said("pull", "hf.co/smol/gguf:q4_1")
    assert [first > 10_000_000 for _, first in hub.reads] == [False, True]
    assert "hf:smol/gguf:Q4_1" in said("list")
    assert "GGUF" in said("inspect", "hf:smol/gguf", *SMALL)
    also = {"model": str(model_file), "dtype": "float32", "kv_cache_memory_bytes": 512 << 20}
    server = Server(
        tmp_path, "hf:smol/gguf", "--also", json.dumps(also), *SMALL, "--port", "0", environment=OFFLINE
    )
    try:
        text = completed(server, "hf:smol/gguf")
        assert text and text == completed(server, model_file.name.removesuffix(".gguf"))
    finally:
        assert server.stop() == 0
    said("rm", "hf:smol/gguf")
    assert not list(parts.rglob("*.gguf"))


def test_a_model_is_loaded_smaller(model_file: Path, tmp_path: Path) -> None:
    """The first memory in which it can be loaded at all leaves no room for its whole context."""
    args = EngineArgs(model=str(model_file), device="cpu", dtype="float32", weight_cache=False)
    memory = next(
        memory
        for memory in range(256 << 20, 8 << 30, 64 << 20)
        if estimated(memory, True, args).problem is None
    )
    estimate = estimated(memory, True, args)
    assert estimate.changes is not None and estimate.need <= memory
    tokens = estimate.changes["max_model_len"]
    assert 1024 <= tokens < 8192 and estimated(memory, False, args).problem is not None
    size = f"{memory >> 20}MiB"
    options = ("--fit", "--models-memory", size, "--dtype", "float32", "--no-weight-cache")
    server = Server(tmp_path, str(model_file), *options, "--port", "0")
    try:
        assert completed(server, model_file.name.removesuffix(".gguf"))
        _, answer = server.request("GET", "/v1/models")
        (card,) = answer["data"]
        assert card["max_model_len"] == tokens and card["fitted"].startswith(f"max_model_len {tokens}: ")
        server.wait_for_log(f"fitted {card['fitted']}")
    finally:
        assert server.stop() == 0
    server = Server(tmp_path, str(model_file), *options, "--max-model-len", "8192", "--port", "0")
    try:
        status, answer = server.request("POST", "/v1/completions", PROMPT)
        assert status == 503 and "a request of max_model_len 8192 takes" in answer["error"]["message"]
    finally:
        assert server.stop() == 0
