"""The short names of models."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagewire.ipc.files.names import short_name
from pagewire.ipc.options.engine_args import EngineArgs


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("demo", "demo"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("models/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct.Q4_1"),
        ("owner/repository/big-00002-of-00003.gguf", "big"),
        ("s3://bucket/folder/tiny", "tiny"),
        (".gguf", ".gguf"),
    ],
)
def test_names_of_what_is_no_folder(model: str, name: str) -> None:
    assert short_name(model) == name
    assert EngineArgs(model=model).served_names() == [name]


def test_names_of_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--owner--some--model" / "snapshots" / "0123abcd"
    for folder in (tmp_path / "tiny.v2", snapshot):
        folder.mkdir(parents=True)
    assert short_name(f"{tmp_path}/tiny.v2/") == "tiny.v2"
    assert short_name(str(snapshot)) == "owner/some--model"
    monkeypatch.chdir(tmp_path / "tiny.v2")
    assert short_name(".") == "tiny.v2"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert short_name("~/tiny.v2") == "tiny.v2"
    assert short_name("/") == "/"
