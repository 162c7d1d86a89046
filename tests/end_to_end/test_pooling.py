"""Pooling through cores and workers as processes: the Python interface, asyncio, and HTTP."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire import LLM, AsyncLLM, PoolingParams
from pagewire.frontend.api.llm_engine import LLMEngine
from tests.frontend.server.client import Client
from tests.frontend.word_pieces import write_tokenizer
from tests.workers.parity import make_prompts
from tests.workers.pooled import cosine, sentence_transformer, write

TEXTS = ["the cat sat on a mat", "a dog ran", "the cat sat " * 12, "query"]
TALK = [{"role": "user", "content": "the cat sat"}]
SMALL: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 16, "weight_cache": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT that embeds by the mean of its tokens."""
    folder = write(tmp_path_factory.mktemp("bert"), "bert")
    sentence_transformer(folder, "mean_tokens")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), restarts=1, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(folder: Path) -> torch.Tensor:
    """Embeddings of `TEXTS` by transformers."""
    from tokenizers import Tokenizer
    from transformers import AutoModel

    model, tokenizer = AutoModel.from_pretrained(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    with torch.inference_mode():
        states = [model(torch.tensor([tokenizer.encode(text).ids]))[0][0].mean(0) for text in TEXTS]
    return torch.stack(states)


def test_embed_and_encode(llm: LLM, expected: torch.Tensor) -> None:
    outputs = llm.embed(TEXTS, use_tqdm=False)
    found = torch.tensor([output.outputs.embedding for output in outputs])
    assert cosine(found, expected) > 0.999999 and (found.norm(dim=1) - 1).abs().max() < 1e-5
    assert all(output.finished and output.outputs.hidden_size == 64 for output in outputs)
    assert outputs[0].id == outputs[0].request_id and len(outputs[0].prompt_token_ids) == 8
    raw = llm.encode(TEXTS[0], PoolingParams(normalize=False), use_tqdm=False)[0].outputs.data
    torch.testing.assert_close(torch.tensor(raw), expected[0], atol=1e-4, rtol=1e-4)
    tokens = llm.encode(TEXTS[1], pooling_task="token_embed", use_tqdm=False)[0].outputs.data
    assert len(tokens) == 5 and len(tokens[0]) == 64
    assert llm.embed(TEXTS[0], use_tqdm=False)[0].outputs == outputs[0].outputs  # bits of a prompt alone


def test_token_types_are_those_of_transformers(llm: LLM, folder: Path) -> None:
    from transformers import AutoModel

    ids, types = [2, 6, 7, 3, 8, 9, 3], [0, 0, 0, 0, 1, 1, 1]
    with torch.inference_mode():
        model = AutoModel.from_pretrained(folder)
        states = model(torch.tensor([ids]), token_type_ids=torch.tensor([types]))[0][0].mean(0)
    prompts = [{"prompt_token_ids": ids, "token_type_ids": types}, {"prompt_token_ids": ids}]
    found, without = (
        torch.tensor([output.outputs.embedding])
        for output in llm.embed(prompts, use_tqdm=False)  # type: ignore[arg-type]
    )
    assert cosine(found, states[None]) > 0.999999 > cosine(without, states[None])


def test_score_by_cosine(llm: LLM, expected: torch.Tensor) -> None:
    one, many = TEXTS[0], TEXTS[1:]
    scores = [output.outputs.score for output in llm.score(one, many, use_tqdm=False)]
    cosines = torch.nn.functional.cosine_similarity(expected[:1], expected[1:])
    torch.testing.assert_close(torch.tensor(scores), cosines, atol=1e-4, rtol=0)
    pairs = llm.score(TEXTS[:2], TEXTS[2:], use_tqdm=False)
    assert pairs[0].outputs.score == pytest.approx(scores[1], abs=1e-6)


def test_refusals(llm: LLM) -> None:
    with pytest.raises(ValueError, match="pools and does not generate"):
        llm.generate("the cat")
    with pytest.raises(ValueError, match="does not serve the task 'classify'"):
        llm.classify("the cat")
    with pytest.raises(ValueError, match="maximum context length is 128"):
        llm.embed("cat " * 200)
    cut = llm.embed("cat " * 200, truncate_prompt_tokens=-1, use_tqdm=False)[0]
    assert len(cut.prompt_token_ids) == 128 and cut.prompt_token_ids[-1] == 3


def test_a_killed_worker_costs_nothing(llm: LLM, expected: torch.Tensor) -> None:
    """Its requests are computed again by another."""
    (worker,) = llm.collective_rpc("memory")
    assert worker["process"] > 0
    engine: LLMEngine = llm.llm_engine
    status = engine.session.call("status").result(10)
    params = PoolingParams()
    for i in range(64):
        engine.add_request(f"r{i}", TEXTS[i % 4], params)
    os.kill(status["worker_pid"], signal.SIGKILL)
    results: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        results.update({output.request_id: output for output in engine.step()})
    assert len(results) == 64
    for i in range(64):
        embedding = torch.tensor(results[f"r{i}"].outputs.data)
        assert cosine(embedding[None], expected[i % 4][None]) > 0.999999


@pytest.mark.every_architecture
def test_a_killed_rank_costs_nothing(tmp_path: Path) -> None:
    """Of two that divide a causal model, started again from packed weights: the same vectors, to the bit."""
    prompts = [{"prompt_token_ids": ids} for ids in make_prompts(128, (23, 1, 40, 5))]
    options = SMALL | {"runner": "pooling", "skip_tokenizer_init": True, "tensor_parallel_size": 2}
    with LLM(str(write(tmp_path, "llama")), **options) as llm:
        expected = [output.outputs for output in llm.embed(prompts, use_tqdm=False)]
        engine: LLMEngine = llm.llm_engine
        rank = engine.session.call("status").result(10)["worker_pid"]
        for i in range(64):
            engine.add_request(f"r{i}", prompts[i % 4], PoolingParams(task="embed"))
        os.kill(rank, signal.SIGKILL)
        results: dict[str, Any] = {}
        while engine.has_unfinished_requests():
            results.update({output.request_id: output for output in engine.step()})
        assert engine.session.call("status").result(10)["worker_starts"] == 2
    assert len(results) == 64
    assert all(results[f"r{i}"].outputs.data == expected[i % 4].embedding for i in range(64))


async def post(client: Client, path: str, body: Any) -> tuple[int, Any]:
    answer = await client.call("POST", path, body).answer()
    return answer.status, answer.json


REFUSED: list[tuple[str, Any, int, str]] = [
    ("/v1/embeddings", {"input": []}, 400, "1 to 2048 inputs, got 0"),
    ("/v1/embeddings", {"input": ["x"] * 2049}, 400, "1 to 2048 inputs, got 2049"),
    ("/v1/embeddings", {"input": ""}, 400, "must not be empty"),
    ("/v1/embeddings", {}, 422, "missing required field `input`"),
    ("/v1/embeddings", {"input": "cat", "encoding_format": "int8"}, 422, "encoding_format"),
    ("/v1/embeddings", {"input": "cat", "encoding_format": "bytes"}, 400, "use base64"),
    ("/v1/embeddings", {"input": "cat", "add_generation_prompt": True}, 400, "give messages with it"),
    ("/v1/embeddings", {"input": "cat", "messages": TALK}, 400, "either input or messages"),
    (
        "/v1/embeddings",
        {"messages": TALK, "prompt_name": "query"},
        400,
        "not put before conversations",
    ),
    ("/v1/embeddings", {"messages": TALK}, 400, "no chat template"),
    ("/pooling", {"messages": []}, 400, "the conversation is empty"),
    ("/v1/embeddings", {"input": "cat", "dimensions": 5}, 400, "not trained for fewer"),
    ("/v1/embeddings", {"input": "cat", "model": "other"}, 404, "no model"),
    ("/v1/embeddings", {"input": [[128]]}, 400, "outside the vocabulary"),
    ("/v1/embeddings", {"input": "cat " * 200}, 400, "maximum context length"),
    ("/v1/embeddings", {"input": "x" * (10 << 20)}, 400, "maximum context length"),
    ("/v1/classify", {"input": "cat"}, 400, "does not serve the task 'classify'"),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, 400, "cannot be scored against 1"),
    ("/v1/score", {"text_1": [], "text_2": ["c"]}, 400, "text_1: there must be 1 to 2048"),
    (
        "/v1/embeddings",
        {"input": ["cat", 5]},
        400,
        "a prompt is a string, token ids or a dict, got int",
    ),
    ("/v2/rerank", {"query": "cat", "documents": [{"x": 1}]}, 422, "objects with a text"),
    ("/v1/completions", {"prompt": "cat"}, 400, "pools and does not generate"),
    ("/v1/embeddings", {"input": ["x"] * 100_000}, 400, "1 to 2048 inputs, got 100000"),
    ("/v1/embeddings", {"input": [""]}, 400, "must not be empty"),
    ("/v1/embeddings", {"input": [[]]}, 400, "must not be empty"),
    ("/v1/embeddings", {"input": [[2, -1]]}, 400, "token id -1, outside the vocabulary"),
    ("/v1/embeddings", {"input": [[2, 1 << 70]]}, 400, "outside the vocabulary"),
    ("/v1/embeddings", {"input": [[2, 1.5]]}, 422, "input"),
    ("/v1/embeddings", {"input": "cat", "dimensions": 0}, 400, "dimensions must be at least 1"),
    ("/v1/embeddings", {"input": "cat", "dimensions": 65}, 400, "have 64 dimensions"),
    ("/v1/embeddings", {"input": [[2, 5, 3]], "prompt_name": "query"}, 400, "unknown prompt_name"),
    ("/v1/embeddings", {"input": "cat", "truncate_prompt_tokens": 129}, 400, "maximum context length of 128"),
    ("/v1/embeddings", {"input": "cat", "cache_salt": ""}, 400, "cache_salt must not be empty"),
    ("/v1/classify", {"input": []}, 400, "does not serve the task 'classify'"),
    ("/pooling", {"input": [], "task": "token_embed"}, 400, "1 to 2048 inputs, got 0"),
    ("/pooling", {"input": "cat", "task": "generate"}, 422, "task"),
    ("/v1/score", {"text_1": "a", "text_2": []}, 400, "text_2: there must be 1 to 2048"),
    ("/v1/score", {"text_1": "a", "text_2": ["b"] * 100_000}, 400, "there must be 1 to 2048 inputs"),
    ("/v1/score", {"text_1": "a", "text_2": [[2, 5]]}, 422, "text_2"),
    ("/v2/rerank", {"query": "cat", "documents": []}, 400, "documents: there must be 1 to 2048"),
    ("/v2/rerank", {"query": "cat", "documents": ["b"] * 100_000}, 400, "there must be 1 to 2048 inputs"),
    ("/v2/rerank", {"query": "", "documents": ["a"]}, 400, "must not be empty"),
    ("/v2/rerank", {"query": "x" * (10 << 20), "documents": ["a"]}, 400, "maximum context length"),
    ("/v1/chat/completions", {"messages": TALK}, 400, "pools and does not generate"),
    ("/v1/responses", {"input": "cat"}, 400, "pools and does not generate"),
]
"""Bodies that are refused, with the status and a part of the message."""


def test_asyncio_and_http(llm: LLM, expected: torch.Tensor) -> None:
    engine = AsyncLLM(llm.llm_engine.session)

    async def embed(text: str) -> torch.Tensor:
        async for output in engine.encode(text):
            assert output.finished
            return torch.tensor(output.outputs.data)
        raise AssertionError("no output")

    async def check() -> None:
        for vector, wanted in zip(await asyncio.gather(*map(embed, TEXTS)), expected, strict=True):
            assert cosine(vector[None], wanted[None]) > 0.999999
        client = Client(engine)
        status, body = await post(client, "/v1/embeddings", {"input": TEXTS})
        assert status == 200 and [entry["index"] for entry in body["data"]] == [0, 1, 2, 3]
        assert body["usage"] == {"prompt_tokens": 54, "total_tokens": 54}
        numbers = torch.tensor([entry["embedding"] for entry in body["data"]])
        assert cosine(numbers, expected) > 0.999999
        _, coded = await post(client, "/v1/embeddings", {"input": TEXTS, "encoding_format": "base64"})
        data = bytearray(base64.b64decode(coded["data"][1]["embedding"]))
        assert torch.equal(torch.frombuffer(data, dtype=torch.float32), numbers[1])
        _, ids = await post(client, "/v1/embeddings", {"input": [[2, 5, 3], [2, 6, 3]]})
        assert len(ids["data"]) == 2
        _, scores = await post(client, "/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]})
        _, ranked = await post(client, "/v2/rerank", {"query": TEXTS[0], "documents": TEXTS[1:], "top_n": 2})
        order = sorted(range(3), key=lambda i: -scores["data"][i]["score"])
        assert [result["index"] for result in ranked["results"]] == order[:2]
        assert ranked["results"][0]["document"]["text"] == TEXTS[1:][order[0]]
        _, pooled = await post(client, "/pooling", {"input": TEXTS[1], "task": "token_embed"})
        assert pooled["data"][0]["shape"] == [5, 64]
        others = []
        for path, wrong, status, text in REFUSED:
            found, answer = await post(client, path, wrong)
            if found != status or text not in answer["error"]["message"]:
                others.append((path, str(wrong)[:100], found, answer))
        assert not others, "\n".join(map(str, others))

    asyncio.run(check())


def test_cross_encoder(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoModelForSequenceClassification

    folder = write(tmp_path, "bert", "AutoModelForSequenceClassification", num_labels=1)
    write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        pairs = [tokenizer.encode(TEXTS[0], text) for text in TEXTS]
        logits = [
            model(torch.tensor([pair.ids]), token_type_ids=torch.tensor([pair.type_ids])).logits
            for pair in pairs
        ]
    with LLM(str(folder), **SMALL) as llm:
        scores = [output.outputs.score for output in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
        torch.testing.assert_close(torch.tensor(scores), torch.cat(logits)[:, 0].sigmoid(), atol=1e-5, rtol=0)
        rewards = llm.reward(TEXTS, use_tqdm=False)
        assert all(len(output.outputs.data) == 1 for output in rewards)
        with pytest.raises(TypeError, match="scores texts, not token ids"):
            llm.score([[2, 5, 3]], "cat")
        request = {"text_1": TEXTS[0], "text_2": TEXTS}

        long = {"query": "x" * (17 << 10), "documents": ["cat"] * 1024}

        async def score() -> tuple[tuple[int, Any], tuple[int, Any]]:
            client = Client(AsyncLLM(llm.llm_engine.session))
            return await post(client, "/v1/score", request), await post(client, "/v2/rerank", long)

        (status, body), (refused, answer) = asyncio.run(score())
        assert status == 200 and [entry["score"] for entry in body["data"]] == scores
        assert refused == 400 and "1024 pairs have 17828864 characters" in answer["error"]["message"]
