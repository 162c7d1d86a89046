"""Requests with large texts hold up neither others nor, when their clients have left, one another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest

from pagewire.frontend.api.async_llm import AsyncLLM
from pagewire.frontend.text.tokenizer import LARGE_TEXT
from tests.frontend.conftest import FakeCore
from tests.frontend.server.client import PATIENCE, Answer, Client

LARGE = "w5 " * (LARGE_TEXT // 3 + 1)
BODIES = {
    "/v1/completions": {"prompt": LARGE, "truncate_prompt_tokens": 3, "max_tokens": 3},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": LARGE}],
        "truncate_prompt_tokens": 3,
        "max_tokens": 3,
    },
    "/tokenize": {"prompt": LARGE},
    "/v1/responses/input_tokens": {"input": LARGE},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": LARGE}]},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_small_text_does_not_wait_behind_large_ones(
    path: str, serve: Callable[..., Client], core: FakeCore, engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    core.auto = True
    client, tokenizer = serve(), engine.session.intake.tokenizer
    assert tokenizer is not None
    begun, release = threading.Semaphore(0), threading.Event()
    encode_batch = tokenizer.encode_batch

    def slow(texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        if len(texts[0]) >= LARGE_TEXT:
            begun.release()
            assert release.wait(PATIENCE)
        return encode_batch(texts, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode_batch", slow)

    async def beside_large_ones() -> tuple[Answer, list[Answer]]:
        large = [client.call("POST", path, BODIES[path]) for _ in range(40)]
        assert await asyncio.to_thread(begun.acquire, timeout=PATIENCE)
        small = await client.call("POST", "/tokenize", {"prompt": " ".join(["w6"] * 4000)}).answer()
        for call in large[1:-1]:
            call.hang_up()
        await asyncio.wait([call.task for call in large[1:-1]], timeout=PATIENCE)
        release.set()
        return small, [await large[0].answer(), await large[-1].answer()]

    small, answers = client.run(beside_large_ones)
    assert small.json["count"] == 4000
    assert [answer.status for answer in answers] == [200, 200]
    assert begun.acquire(blocking=False) and not begun.acquire(
        blocking=False
    )  # of the two whose clients stayed
