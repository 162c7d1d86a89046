"""Traces of the workers over HTTP: only where the operator has named a folder for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.frontend.conftest import FakeCore
from tests.frontend.server.client import Client

ADMIN = {"x-pagewire-admin": "1"}


def test_profiling_is_off_without_a_folder(
    serve: Callable[..., Client], core: FakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    for name in ("start_profile", "stop_profile"):
        core.calls[name] = lambda name=name: called.append(name)
    monkeypatch.delenv("PAGEWIRE_TORCH_PROFILER_DIR", raising=False)
    assert serve().post("/start_profile", {}, **ADMIN).status == 404
    client = serve(enable_admin=True)
    answer = client.post("/start_profile", {}, **ADMIN)
    assert (answer.status, answer.error["code"]) == (400, "profiling_off")
    assert "set PAGEWIRE_TORCH_PROFILER_DIR" in answer.error["message"] and not called
    monkeypatch.setenv("PAGEWIRE_TORCH_PROFILER_DIR", "/traces")
    assert client.post("/start_profile", {}).status == 403
    assert client.post("/start_profile", {}, **ADMIN).json == {"profiling": True}
    assert client.post("/stop_profile", {}, **ADMIN).json == {"profiling": False}
    assert called == ["start_profile", "stop_profile"]
