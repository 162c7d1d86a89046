"""Answers with pooled results: their encodings, that large ones come in parts, and the memory of all together."""

from __future__ import annotations

import array
import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from pagewire.frontend.api.async_llm import AsyncLLM
from pagewire.frontend.server.http import response as http_response
from pagewire.frontend.server.http.api_shapes import OPENAI
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.response import HttpResponse
from pagewire.frontend.server.pooling.results import as_dtype
from pagewire.frontend.server.serving.answer_memory import AnswerMemory
from pagewire.ipc.wire.budget import MAX_HTTP_POOLED_BYTES, SMALL_POOLED_BYTES
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.messages import Request, Submit
from pagewire.ipc.wire.pooling import PoolingInfo
from tests.frontend.conftest import PATIENCE, FakeCore
from tests.frontend.server.client import Client

SIZE = 1000  # of an embedding
MANY = 128  # tokens of a text whose embeddings of all tokens are a large answer
EMBEDDER = PoolingInfo(["embed", "token_embed"], "MEAN", SIZE, whole_prompts=True)


def result(request: Request) -> Tensor:
    """Numbers of any size, some of which no 16 bits hold."""
    shape = (len(request.prompt.token_ids), SIZE) if request.task.task == "token_embed" else (SIZE,)  # type: ignore[union-attr]
    torch.manual_seed(len(request.prompt.token_ids))
    numbers = torch.randn(shape) * torch.randint(-40, 40, shape).exp2()
    numbers.view(-1)[:4] = torch.tensor([1e30, -7e4, 1.00390625, 3.0e-8])
    return Tensor("float32", shape, array.array("f", numbers.view(-1).tolist()).tobytes())


def expected(core: FakeCore) -> list[torch.Tensor]:
    """What the core has answered, in order."""
    results = [result(core.submitted[key]) for key in sorted(core.submitted)]
    return [torch.tensor(tensor.tolist()).view(tensor.shape) for tensor in results]


@pytest.fixture
def server(core: FakeCore) -> Iterator[Client]:
    """A server of an embedding model."""
    core.info = msgspec.structs.replace(core.info, pooling=EMBEDDER)
    core.auto, core.pooled = True, result
    engine = AsyncLLM.attach(core.address)
    yield Client(engine)
    engine.shutdown()


def tokens(number: int) -> list[int]:
    return [2 + index % 60 for index in range(number)]


@pytest.mark.parametrize("dtype", [None, "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("task", ["embed", "token_embed"])
def test_results_in_every_encoding(server: Client, core: FakeCore, task: str, dtype: str | None) -> None:
    fields: dict[str, Any] = {"input": [tokens(3), tokens(MANY), tokens(1)], "task": task}
    if dtype is not None:
        fields |= {"encoding_format": "base64", "embed_dtype": dtype, "endianness": "native"}
    answer = server.post("/pooling", fields)
    assert answer.status == 200 and answer.json["usage"]["prompt_tokens"] == 4 + MANY
    for entry, tensor in zip(answer.json["data"], expected(core), strict=True):
        assert entry["shape"] == list(tensor.shape)
        if dtype is None:
            assert torch.equal(torch.tensor(entry["data"]), tensor)
        else:
            kind = getattr(torch, dtype)
            found = torch.frombuffer(bytearray(base64.b64decode(entry["data"])), dtype=kind)
            assert torch.equal(found, tensor.to(kind).view(-1))


def test_what_is_no_number_stays_none() -> None:
    values = torch.tensor([0x7FFFFFFF, 0x7F800001, 0x7F800000, 0x7F7FFFFF, 0], dtype=torch.int32).view(
        torch.float32
    )
    for dtype in ("float16", "bfloat16"):
        data = as_dtype(memoryview(values.numpy()), dtype)  # type: ignore[arg-type]
        found = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))
        assert torch.equal(found.isnan(), values.isnan()) and torch.equal(
            found[2:], values[2:].to(found.dtype)
        )


def test_a_small_answer_is_sent_whole(server: Client, core: FakeCore) -> None:
    answer = server.post("/v1/embeddings", {"input": [tokens(2)]})
    assert torch.equal(torch.tensor(answer.json["data"][0]["embedding"]), expected(core)[0])
    assert answer.headers["content-length"] == str(len(answer.body))


def test_a_large_answer_is_sent_in_parts(server: Client) -> None:
    async def sizes() -> tuple[list[int], bytes]:
        call = server.call("POST", "/pooling", {"input": tokens(MANY), "task": "token_embed"})
        start, body, parts, more = await call.message(), b"", [], True
        assert start["status"] == 200
        while more:
            message = await call.message()
            more = message["more_body"]
            parts.append(len(message["body"]))
            body += message["body"]
        return parts, body

    parts, body = server.run(sizes)
    assert len(json.loads(body)["data"][0]["data"]) == MANY
    assert len(parts) > 4 and max(parts) < len(body) / 4


def test_large_answers_wait_for_memory_and_small_ones_pass(server: Client, core: FakeCore) -> None:
    """Those that leave make room; more than there is room for at all is refused."""
    core.auto = False
    size = 4 * SIZE * MANY - SMALL_POOLED_BYTES
    server.app.state.answer_memory = AnswerMemory(size + size // 2)
    large = {"input": tokens(MANY), "task": "token_embed"}

    async def submitted() -> Request:
        message = await asyncio.to_thread(core.expect, Submit)
        return message.requests[0]  # type: ignore[no-any-return]

    async def scenario() -> None:
        first, second, third = (server.call("POST", "/pooling", large) for _ in range(3))
        one = await submitted()
        small = server.call("POST", "/pooling", {"input": tokens(3)})
        other = await submitted()
        assert len(other.prompt.token_ids) == 3, "the second large one waits"
        await answer(other)
        assert (await small.answer()).status == 200
        second.hang_up()
        await asyncio.wait_for(second.task, PATIENCE)
        await answer(one)
        assert (await first.answer()).status == 200
        await answer(await submitted())
        assert (await third.answer()).status == 200

    async def answer(request: Request) -> None:
        core.tokens(request.key, [], finish_reason="stop", pooled=result(request))

    server.run(scenario)
    count = MAX_HTTP_POOLED_BYTES // (4 * SIZE * 4000) + 1
    refused = server.post("/pooling", {"input": [tokens(4000)] * count, "task": "token_embed"})
    assert refused.status == 400 and refused.error["code"] == "request_too_large"
    assert f"at most {MAX_HTTP_POOLED_BYTES}" in refused.error["message"]


def test_a_client_that_hardly_reads_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """For others wait for the memory of its answer."""
    monkeypatch.setattr(http_response, "READ_GRACE_SECONDS", 0.0)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()  # nothing is read

    async def respond() -> None:
        response = HttpResponse(send, OPENAI)
        with pytest.raises(APIError, match="reads less than") as caught:
            await response.send_parts(iter([b"[1", b"]"]), {})
        await response.fail(caught.value)  # there is no way to say it

    asyncio.run(asyncio.wait_for(respond(), PATIENCE))
    assert len(sent) <= 2 and sent[0]["status"] == 200


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"embed_dtype": "float16"}, "embed_dtype is for encoding_format 'base64'"),
        ({"endianness": "little", "encoding_format": "float"}, "endianness is for encoding_format 'base64'"),
        ({"endianness": "big", "encoding_format": "base64"}, "base64 is little-endian"),
    ],
)
def test_types_of_numbers_are_for_base64(server: Client, fields: dict[str, str], message: str) -> None:
    for path in ("/v1/embeddings", "/pooling"):
        answer = server.post(path, {"input": "w2"} | fields)
        assert answer.status == 400 and message in answer.error["message"]
        assert answer.error["param"] == next(iter(fields))
