"""OpenAI's client drives /v1/files, /v1/batches and /v1/conversations, from the upload to the deletion."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch
from openai.types.chat import ChatCompletion

from tests.clients.conftest import OPTIONS, PATIENCE, started

PATH = "/v1/chat/completions"
ENDED = ("completed", "failed", "cancelled", "expired")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """The client of a server that keeps files and batches."""
    folder: Path = tmp_path_factory.mktemp("batches")
    command = ("-m", "pagewire.cli.main", "serve", "demo", *OPTIONS, "--batch-dir", str(folder / "kept"))
    for url in started(*command):
        with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
            yield client


def lines(*names: str, **fields: Any) -> bytes:
    """The input of a batch: a request for each name."""
    body: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Hi."}],
        "max_tokens": 3,
    }
    requests = [
        {
            "custom_id": name,
            "method": "POST",
            "url": PATH,
            "body": body | fields | ({"n": -1} if name == "bad" else {}),
        }
        for name in names
    ]
    return "".join(json.dumps(request) + "\n" for request in requests).encode()


def batch_of(client: openai.OpenAI, content: bytes, **fields: Any) -> Batch:
    """A batch that was just begun."""
    file = client.files.create(file=("input.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=PATH, completion_window="24h", **fields)


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    """The batch once it has ended."""
    deadline = time.monotonic() + PATIENCE
    while (now := client.batches.retrieve(batch.id)).status not in ENDED:
        assert time.monotonic() < deadline, now
        time.sleep(0.05)
    return now


def test_a_batch_from_its_file_to_its_answers(client: openai.OpenAI, tmp_path: Path) -> None:
    content = lines("first", "second", "bad")
    (tmp_path / "input.jsonl").write_bytes(content)
    file = client.files.create(file=tmp_path / "input.jsonl", purpose="batch")
    assert (file.filename, file.bytes, file.purpose, file.status) == (
        "input.jsonl",
        len(content),
        "batch",
        "processed",
    )
    assert client.files.retrieve(file.id) == file == client.files.wait_for_processing(file.id)
    assert client.files.content(file.id).read() == content

    metadata = {"what": "a test"}
    made = client.batches.create(
        input_file_id=file.id, endpoint=PATH, completion_window="24h", metadata=metadata
    )
    assert (made.object, made.endpoint, made.input_file_id, made.metadata) == (
        "batch",
        PATH,
        file.id,
        metadata,
    )
    batch = ended(client, made)
    assert batch.status == "completed" and batch.request_counts is not None
    assert batch.created_at <= (batch.in_progress_at or 0) <= (batch.completed_at or 0)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (3, 2, 1)

    assert batch.output_file_id is not None and batch.error_file_id is not None
    rows = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    answers = {row["custom_id"]: ChatCompletion.model_validate(row["response"]["body"]) for row in rows}
    assert sorted(answers) == ["first", "second"]
    assert all(answer.usage and answer.usage.completion_tokens == 3 for answer in answers.values())
    (row,) = map(json.loads, client.files.content(batch.error_file_id).iter_lines())
    assert row["custom_id"] == "bad" and row["response"]["status_code"] == 400

    for name in (file.id, batch.output_file_id, batch.error_file_id):
        deleted = client.files.delete(name)
        assert deleted.deleted and deleted.id == name
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(name)
    assert client.batches.retrieve(batch.id) == batch


def test_a_batch_is_cancelled(client: openai.OpenAI) -> None:
    """It keeps what was answered."""
    batch = batch_of(client, lines(*map(str, range(500)), max_tokens=100))
    cancelled = client.batches.cancel(batch.id)
    assert cancelled.status in ("cancelling", "cancelled")
    batch = ended(client, batch)
    assert batch.status == "cancelled" and batch.cancelled_at is not None
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)
    if batch.output_file_id is not None:
        assert all(
            "response" in json.loads(line) for line in client.files.content(batch.output_file_id).iter_lines()
        )


def test_lists_come_in_pages(client: openai.OpenAI) -> None:
    made = [ended(client, batch_of(client, lines("only"), metadata={"number": str(n)})) for n in range(3)]
    listed = [batch.id for batch in client.batches.list(limit=1)]
    assert listed[:3] == [batch.id for batch in reversed(made)]
    files = [file.id for file in client.files.list(limit=2, purpose="batch")]
    assert files[:3] == [batch.input_file_id for batch in reversed(made)] and len(set(files)) == len(files)
    outputs = [file.id for file in client.files.list(purpose="batch_output")]
    assert {batch.output_file_id for batch in made} <= set(outputs)
    oldest_first = [file.id for file in client.files.list(order="asc", limit=2)]
    assert oldest_first == [file.id for file in client.files.list()][::-1]


def test_what_is_wrong_is_said(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose must be batch"):
        client.files.create(file=("a.txt", b"a"), purpose="assistants")
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_none")
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id="file-none", endpoint=PATH, completion_window="24h")
    file = client.files.create(file=("input.jsonl", lines("one")), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    batch = ended(client, batch_of(client, b"no json\n"))
    assert batch.status == "failed" and batch.errors is not None and batch.errors.data
    assert batch.errors.data[0].line == 1 and batch.errors.data[0].message


def test_a_conversation_from_its_first_item_to_its_end(client: openai.OpenAI) -> None:
    first: Any = {"type": "message", "role": "user", "content": "Hello."}
    conversation = client.conversations.create(items=[first], metadata={"topic": "tests"})
    assert conversation.object == "conversation" and conversation.metadata == {"topic": "tests"}
    assert client.conversations.retrieve(conversation.id) == conversation
    updated = client.conversations.update(conversation.id, metadata={"topic": "clients"})
    assert updated.metadata == {"topic": "clients"}

    second: Any = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Again."}]}
    added = client.conversations.items.create(conversation.id, items=[second]).data
    response = client.responses.create(
        model="demo", input="And now?", conversation=conversation.id, max_output_tokens=3
    )
    assert response.conversation is not None and response.conversation.id == conversation.id
    items: list[Any] = list(client.conversations.items.list(conversation.id, limit=1, order="asc"))
    assert [item.type for item in items] == ["message"] * 4
    assert [item.role for item in items] == ["user", "user", "user", "assistant"]
    assert items[1].id == added[0].id and items[3].id == response.output[0].id
    kept: Any = client.conversations.items.retrieve(items[1].id, conversation_id=conversation.id)
    assert kept == items[1] and kept.content[0].text == "Again."

    left = client.conversations.items.delete(items[1].id, conversation_id=conversation.id)
    assert left.id == conversation.id
    rest: list[Any] = list(client.conversations.items.list(conversation.id))
    assert [item.id for item in rest] == [items[3].id, items[2].id, items[0].id]
    assert client.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(conversation.id)
