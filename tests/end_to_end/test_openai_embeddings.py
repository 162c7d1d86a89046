"""The `openai` package against `/v1/embeddings`, as its users write it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from openai import AsyncOpenAI, OpenAI
from openai.types import CreateEmbeddingResponse
from tokenizers import Tokenizer

from tests.end_to_end.http_server import Server
from tests.frontend.word_pieces import write_tokenizer
from tests.workers.pooled import cosine, sentence_transformer, write

TEXTS = ["the cat sat on a mat", "a dog ran", "the cat sat " * 12, "query"]
TALK = [{"role": "user", "content": "the cat sat"}, {"role": "assistant", "content": "on a mat"}]
TEMPLATE = (
    "{% for m in messages %}{{ m.content }} : {% endfor %}{% if add_generation_prompt %}query{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT that embeds by the mean of its tokens, with a chat template."""
    folder = write(tmp_path_factory.mktemp("bert"), "bert")
    sentence_transformer(folder, "mean_tokens")
    write_tokenizer(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = (
        "--port",
        "0",
        "--no-weight-cache",
        "--num-threads",
        "1",
        "--served-model-name",
        "bert",
        "--dtype",
        "float32",
    )
    server = Server(tmp_path_factory.mktemp("server"), str(folder), *options)
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def vectors(response: CreateEmbeddingResponse) -> torch.Tensor:
    """Float32 [texts, size]."""
    assert [entry.index for entry in response.data] == list(range(len(response.data)))
    return torch.tensor([entry.embedding for entry in response.data])


def token_ids(folder: Path, text: str, special: bool) -> list[int]:
    ids: list[int] = (
        Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=special).ids
    )
    return ids


def test_embeddings_are_those_of_transformers(client: OpenAI, folder: Path) -> None:
    from transformers import AutoModel

    model, ids = AutoModel.from_pretrained(folder), [token_ids(folder, text, True) for text in TEXTS]
    with torch.inference_mode():
        expected = torch.stack([model(torch.tensor([one]))[0][0].mean(0) for one in ids])
    response = client.embeddings.create(model="bert", input=TEXTS)  # the client asks for base64 by itself
    assert response.model == "bert" and cosine(vectors(response), expected) > 0.999999
    count = sum(map(len, ids))
    assert (response.usage.prompt_tokens, response.usage.total_tokens) == (count, count)
    for given in (TEXTS, ids):
        again = client.embeddings.create(model="bert", input=given, encoding_format="float")
        assert torch.equal(vectors(again), vectors(response))
    alone = client.embeddings.create(model="bert", input=TEXTS[1])
    assert torch.equal(vectors(alone)[0], vectors(response)[1])


def test_conversations(client: OpenAI, folder: Path) -> None:
    """As users of vLLM send them: the client has no method for it."""

    def embed(**fields: Any) -> torch.Tensor:
        body = {"model": "bert", "messages": TALK} | fields
        return vectors(client.post("/embeddings", body=body, cast_to=CreateEmbeddingResponse))

    for fields, text, special in (
        ({}, "the cat sat : on a mat : ", False),
        ({"add_generation_prompt": True}, "the cat sat : on a mat : query", False),
        ({"add_special_tokens": True}, "the cat sat : on a mat : ", True),
    ):
        ids = token_ids(folder, text, special)
        expected = client.embeddings.create(model="bert", input=ids, encoding_format="float")
        assert torch.equal(embed(encoding_format="float", **fields), vectors(expected))
    ids = token_ids(folder, "the cat sat", False)
    expected = client.embeddings.create(model="bert", input=ids, encoding_format="float")
    assert torch.equal(embed(encoding_format="float", truncate_prompt_tokens=3), vectors(expected))
    long = [{"role": "user", "content": "cat " * 200}]
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        embed(messages=long)
    assert embed(messages=long, truncate_prompt_tokens=-1, encoding_format="float").shape == (1, 64)


def test_errors(client: OpenAI) -> None:
    create = client.embeddings.create
    with pytest.raises(openai.NotFoundError, match="no model 'ada'"):
        create(model="ada", input="cat")
    with pytest.raises(openai.BadRequestError, match="1 to 2048 inputs") as caught:
        create(model="bert", input=[])
    assert caught.value.param == "input" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as caught:
        create(model="bert", input="cat " * 200)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="not trained for fewer"):
        create(model="bert", input="cat", dimensions=5)
    with pytest.raises(openai.BadRequestError, match="use base64") as caught:
        create(model="bert", input="cat", encoding_format="bytes")  # type: ignore[arg-type]
    assert caught.value.param == "encoding_format"
    with pytest.raises(openai.UnprocessableEntityError):
        client.post("/embeddings", body={"model": "bert"}, cast_to=CreateEmbeddingResponse)
    with pytest.raises(openai.BadRequestError, match="pools and does not generate"):
        client.completions.create(model="bert", prompt="cat")


def test_many_at_once(server: Server, client: OpenAI) -> None:
    """Each gets its own answer, with the bits of a request alone."""
    expected = vectors(client.embeddings.create(model="bert", input=TEXTS))

    async def ask() -> list[CreateEmbeddingResponse]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(
                *(client.embeddings.create(model="bert", input=text) for text in TEXTS * 8)
            )

    for index, response in enumerate(asyncio.run(ask())):
        assert torch.equal(vectors(response)[0], expected[index % len(TEXTS)])
