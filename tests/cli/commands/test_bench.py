"""`pagewire bench latency` with speculation: measured without it, then with it."""

from __future__ import annotations

import argparse
import json

import pytest

from pagewire.cli.commands import bench
from pagewire.cli.console.options import engine_args
from pagewire.cli.main import main

FLAGS = ["--speculative-model", "[ngram]", "--num-speculative-tokens", "3"]


@pytest.mark.parametrize("options", [FLAGS, ["--speculative-config", '{"method": "suffix"}']])
def test_bench_compares_with_and_without_speculation(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = []

    def medians(options: argparse.Namespace) -> dict[str, float]:
        measured.append(engine_args(options).resolved_speculation())
        return {"tpot_ms": 10.0 if measured[-1] is None else 4.0}

    monkeypatch.setattr(bench, "medians", medians)
    assert main(["bench", "latency", "--json", *options]) == 0
    assert measured[0] is None and measured[1] is not None and len(measured) == 2
    assert json.loads(capsys.readouterr().out) == {
        "median": {"tpot_ms": 4.0},
        "median_without_speculation": {"tpot_ms": 10.0},
        "speculation_gain": 2.5,
    }


def test_bench_measures_once_without_speculation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "medians", lambda options: {"tpot_ms": 1.0})
    assert main(["bench", "latency", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"median": {"tpot_ms": 1.0}}


def test_bench_prints_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"seconds": 1.5, "output_tokens_per_s": 12345.678, "ttft_ms": 9.0, "tpot_ms": 4.0}
    monkeypatch.setattr(bench, "medians", lambda options: figures)
    assert main(["bench", "throughput"]) == 0
    assert capsys.readouterr().out.split() == ["median", "1.50", "12,345.68", "9.00", "4.00"]
    assert main(["bench", "latency", *FLAGS]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "speculation: 1 times the speed"
