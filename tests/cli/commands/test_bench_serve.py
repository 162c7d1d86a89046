"""`pagewire bench serve` against a server that keeps what it was sent."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from pagewire.cli.console.options import UsageError
from pagewire.cli.load.client import LoadResult, arrivals
from pagewire.cli.load.prompts import LengthRange
from pagewire.cli.load.report import distribution, percentile, summary
from pagewire.cli.load.sharegpt import conversations
from pagewire.cli.main import main
from tests.cli.fake_server import KEY, FakeServer, fake_server, prompt_of


def measure(server: FakeServer, tmp_path: Path, *options: str) -> dict[str, Any]:
    """Run the command on a server; what it wrote."""
    path = tmp_path / "figures.json"
    with fake_server(server) as port:
        common = ["--port", str(port), "--api-key", KEY, "--no-progress", "--json", str(path), "--details"]
        assert main(["bench", "serve", *common, *options]) == 0
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def test_closed_loop_keeps_exactly_so_many_requests_going(tmp_path: Path) -> None:
    server = FakeServer(gather=4)
    figures = measure(
        server,
        tmp_path,
        "--concurrency",
        "4",
        "--num-prompts",
        "30",
        "--num-warmups",
        "0",
        "--output-len",
        "5",
    )
    assert server.most_running == 4
    assert (figures["completed"], figures["failed"], figures["errors"]) == (30, 0, {})
    assert (figures["input_tokens"], figures["output_tokens"]) == (30 * 128, 30 * 5)
    assert figures["output_tokens_per_s"] == pytest.approx(150 / figures["seconds"], rel=1e-3)
    for request in figures["requests"]:
        assert 0 < request["ttft"] <= request["last"] <= request["e2e"] <= figures["seconds"]
        assert len(request["gaps"]) == 4  # the first chunk, without text, is none
        assert sum(request["gaps"]) == pytest.approx(request["last"] - request["ttft"])


def test_a_profile_covers_the_measurement(tmp_path: Path) -> None:
    server = FakeServer()
    measure(server, tmp_path, "--profile", "--num-prompts", "5", "--num-warmups", "2")
    assert server.profiled == [("/start_profile", 2), ("/stop_profile", 7)]


def test_prompts_follow_the_seed_and_the_lengths(tmp_path: Path) -> None:
    options = ["--input-len", "3:9", "--output-len", "2:4", "--prefix-len", "2", "--num-prompts", "40"]
    options += ["--num-warmups", "3", "--ignore-eos", "--extra-body", '{"top_k": 5}']
    servers = [FakeServer() for _ in range(3)]
    for server, seed in zip(servers, ("7", "7", "8"), strict=True):
        measure(server, tmp_path, *options, "--seed", seed, "--concurrency", "1")
    for server in servers:
        server.bodies[:3] = sorted(server.bodies[:3], key=str)  # warm-ups come all at once
    assert servers[0].bodies == servers[1].bodies != servers[2].bodies
    bodies = servers[0].bodies
    assert len(bodies) == 43
    assert {len(body["prompt"]) for body in bodies[3:]} == set(range(3, 10))
    assert {body["max_tokens"] for body in bodies[3:]} == {2, 3, 4}
    assert len({tuple(body["prompt"][:2]) for body in bodies}) == 1
    assert len({tuple(body["prompt"][2:]) for body in bodies}) > 30
    assert bodies[0] == bodies[0] | {
        "model": "fake",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "ignore_eos": True,
        "top_k": 5,
    }


def test_chat_over_a_unix_socket_with_pieces_of_a_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, server, uds = tmp_path / "text.txt", FakeServer(), f"{tmp_path}/server.sock"
    text.write_text("abcdefghijklmnopqrstuvwxyz", encoding="utf-8")
    options = ["--api", "chat", "--uds", uds, "--text-file", str(text), "--input-len", "4", "--api-key", KEY]
    with fake_server(server, uds):
        assert (
            main(["bench", "serve", *options, "--num-prompts", "6", "--output-len", "3", "--json", "-"]) == 0
        )
    figures = json.loads(capsys.readouterr().out)
    assert (figures["completed"], figures["input_tokens"], figures["output_tokens"]) == (6, 24, 18)
    assert KEY not in json.dumps(figures)
    prompts = [prompt_of(body) for body in server.bodies]
    assert all(len(prompt) == 4 and prompt in text.read_text() for prompt in prompts)
    assert len(set(prompts)) > 1


def test_prompts_from_files(tmp_path: Path) -> None:
    lines, objects = tmp_path / "p.txt", tmp_path / "p.jsonl"
    lines.write_text("one\n\ntwo\n", encoding="utf-8")
    objects.write_text('{"prompt": "one"}\n{"prompt": "two"}\n', encoding="utf-8")
    for path in (lines, objects):
        server = FakeServer()
        options = ["--num-prompts", "3", "--num-warmups", "0", "--concurrency", "1"]
        measure(server, tmp_path, "--prompt-file", str(path), *options)
        assert [body["prompt"] for body in server.bodies] == ["one", "two", "one"]


def test_conversations_in_sharegpts_format(tmp_path: Path) -> None:
    """Their first turns are the prompts, and outputs have as many tokens as the second ones."""
    turns = [("a question", "an answer"), ("two turns", "are taken"), ("too short", "no"), ("one turn",)]
    turns += [("long" * 500, "answer"), ("a question?", "x" * 2040)]
    path, server = tmp_path / "sharegpt.json", FakeServer()
    path.write_text(json.dumps([{"conversations": [{"value": text} for text in pair]} for pair in turns]))
    options = ["--dataset-name", "sharegpt", "--dataset-path", str(path), "--num-prompts", "4"]
    measure(server, tmp_path, *options, "--num-warmups", "0", "--concurrency", "1")
    asked = [(body["prompt"], body["max_tokens"]) for body in server.bodies]
    assert asked[:2] == asked[2:] and sorted(asked[:2]) == [("a question", 9), ("two turns", 9)]
    for text, message in (
        ("[]", "no conversation"),
        ("[1]", "ShareGPT's format"),
        ("{", "ShareGPT's format"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=message):
            asyncio.run(conversations(path, 1, 0, nothing))


async def nothing(text: str) -> list[int]:
    return []


def test_errors_are_counted_by_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {1: "busy", 2: "busy", 3: "drop", 4: "error", 5: "garbage"}
    options = ["--num-prompts", "8", "--num-warmups", "0", "--concurrency", "1", "--output-len", "4"]
    figures = measure(FakeServer(misbehave=wrong), tmp_path, *options)
    assert (figures["completed"], figures["failed"], figures["output_tokens"]) == (3, 5, 12)
    assert figures["errors"] == {
        "HTTP 429": 2,
        "disconnected": 1,
        "error in stream": 1,
        "malformed chunk": 1,
    }
    printed = capsys.readouterr().out
    assert "2 x HTTP 429: try later" in printed
    assert "lost the core" in printed


def test_a_server_that_is_not_there_or_refuses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "serve", "--uds", f"{tmp_path}/none"]) == 1
    assert "/v1/models" in capsys.readouterr().err
    with fake_server(FakeServer()) as port:
        assert main(["bench", "serve", "--port", str(port), "--api-key", "wrong"]) == 1
        assert "401: no such key" in capsys.readouterr().err
        busy = ["--port", str(port), "--model", "fake", "--timeout", "0.05", "--no-progress"]
        with fake_server(FakeServer(gather=99)) as silent:
            busy[1] = str(silent)
            assert main(["bench", "serve", *busy, "--num-prompts", "2", "--num-warmups", "0"]) == 1
    assert "2 x timeout" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--input-len", "9:3"], "LOW <= HIGH"),
        (["--input-len", "few"], "--input-len"),
        (["--request-rate", "0"], "must be over 0"),
        (["--burstiness", "nan"], "must be over 0"),
        (["--extra-body", "[]"], "JSON object"),
        (["--text-file", "a", "--prompt-file", "b"], "not both"),
        (["--dataset-name", "sharegpt"], "go together"),
        (["--dataset-path", "a"], "go together"),
    ],
)
def test_mistakes_are_reported(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["bench", "serve", *options])
    except SystemExit as end:
        assert isinstance(end.code, int)
        status = end.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_arrivals_have_the_rate_and_the_burstiness() -> None:
    def gaps(burstiness: float) -> list[float]:
        due = list(arrivals(20_000, 50.0, burstiness, seed=1))
        assert due[0] == 0
        return [b - a for a, b in itertools.pairwise(due)]

    for burstiness in (0.25, 1.0, 4.0):
        figures = gaps(burstiness)
        assert statistics.mean(figures) == pytest.approx(1 / 50, rel=0.05)
        variation = statistics.stdev(figures) / statistics.mean(figures)
        assert variation == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)
    assert set(arrivals(5, math.inf, 1.0, seed=1)) == {0.0}


def test_figures() -> None:
    assert [percentile([1, 2, 3, 4, 5], share) for share in (0, 50, 90, 100)] == [1, 3, 4.6, 5]
    assert percentile([7], 99) == 7
    assert distribution([]) == {}
    assert distribution([0.004, 0.001, 0.003, 0.002]) == {"mean": 2.5, "median": 2.5, "p90": 3.7, "p99": 3.97}
    good = LoadResult(ttft=0.1, last=0.5, e2e=0.6, gaps=[0.1, 0.3], input_tokens=10, output_tokens=5)
    bad = LoadResult(ttft=0.1, error="timeout", output_tokens=3)
    figures = summary([good, bad], 2.0)
    assert figures["tpot_ms"]["mean"] == 100  # 0.4 seconds for four tokens, in three chunks
    assert figures["itl_ms"]["mean"] == 200
    assert (figures["output_tokens"], figures["requests_per_s"], figures["total_tokens_per_s"]) == (
        5,
        0.5,
        7.5,
    )
    assert LoadResult(output_tokens=1).tpot is None


def test_spans() -> None:
    assert LengthRange.parse("5") == LengthRange(5, 5)
    assert LengthRange.parse("5:9") == LengthRange(5, 9)
    assert (str(LengthRange(5, 5)), str(LengthRange(5, 9))) == ("5", "5:9")
    for text in ("0", "-1:4", "9:5", "", ":", "1:2:3"):
        with pytest.raises(ValueError):
            LengthRange.parse(text)
