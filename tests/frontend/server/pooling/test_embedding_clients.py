"""Classes of other projects for embeddings and reranking, against the server; each is skipped where it is missing.

Each of them comes with a large part of its project: `pip install cohere langchain-openai
llama-index-embeddings-openai-like` brings a hundred packages, which the tests do not require.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from pagewire.frontend.server.http.options import ServerOptions
from pagewire.ipc.wire.pooling import PoolingInfo
from tests.frontend.conftest import FakeCore
from tests.serving import serving

TEXTS = ["w2 w3", "w9", "w4 w5 w6", "w7 w7 w8"]
QUERY = "w3 w9"
VECTORS = {text: [len(text.split()), sum(int(word[1:]) for word in text.split())] for text in (*TEXTS, QUERY)}


def cosine(a: str, b: str) -> float:
    (x, y), (v, w) = VECTORS[a], VECTORS[b]
    return (x * v + y * w) / math.hypot(x, y) / math.hypot(v, w)


@pytest.fixture
def url(core: FakeCore) -> Iterator[str]:
    """A server of an embedding model whose vectors are the number of tokens and the sum of their ids."""
    core.auto = True
    core.info = msgspec.structs.replace(core.info, pooling=PoolingInfo(["embed"], "LAST", 2))
    with serving(core.address, ServerOptions(port=0)) as address:
        yield address


def equal(found: Sequence[Sequence[float]], texts: Sequence[str]) -> bool:
    return [list(vector) for vector in found] == [VECTORS[text] for text in texts]


def test_cohere_reranks(url: str) -> None:
    cohere = pytest.importorskip("cohere")
    client = cohere.ClientV2(api_key="none", base_url=url)
    results = client.rerank(model="fake", query=QUERY, documents=TEXTS, top_n=3).results
    best = sorted(range(len(TEXTS)), key=lambda i: -cosine(QUERY, TEXTS[i]))[:3]
    assert [result.index for result in results] == best
    assert all(
        math.isclose(result.relevance_score, cosine(QUERY, TEXTS[result.index]), abs_tol=1e-6)
        for result in results
    )


def test_langchain_embeds(url: str) -> None:
    """Texts, not tokens: those that the class would send are of OpenAI's models."""
    langchain = pytest.importorskip("langchain_openai")
    options: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none"}
    embedder = langchain.OpenAIEmbeddings(model="fake", check_embedding_ctx_length=False, **options)
    assert equal(embedder.embed_documents(TEXTS), TEXTS)
    assert equal([embedder.embed_query(QUERY)], [QUERY])


def test_llama_index_embeds(url: str) -> None:
    module = pytest.importorskip("llama_index.embeddings.openai_like")
    embedder = module.OpenAILikeEmbedding(model_name="fake", api_base=f"{url}/v1", api_key="none")
    assert equal(embedder.get_text_embedding_batch(TEXTS), TEXTS)
    assert equal([embedder.get_query_embedding(QUERY)], [QUERY])
