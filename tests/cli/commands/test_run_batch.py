"""`pagewire run-batch` on a real core."""

from __future__ import annotations

import asyncio
import json
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from pagewire import LLM, SamplingParams
from pagewire.cli.main import main
from tests.cli.command import pagewire, start, start_core

PROMPTS = [f"The {word} is" for word in ("list", "tuple", "module", "class", "object", "statement")]


def request(custom_id: str, body: dict[str, Any], url: str = "/v1/completions") -> str:
    """A line of the input."""
    body = {"model": "demo", "temperature": 0, "max_tokens": 8} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n"


LINES = "".join(
    [
        *(request(f"r{i}", {"prompt": prompt}) for i, prompt in enumerate(PROMPTS)),
        request("chat", {"messages": [{"role": "user", "content": "Hello"}]}, "/v1/chat/completions"),
        request("bad", {"prompt": "a", "temperature": -1}),
        request("other", {"prompt": "a", "model": "none"}),
        "no JSON\n",
    ]
)


def check(output: str, address: str) -> None:
    """All lines of `LINES` have the answers they should have."""
    results = {line["custom_id"]: line for line in map(json.loads, output.splitlines())}
    assert len(results) == len(output.splitlines()) == len(PROMPTS) + 4
    with LLM.attach(address) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8)
        expected = [one.outputs[0].text for one in llm.generate(PROMPTS, params, use_tqdm=False)]
    for index, text in enumerate(expected):
        response = results[f"r{index}"]["response"]
        assert response["status_code"] == 200
        assert response["body"]["choices"][0]["text"] == text
        assert response["request_id"]
    chat = results["chat"]["response"]["body"]
    assert chat["object"] == "chat.completion" and chat["choices"][0]["message"]["content"]
    for name, status, param in (("bad", 400, "temperature"), ("other", 404, "model")):
        assert results[name]["error"] is None
        assert results[name]["response"]["status_code"] == status
        assert results[name]["response"]["body"]["error"]["param"] == param
    assert results[None]["response"] is None
    assert results[None]["error"]["code"] == "invalid_json_line"
    assert results[None]["error"]["message"].startswith("line 10: not a valid request")


def test_files_and_resuming(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(LINES)
    command = ["run-batch", "--attach", address, "-i", str(source), "-o", str(target), "--no-progress"]
    assert main(command) == 1
    check(target.read_text(), address)
    assert "7 answered, 3 failed" in capsys.readouterr().err
    whole = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(b"".join(whole[:4]) + whole[4][:30])
    kept = sum(b'"status_code":200' in line for line in whole[:4])
    assert main([*command, "--resume", "--concurrency", "2"]) == 1
    check(target.read_text(), address)
    assert f"{7 - kept} answered, 3 failed, {kept} already answered" in capsys.readouterr().err


def test_a_full_disk_ends_the_run_and_leaves_whole_lines(address: str, tmp_path: Path) -> None:
    """No file may become larger than a limit. The run goes on once it is lifted."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(LINES)
    command = ("run-batch", "--attach", address, "-i", str(source), "--no-progress")
    limit = (1500, resource.RLIM_INFINITY)
    batch = start(
        *command, "-o", str(target), preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    )
    _, messages = batch.communicate(timeout=60)
    whole = target.read_text()
    num_whole = len(whole.splitlines())
    assert batch.returncode == 1 and "Traceback" not in messages
    assert f"cannot write to {target}: File too large: {num_whole} results of this run are in it" in messages
    assert num_whole > 0 and whole.endswith("\n") and [json.loads(line) for line in whole.splitlines()]
    assert main([*command, "-o", str(target), "--resume"]) == 1
    check(target.read_text(), address)
    done = pagewire(*command, "-o", "/dev/full")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "cannot write to /dev/full: No space left on device: 0 results" in done.stderr


def test_standard_input_and_output(address: str) -> None:
    done = pagewire("run-batch", "--attach", address, "-i", "-", "-o", "-", stdin=LINES)
    assert done.returncode == 1
    assert "10/10" in done.stderr
    check(done.stdout, address)


def test_urls(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with file_server(LINES) as (url, uploads):
        command = ["run-batch", "--attach", address, "-i", f"{url}/in", "--output-tmp-dir", str(tmp_path)]
        assert main([*command, "-o", f"{url}/out", "--no-progress"]) == 1
        check(uploads["out"].decode(), address)
        assert list(tmp_path.iterdir()) == []
        capsys.readouterr()
        assert main([*command, "-o", f"{url}/forbidden", "--no-progress"]) == 1
        (left,) = tmp_path.iterdir()
        message = capsys.readouterr().err
        assert str(left) in message and "403" in message
        check(left.read_text(), address)
        assert main(["run-batch", "--attach", address, "-i", f"{url}/none", "-o", "-"]) == 1
        assert "404" in capsys.readouterr().err


@contextmanager
def file_server(content: str) -> Iterator[tuple[str, dict[str, bytes]]]:
    """A URL whose /in can be read, and where all but /forbidden can be written; what was."""
    uploads: dict[str, bytes] = {}

    async def get(request: web.Request) -> web.Response:
        return web.Response(text=content) if request.match_info["name"] == "in" else web.Response(status=404)

    async def put(request: web.Request) -> web.Response:
        if request.match_info["name"] == "forbidden":
            return web.Response(status=403)
        uploads[request.match_info["name"]] = await request.read()
        return web.Response()

    async def serve(port: asyncio.Future[int]) -> None:
        app = web.Application()
        app.router.add_get("/{name}", get)
        app.router.add_put("/{name}", put)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port.set_result(runner.addresses[0][1])
        await stop.wait()
        await runner.cleanup()

    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    port: asyncio.Future[int] = loop.create_future()
    task = loop.create_task(serve(port))
    loop.run_until_complete(port)
    thread = threading.Thread(target=loop.run_until_complete, args=(task,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{port.result()}", uploads
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def test_a_lost_core_ends_the_run_and_leaves_what_is_answered(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/core.sock"
    core = start_core(address, "--dtype", "float32", "--kv-cache-memory-bytes", "67108864")
    quick = request("quick", {"prompt": "a", "max_tokens": 1})
    endless = "".join(
        request(f"r{i}", {"prompt": "a", "max_tokens": 900, "ignore_eos": True}) for i in range(64)
    )
    source = tmp_path / "in.jsonl"
    source.write_text(quick + endless)
    options = ("-i", str(source), "-o", "-", "--reattach-timeout", "0.5")
    batch = start("run-batch", "--attach", address, *options)
    assert batch.stdout is not None
    assert json.loads(batch.stdout.readline())["custom_id"] == "quick"
    core.kill()
    core.communicate()
    output, messages = batch.communicate(timeout=60)
    assert batch.returncode == 1
    assert "pagewire run-batch: the engine core" in messages
    assert all(json.loads(line)["response"]["status_code"] == 200 for line in output.splitlines())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-i", "none", "-o", "out"], "there is no file none"),
        (["-i", "-", "-o", "-", "--resume"], "needs an output file"),
        (["-i", "same", "-o", "same"], "overwrite"),
        (
            ["-i", "same", "-o", "out", "--enable-auto-tool-choice", "--tool-call-parser", "none"],
            "tool_call_parser",
        ),
    ],
)
def test_mistakes_are_reported(
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("same").write_text(LINES)
    assert main(["run-batch", *options, "--model", "demo"]) == 2
    assert message in capsys.readouterr().err
    assert Path("same").read_text() == LINES
