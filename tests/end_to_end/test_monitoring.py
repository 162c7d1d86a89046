"""/metrics over HTTP: the same on every server, and an answer whatever state the core is in."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import ASGIApp, Message

from pagewire import AsyncLLM, SamplingParams
from pagewire.frontend.server.operate import monitoring
from pagewire.frontend.server.wiring import create_app


async def get(app: ASGIApp, path: str) -> tuple[int, str, str]:
    """Status, content type and body of an answer."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "http_version": "1.1",
        "headers": [(b"host", b"localhost")],
        "query_string": b"",
        "root_path": "",
    }
    await app(scope, receive, send)
    start, *bodies = sent
    headers = dict(start["headers"])
    return start["status"], headers[b"content-type"].decode(), b"".join(m["body"] for m in bodies).decode()


def values(text: str) -> dict[tuple[str, str], float]:
    return {
        (sample.name, str(sample.labels)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_all_servers_report_the_same_metrics(address: str) -> None:
    async def main() -> None:
        async with AsyncLLM.attach(address) as one, AsyncLLM.attach(address) as two:
            async for _ in one.generate("with", SamplingParams(max_tokens=3, ignore_eos=True)):
                pass
            answers = [await get(create_app(engine), "/metrics") for engine in (one, two)]
            assert json.loads((await get(create_app(one), "/load"))[2]) == {"server_load": 0}
        kinds = {(status, kind) for status, kind, _ in answers}
        assert kinds == {(200, "text/plain; version=0.0.4; charset=utf-8")}
        figures = [values(text) for *_, text in answers]
        assert figures[0].keys() == figures[1].keys()
        changed = {name for name, value in figures[0].items() if figures[1][name] != value}
        # The core's own loop has turned meanwhile.
        assert {name for name, _ in changed} <= {
            f"pagewire:core_turn_seconds_{x}" for x in ("bucket", "sum", "count")
        }
        (count,) = (
            value for (name, _), value in figures[0].items() if name == "vllm:generation_tokens_total"
        )
        assert count >= 3

    asyncio.run(main())


def test_a_core_that_hangs_or_is_gone_is_503(start_daemon: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = start_daemon("--kv-cache-memory-bytes", "16777216")
    monkeypatch.setattr(monitoring, "ANSWER_SECONDS", 0.3)

    async def main() -> None:
        async with AsyncLLM.attach(daemon.address) as engine:
            app = create_app(engine)
            os.kill(daemon.process.pid, signal.SIGSTOP)
            status, _, text = await get(app, "/metrics")
            os.kill(daemon.process.pid, signal.SIGCONT)
            assert (status, "has not answered" in text) == (503, True)
            monkeypatch.setattr(monitoring, "ANSWER_SECONDS", 30.0)
            assert (await get(app, "/metrics"))[0] == 200
            daemon.process.kill()
            status, _, text = await get(app, "/metrics")
            assert (status, json.loads(text)["error"]["code"]) == (503, "engine_down")

    asyncio.run(main())
