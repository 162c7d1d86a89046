"""A core that cannot start: every way to use one raises the error that it had, of its own type."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from pagewire import LLM, AsyncLLM, EngineArgs, LLMEngine, ModelNotFoundError

NOWHERE = "/nowhere/protocol/model"
SPAWN: dict[str, Callable[..., Any]] = {
    "LLM": LLM,
    "LLMEngine": lambda model, **options: LLMEngine.from_engine_args(EngineArgs(model, **options)),
    "AsyncLLM": lambda model, **options: AsyncLLM.from_engine_args(EngineArgs(model, **options)),
}
ATTACH: dict[str, Callable[..., Any]] = {
    "LLM": LLM.attach,
    "LLMEngine": LLMEngine.attach,
    "AsyncLLM": AsyncLLM.attach,
}


@pytest.fixture
def foreign_model(tmp_path: Path) -> str:
    """A model folder that the core can read, and that no worker can load."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of_the_protocol"}))
    return str(tmp_path)


@pytest.mark.parametrize("name", SPAWN)
def test_a_missing_model(name: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        SPAWN[name](NOWHERE)
    assert str(caught.value) == f"no model folder {NOWHERE}"


def test_a_model_that_the_worker_cannot_load(foreign_model: str) -> None:
    with pytest.raises(ValueError, match=r"it holds neither model.safetensors nor") as caught:
        LLM(foreign_model)
    assert type(caught.value) is ValueError


@pytest.mark.parametrize("name", ATTACH)
def test_attaching_to_a_core_that_fails_to_start(name: str, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/core.sock"
    errors: list[Exception] = []

    def attach() -> None:
        try:
            ATTACH[name](address, timeout=60)
        except Exception as error:
            errors.append(error)

    thread = Thread(target=attach)
    thread.start()
    command = [sys.executable, "-m", "pagewire.cli.main", "core", "--model", NOWHERE, "--listen", address]
    core = subprocess.run(command, capture_output=True, text=True, timeout=60)
    thread.join(60)
    assert core.returncode == 1
    assert [(type(error), str(error)) for error in errors] == [
        (ModelNotFoundError, f"no model folder {NOWHERE}")
    ]


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ([NOWHERE], f"no model folder {NOWHERE}"),
        (
            ["demo", "--max-model-len", "100000"],
            "max_model_len 100000 exceeds the model's limit of 1024 positions",
        ),
        (["FOREIGN"], "it holds neither model.safetensors nor"),
    ],
)
def test_the_server_says_the_cause_once(options: list[str], cause: str, foreign_model: str) -> None:
    options = [foreign_model if option == "FOREIGN" else option for option in options]
    command = [sys.executable, "-m", "pagewire.cli.main", "serve", "--port", "0", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "") and "Traceback" not in done.stderr
    (said,) = (line for line in done.stderr.splitlines() if cause in line)
    assert said.startswith("pagewire serve: ")
