"""Files and batches over HTTP, on a core that answers by itself; what is left of them after a restart."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagewire.frontend.api.async_llm import AsyncLLM
from pagewire.frontend.server.batches import runner
from pagewire.frontend.server.batches.folder import BatchFolder
from pagewire.frontend.server.batches.protocol import BatchObject
from pagewire.frontend.server.http.errors import APIError
from pagewire.ipc.wire.messages import Abort, Submit
from tests.frontend.conftest import FakeCore
from tests.frontend.server.client import Answer, Client
from tests.frontend.server.http.test_tenants import ALICE, BOB, KeyFile

FORM = {"content-type": "multipart/form-data; boundary=edge"}
PATIENCE = 20.0


def upload(data: bytes, purpose: str = "batch", filename: str = "in.jsonl") -> bytes:
    """A form with a file."""
    file = (
        f'--edge\r\nContent-Disposition: form-data; name="file"; filename="{filename}"\r\n\r\n'.encode()
        + data
    )
    return file + (
        f'\r\n--edge\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n--edge--\r\n'.encode()
    )


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> bytes:
    body = {"prompt": "w5 w6", "max_tokens": 3} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode() + b"\n"


class Session:
    """Calls of one client, in one event loop."""

    def __init__(self, client: Client, **headers: str) -> None:
        self.client, self.headers = client, headers

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        return await self.client.call(method, path, body, self.headers | headers).answer()

    async def upload(self, data: bytes) -> str:
        answer = await self.call("POST", "/v1/files", upload(data), **FORM)
        assert answer.status == 200, answer.body
        return str(answer.json["id"])

    async def create(self, file: str, **fields: Any) -> dict[str, Any]:
        fields = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"} | fields
        answer = await self.call("POST", "/v1/batches", fields)
        assert answer.status == 200, answer.body
        return answer.json  # type: ignore[no-any-return]

    async def until(self, name: str, done: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The batch, once something is true of it."""
        end = time.monotonic() + PATIENCE
        while not done(batch := (await self.call("GET", f"/v1/batches/{name}")).json):
            assert time.monotonic() < end, batch
            await asyncio.sleep(0.005)
        return batch  # type: ignore[no-any-return]

    async def ended(self, name: str) -> dict[str, Any]:
        return await self.until(
            name, lambda batch: batch["status"] in ("completed", "failed", "cancelled", "expired")
        )

    async def rows(self, file: str) -> list[dict[str, Any]]:
        answer = await self.call("GET", f"/v1/files/{file}/content")
        assert answer.status == 200
        return [json.loads(row) for row in answer.body.splitlines()]


@pytest.fixture
def batched(serve: Callable[..., Client], core: FakeCore, tmp_path: Path) -> Client:
    core.auto = True
    return serve(batch_dir=str(tmp_path / "batches"))


def test_a_batch_is_answered(batched: Client) -> None:
    async def work() -> None:
        session = Session(batched)
        good = [line(f"r{number}") for number in range(50)]
        file = await session.upload(b"".join([*good, b"\n", line("bad", max_tokens=-1)]))
        created = await session.create(file, metadata={"name": "night"})
        assert (created["status"], created["object"]) == ("validating", "batch")
        batch = await session.ended(created["id"])
        assert batch["status"] == "completed" and batch["metadata"] == {"name": "night"}
        assert batch["request_counts"] == {"total": 51, "completed": 50, "failed": 1}
        assert batch["created_at"] <= batch["in_progress_at"] <= batch["completed_at"]
        rows = await session.rows(batch["output_file_id"])
        assert {row["custom_id"] for row in rows} == {f"r{number}" for number in range(50)}
        assert all(row["response"]["body"]["choices"][0]["finish_reason"] == "length" for row in rows)
        (failed,) = await session.rows(batch["error_file_id"])
        assert (failed["custom_id"], failed["response"]["status_code"]) == ("bad", 400)
        files = (await session.call("GET", "/v1/files")).json
        assert {each["purpose"] for each in files["data"]} == {"batch", "batch_output"} and len(
            files["data"]
        ) == 3
        assert [each["id"] for each in (await session.call("GET", "/v1/batches")).json["data"]] == [
            batch["id"]
        ]

    batched.run(work)


def test_files_are_kept_listed_and_deleted(batched: Client) -> None:
    async def work() -> None:
        session = Session(batched)
        names = [await session.upload(line(f"r{number}")) for number in range(5)]
        first = (await session.call("GET", "/v1/files?limit=2")).json
        assert [each["id"] for each in first["data"]] == names[:2:-1] and first["has_more"]
        rest = (await session.call("GET", f"/v1/files?after={first['last_id']}")).json
        assert [each["id"] for each in rest["data"]] == names[2::-1] and not rest["has_more"]
        shown = (await session.call("GET", f"/v1/files/{names[0]}")).json
        assert shown["bytes"] == len(line("r0")) and shown["filename"] == "in.jsonl"
        deleted = (await session.call("DELETE", f"/v1/files/{names[0]}")).json
        assert deleted == {"id": names[0], "object": "file", "deleted": True}
        for path in (
            f"/v1/files/{names[0]}",
            f"/v1/files/{names[0]}/content",
            "/v1/files/..",
            "/v1/batches/x",
        ):
            assert (await session.call("GET", path)).status == 404
        assert (await session.call("GET", f"/v1/files?after={names[0]}")).status == 404

    batched.run(work)


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (b"", "empty_file"),
        (b"nonsense\n", "invalid_json_line"),
        (line("a") + line("a"), "duplicate_custom_id"),
        (line("a", "/v1/embeddings"), "invalid_url"),
        (line("a", "/v1/responses"), "mismatched_endpoint"),
        (line("a", stream=True), "invalid_request"),
        (b"".join(line(f"r{number}") for number in range(12)), "too_many_requests"),
    ],
)
def test_bad_input_fails_before_anything_is_answered(
    batched: Client, core: FakeCore, monkeypatch: pytest.MonkeyPatch, lines: bytes, code: str
) -> None:
    monkeypatch.setattr(runner, "MAX_LINES", 10)

    async def work() -> None:
        session = Session(batched)
        batch = await session.ended((await session.create(await session.upload(lines)))["id"])
        assert batch["status"] == "failed" and batch["errors"]["data"][-1]["code"] == code
        assert not core.submitted

    batched.run(work)


def test_what_cannot_be_asked_for(batched: Client, serve: Callable[..., Client]) -> None:
    for body, param in (
        (upload(b"x", purpose="fine-tune"), "purpose"),
        (upload(b"x").replace(b"purpose", b"expires_after[anchor]"), "expires_after[anchor]"),
    ):
        answer = batched.post("/v1/files", body, **FORM)
        assert (answer.status, answer.error["param"]) == (400, param)
    assert batched.post("/v1/batches", {"input_file_id": "file-x"}).status == 422
    fields = {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"}
    assert batched.post("/v1/batches", fields).status == 404
    assert batched.post("/v1/batches", fields | {"endpoint": "/v1/embeddings"}).status in (400, 422)
    for path in ("/v1/files", "/v1/batches"):
        answer = serve().get(path)
        assert answer.status == 404 and "--batch-dir" in answer.error["message"]


def test_a_cancelled_batch_keeps_what_was_answered(
    serve: Callable[..., Client], core: FakeCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open requests end, and no more are sent."""
    monkeypatch.setattr(runner, "CONCURRENCY", 2)
    client = serve(batch_dir=str(tmp_path))

    async def work() -> None:
        session = Session(client)
        created = await session.create(await session.upload(b"".join(line(f"r{n}") for n in range(20))))
        await session.until(created["id"], lambda _: len(core.submitted) == 2)
        file = created["input_file_id"]
        assert (await session.call("DELETE", f"/v1/files/{file}")).status == 409
        cancelled = await session.call("POST", f"/v1/batches/{created['id']}/cancel")
        assert cancelled.json["status"] == "cancelling"
        for key in list(core.submitted):
            core.tokens(key, [2, 3, 4], finish_reason="length")
        batch = await session.ended(created["id"])
        assert batch["status"] == "cancelled" and batch["cancelled_at"] >= batch["cancelling_at"]
        assert batch["request_counts"] == {"total": 20, "completed": 2, "failed": 0}
        assert len(await session.rows(batch["output_file_id"])) == 2
        assert (await session.call("POST", f"/v1/batches/{created['id']}/cancel")).status == 409

    client.run(work)
    assert len(core.submitted) == 2


def test_a_batch_that_takes_too_long_expires(
    serve: Callable[..., Client], core: FakeCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewire.frontend.server.batches.routes.WINDOW_SECONDS", 0)
    client = serve(batch_dir=str(tmp_path))

    async def work() -> None:
        session = Session(client)
        created = await session.create(await session.upload(line("a") + line("b")))
        batch = await session.ended(created["id"])
        assert batch["status"] == "expired" and batch["output_file_id"] is None
        rows = await session.rows(batch["error_file_id"])
        assert [(row["custom_id"], row["error"]["code"]) for row in rows] == [
            ("a", "batch_expired"),
            ("b", "batch_expired"),
        ]

    client.run(work)


def test_tenants_see_their_own_only(serve: Callable[..., Client], core: FakeCore, tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys")
    keys.write(alice="", bob="")
    core.auto = True
    client = serve(api_key_file=str(keys.path), batch_dir=str(tmp_path / "kept"), batch_dir_bytes=20_000)

    async def work() -> None:
        alice, bob = Session(client, **ALICE), Session(client, **BOB)
        file = await alice.upload(line("a"))
        batch = await alice.ended((await alice.create(file))["id"])
        assert batch["status"] == "completed"
        assert all(request.tenant == "alice" for request in core.submitted.values()) and core.submitted
        for path in (
            f"/v1/files/{file}",
            f"/v1/files/{file}/content",
            f"/v1/files/{batch['output_file_id']}/content",
            f"/v1/batches/{batch['id']}",
        ):
            assert (await bob.call("GET", path)).status == 404
            assert (await alice.call("GET", path)).status == 200
        fields = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        assert (await bob.call("POST", "/v1/batches", fields)).status == 404
        assert (await bob.call("GET", "/v1/files")).json["data"] == []
        full = await alice.call("POST", "/v1/files", upload(b"x" * 19_000), **FORM)
        assert (full.status, full.error["code"]) == (413, "storage_full")
        await bob.upload(b"x" * 15_000)

    client.run(work)


def test_a_restart_keeps_files_and_says_what_it_ended(
    engine: AsyncLLM, core: FakeCore, tmp_path: Path
) -> None:
    client = Client(engine, batch_dir=str(tmp_path))

    async def begin() -> tuple[str, str]:
        session = Session(client)
        core.auto = True
        done = await session.ended((await session.create(await session.upload(line("a"))))["id"])
        core.auto = False
        waiting = await session.create(await session.upload(line("b")))
        await session.until(waiting["id"], lambda _: len(core.submitted) == 2)
        return str(done["id"]), str(waiting["id"])

    done, waiting = client.run(begin)
    assert isinstance(core.expect(Submit), Submit) and isinstance(core.expect(Abort), Abort)  # none runs on
    with pytest.raises(ValueError, match="another server"):
        BatchFolder(tmp_path, 1000)
    del client
    gc.collect()
    client = Client(engine, batch_dir=str(tmp_path))

    async def look() -> None:
        session = Session(client)
        kept = (await session.call("GET", f"/v1/batches/{done}")).json
        assert kept["status"] == "completed" and len(await session.rows(kept["output_file_id"])) == 1
        ended = (await session.call("GET", f"/v1/batches/{waiting}")).json
        assert ended["status"] == "failed" and ended["errors"]["data"][0]["code"] == "server_restarted"
        assert ended["output_file_id"] is None and ended["failed_at"]

    client.run(look)


def test_files_are_this_users_only(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path / "own", 10_000)
    file = asyncio.run(folder.add_file("a", "x", b"x"))
    assert folder.path(file.id).read_bytes() == b"x"
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "own").glob("file-*")}
    assert set(modes.values()) == {0o600} and len(modes) == 2
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ValueError, match="open to other users"):
        BatchFolder(tmp_path / "open", 10_000)


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be used"):
        BatchFolder(tmp_path / "file", 1000)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "x.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be used"):
        BatchFolder(tmp_path / "bad", 1000)


def test_results_that_have_no_room_end_the_batch(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path, 9000)

    async def work() -> None:
        file = await folder.add_file("a", "x", b"x" * 5000)
        batch = BatchObject(
            id="batch_1",
            endpoint="/v1/completions",
            input_file_id=file.id,
            completion_window="24h",
            created_at=0,
            expires_at=1,
        )
        output, errors = folder.open_results(batch)
        with output, errors:
            writer = runner.ResultWriter(folder, "a", batch, output, errors)
            result = runner.Result("r", "c", error=runner.Failure("code", "m" * 3000))
            writer.write(result)
            with pytest.raises(APIError, match="delete some"):
                writer.write(result)
        folder.keep_results("a", batch)
        assert batch.output_file_id is None and folder.file("a", batch.error_file_id or "").num_bytes > 3000

    asyncio.run(work())
