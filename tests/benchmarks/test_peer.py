"""A model beside transformers' continuous batching: figures of both, and errors of the peer that are only named."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module; its process finds the benchmarks as it does in the checkout."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.chdir(ROOT)
    return importlib.import_module("benchmarks.gpu.peer")


@pytest.fixture
def work(peer: Any) -> Any:
    return peer.Work(3, 8, 4)


def write(folder: Path, **changed: Any) -> Path:
    """The configuration of a tiny model."""
    models = importlib.import_module("benchmarks.gpu.models")
    (folder / "config.json").write_text(json.dumps(models.sizes_of("llama-3.2-1b", is_gpu=False) | changed))
    return folder


@pytest.mark.peers
def test_the_peer_runs_the_same_prompts(peer: Any, work: Any, tmp_path: Path) -> None:
    figures = peer.in_process(write(tmp_path), work, "cpu")
    assert "error" not in figures, figures
    assert figures["tokens_per_s"] > 0 < figures["first_s"]
    assert figures["attention"] and figures["transformers"]


@pytest.mark.peers
@pytest.mark.parametrize(
    ("changed", "limit", "error"),
    [
        ({}, 0.1, r"not done after 0 s"),
        ({"model_type": "no such type"}, 90, r"\bno such type\b"),
        ({"vocab_size": 5}, 90, "0 of 3 requests got their tokens .*out of range"),
    ],
    ids=["slow", "unknown model", "tokens that the model lacks"],
)
def test_what_the_peer_cannot_do_is_named(
    peer: Any, work: Any, tmp_path: Path, changed: dict[str, Any], limit: float, error: str
) -> None:
    figures = peer.in_process(write(tmp_path, **changed), work, "cpu", limit)
    assert set(figures) == {"error"} and re.search(error, figures["error"]), figures


@pytest.mark.parametrize(
    ("theirs", "ratio"),
    [({"tokens_per_s": 6.0}, 0.5), ({"error": "it has none"}, None)],
    ids=["both", "ours"],
)
def test_the_ratio_is_of_tokens_per_second(
    peer: Any, work: Any, monkeypatch: pytest.MonkeyPatch, theirs: dict[str, Any], ratio: float | None
) -> None:
    """Ours makes 12 tokens in 4 seconds; its first run does not count."""
    seconds = iter([100.0, 4.0])
    run: Callable[..., dict[str, float]] = lambda *_, **__: {"seconds": next(seconds)}  # noqa: E731
    engine = SimpleNamespace(run=run, close=lambda: None)
    monkeypatch.setattr(peer, "Pagewire", lambda *_: engine)
    monkeypatch.setattr(peer, "in_process", lambda *_: theirs)
    report = peer.compare({}, work, "cpu")
    assert (report["tokens_per_s"], report.get("ratio"), report["generate_batch"]) == (3.0, ratio, theirs)
