"""The examples for Ray Data and Ray Serve, as programs of their own on a local cluster."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from pagewire import LLM, SamplingParams
from tests.end_to_end.conftest import KV_BYTES

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPT = 'The "with" statement is used to'
MAX_TOKENS = 20


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """An engine that knows nothing of Ray."""
    with LLM("demo", kv_cache_memory_bytes=KV_BYTES) as llm:
        yield llm


def test_offline_batches(cluster: Any, llm: LLM, tmp_path: Path) -> None:
    from pyarrow.parquet import read_table

    options = ("--output", tmp_path / "texts", "--max-tokens", str(MAX_TOKENS))
    subprocess.run([sys.executable, EXAMPLES / "ray_data.py", *options], check=True)
    rows = read_table(tmp_path / "texts").to_pylist()
    prompts = [row["prompt"] for row in rows]
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=0, max_tokens=MAX_TOKENS)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert len(set(prompts)) == 6
    assert [row["text"] for row in rows] == [output.outputs[0].text for output in outputs]


@pytest.fixture
def url(cluster: Any) -> Iterator[str]:
    """Where the example for Ray Serve answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, EXAMPLES / "ray_serve.py", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert f"ready http://127.0.0.1:{port}/v1\n" in process.stdout
    yield f"http://127.0.0.1:{port}/v1"
    process.terminate()
    process.stdout.close()
    process.wait(60)


def test_openai_api(url: str, llm: LLM) -> None:
    expected = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=MAX_TOKENS), use_tqdm=False)
    client = OpenAI(base_url=url, api_key="none")
    request: dict[str, Any] = {
        "model": "demo",
        "prompt": PROMPT,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    assert client.completions.create(**request).choices[0].text == expected[0].outputs[0].text
    parts = [chunk.choices[0].text for chunk in client.completions.create(**request, stream=True)]
    assert len(parts) > 1 and "".join(parts) == expected[0].outputs[0].text
