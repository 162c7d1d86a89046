"""Batch files line by line, against endpoints that keep what they were sent."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pagewire.frontend.server.batches import in_process
from pagewire.frontend.server.batches.lines import BatchResponse, Counts, Result, keep_answered, run_lines


def line(custom_id: Any, url: str = "/v1/completions", **more: Any) -> bytes:
    """A line of the input."""
    body = more.pop("body", {"prompt": str(custom_id)})
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body} | more).encode()


class Endpoints:
    """Answers with the body it was sent. statuses: by prompt, what comes at each call before 200."""

    def __init__(self, statuses: dict[str, list[int]] | None = None, gather: int = 1) -> None:
        self.statuses, self.gather = statuses or {}, gather
        self.calls = self.running = self.most_running = 0
        self.arrival = asyncio.Condition()

    async def post(self, path: str, body: bytes) -> BatchResponse:
        """One answer, once `gather` have come."""
        self.calls += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        async with self.arrival:
            self.arrival.notify_all()
            await self.arrival.wait_for(lambda: self.calls >= self.gather)
        self.running -= 1
        waiting = self.statuses.get(json.loads(body).get("prompt", ""), [])
        return BatchResponse(waiting.pop(0) if waiting else 200, "id", msgspec.Raw(body))


def run(
    lines: list[bytes], endpoints: Endpoints, concurrency: int = 4, answered: frozenset[str] = frozenset()
) -> tuple[Counts, list[dict[str, Any]]]:
    """The counts, and the output's lines as JSON."""
    results: list[Result] = []
    counts = asyncio.run(run_lines(iter(lines), endpoints.post, results.append, concurrency, answered))
    return counts, [json.loads(msgspec.json.encode(result)) for result in results]


def test_every_line_is_answered_with_so_many_at_once() -> None:
    endpoints = Endpoints(gather=8)
    counts, results = run([line(f"r{i}") for i in range(50)], endpoints, concurrency=8)
    assert counts == Counts(good=50)
    assert endpoints.most_running == 8
    assert {result["custom_id"] for result in results} == {f"r{i}" for i in range(50)}
    assert len({result["id"] for result in results}) == 50
    for result in results:
        assert result["error"] is None
        assert result["response"] == {
            "status_code": 200,
            "request_id": "id",
            "body": {"prompt": result["custom_id"]},
        }


@pytest.mark.parametrize(
    ("wrong", "custom_id", "code"),
    [
        (b"{nonsense", None, "invalid_json_line"),
        (b'["list"]', None, "invalid_json_line"),
        (b"\xff\xfe", None, "invalid_json_line"),
        (b"[" * 100_000, None, "invalid_json_line"),
        (b'{"custom_id": "x", "url": "/v1/completions"}', "x", "invalid_json_line"),
        (line(7), None, "invalid_json_line"),
        (line("x", body="text"), "x", "invalid_json_line"),
        (line("x", method="GET"), "x", "invalid_method"),
        (line("x", url="/v1/embeddings"), "x", "invalid_url"),
        (line("x", body={"prompt": "a", "stream": True}), "x", "invalid_request"),
        (line("good"), "good", "duplicate_custom_id"),
    ],
)
def test_a_wrong_line_fails_alone(wrong: bytes, custom_id: str | None, code: str) -> None:
    endpoints = Endpoints()
    counts, results = run([line("good"), b"", wrong, b"  \n", line("too")], endpoints)
    assert (counts, endpoints.calls) == (Counts(good=2, failed=1), 2)
    (failed,) = (result for result in results if result["error"])
    assert (failed["custom_id"], failed["response"], failed["error"]["code"]) == (custom_id, None, code)
    assert failed["error"]["message"].startswith("line 3: ")
    if code == "duplicate_custom_id":
        assert failed["error"]["message"].endswith("is already used by line 1")


def test_an_error_status_is_an_answer_and_busy_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewire.frontend.server.batches.lines.RETRY_SECONDS", 0.0)
    endpoints = Endpoints({"a": [400], "b": [429, 429]})
    counts, results = run([line("a"), line("b")], endpoints, concurrency=1)
    assert (counts, endpoints.calls) == (Counts(good=1, failed=1), 4)
    assert [(result["response"]["status_code"], result["error"]) for result in results] == [
        (400, None),
        (200, None),
    ]


def test_an_unexpected_failure_ends_the_run() -> None:
    endpoints = Endpoints(gather=99)  # the others wait

    async def post(path: str, body: bytes) -> BatchResponse:
        if endpoints.running == 3:
            raise RuntimeError("the engine is lost")
        return await endpoints.post(path, body)

    async def main() -> int:
        with pytest.raises(RuntimeError, match="lost"):
            await run_lines((line(f"r{i}") for i in range(9)), post, print, 4)
        await asyncio.sleep(0)
        return len(asyncio.all_tasks())

    assert asyncio.run(main()) == 1


def test_resuming_keeps_good_answers_and_sends_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    assert keep_answered(path) == frozenset()
    lines = [line(f"r{i}") for i in range(6)]
    counts, results = run(lines[:4], Endpoints({"r1": [500]}), concurrency=1)
    assert counts == Counts(good=3, failed=1)
    text = "".join(json.dumps(result) + "\n" for result in results)
    path.write_text(text + text.splitlines()[0] + '\n{"id": "batch_req_1", "custom_id": "r4", "respo')
    answered = keep_answered(path)
    assert answered == {"r0", "r2", "r3"}
    assert [json.loads(kept)["custom_id"] for kept in path.read_text().splitlines()] == ["r0", "r2", "r3"]
    counts, results = run(lines, Endpoints(), answered=answered)
    assert counts == Counts(good=3, skipped=3)
    assert {result["custom_id"] for result in results} == {"r1", "r4", "r5"}


def test_an_application_is_called_without_a_socket() -> None:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, StreamingResponse
    from starlette.routing import Route

    async def echo(request: Request) -> StreamingResponse:
        body = await request.json()
        parts = [b'{"you":\n', json.dumps(body).encode(), b', "key": "%s"}']
        parts[2] %= request.headers["authorization"].encode()
        return StreamingResponse(iter(parts), 201, {"X-Request-Id": "r1"})

    async def text(request: Request) -> PlainTextResponse:
        return PlainTextResponse("no JSON", 500)

    app = Starlette(routes=[Route("/echo", echo, methods=["POST"]), Route("/text", text, methods=["POST"])])
    post = in_process.open_poster(app, "secret")
    response = asyncio.run(post("/echo", b'{"a": [1, 2]}'))
    assert (response.status_code, response.request_id) == (201, "r1")
    assert bytes(response.body) == b'{"you":{"a":[1,2]},"key":"Bearer secret"}'
    response = asyncio.run(post("/text", b"{}"))
    assert (response.status_code, bytes(response.body)) == (500, b'{"error":{"message":"no JSON"}}')


def test_an_application_learns_that_its_client_has_left() -> None:
    events: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        events.append("waiting")
        try:
            await receive()  # what no answer needs: it must not come
        finally:
            events.append("left")

    async def main() -> None:
        task = asyncio.create_task(in_process.open_poster(app)("/", b"{}"))
        while not events:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert events == ["waiting", "left"]
