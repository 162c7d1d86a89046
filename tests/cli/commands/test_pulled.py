"""`pagewire pull`, `list`, `ps` and `rm`: in this process, on a hub on loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire.cli.main import main
from tests.ipc.files.hub_server import use_hub
from tests.ipc.files.stores import HubHandler, Store, StoreHandler


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("PAGEWIRE_PULLED_DIR", str(tmp_path))
    with Store({"a/b/M-Q4_K_M.gguf": bytes(3_000_000)}).serving(HubHandler) as store:
        use_hub(store, monkeypatch)
        yield store


def test_a_model_comes_and_goes(hub: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "hf:a/b"]) == 0
    said = capsys.readouterr()
    assert said.out == "hf:a/b:Q4_K_M is there: pagewire serve hf:a/b:Q4_K_M\n"
    assert (
        said.err.startswith("pulling manifest\n")
        and ": 3 of 3 MB\n" in said.err
        and said.err.endswith("success\n")
    )
    assert main(["list"]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "SIZE", "PULLED"] and line.split()[:3] == ["hf:a/b:Q4_K_M", "0.00", "GB"]
    assert main(["rm", "hf.co/a/b:q4_k_m"]) == 0
    assert capsys.readouterr().out == "hf:a/b:Q4_K_M is removed\n"
    assert main(["list"]) == 0 and len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (
            ["pull", "a/b"],
            2,
            "pagewire pull: 'a/b' is no model of the Hugging Face hub: write hf:owner/repository",
        ),
        (["rm", "hf:../b"], 2, "pagewire rm: 'hf:../b' is no name of a model"),
        (["pull", "hf:a/b:Q8_0"], 1, "pagewire pull: a/b has no 'Q8_0'; it has: Q4_K_M"),
        (["rm", "hf:a/b"], 1, "pagewire rm: hf:a/b was not pulled"),
        (["ps", "--url", "file:///etc/passwd"], 2, "pagewire ps: --url must begin with http"),
        (["ps", "--url", "http://127.0.0.1:1"], 1, "pagewire ps: no server answers at http://127.0.0.1:1: "),
    ],
)
def test_what_fails_is_said(
    hub: Store, words: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == status
    assert message in capsys.readouterr().err


class PsHandler(StoreHandler):
    """A server with one model in memory."""

    def do_GET(self) -> None:  # noqa: N802 - the name that `http.server` calls
        if not self.is_allowed():
            self.answer(401, b'{"error": "no key"}')
            return
        assert self.path == "/api/ps"
        models = [
            {"name": "a", "size": 2_000_000_000, "context_length": 512, "expires_at": "9999-12-31T23:59:59Z"},
            {"name": "b", "size": 0, "context_length": 8, "expires_at": "2030-01-01T00:00:00Z"},
        ]
        self.answer(200, json.dumps({"models": models}).encode())


def test_the_models_in_memory(capsys: pytest.CaptureFixture[str]) -> None:
    with Store({}, key="Bearer secret").serving(PsHandler) as server:
        assert main(["ps", "--url", server.address, "--api-key", "secret"]) == 0
        _, first, second = capsys.readouterr().out.splitlines()
        assert first.split() == ["a", "2.00", "GB", "512", "always"]
        assert second.split() == ["b", "0.00", "GB", "8", "2030-01-01T00:00:00Z"]
        assert main(["ps", "--url", server.address]) == 1
        assert "the server answered 401" in capsys.readouterr().err
    with Store({"bucket": b""}).serving(HubHandler) as other:
        assert main(["ps", "--url", other.address]) == 1
        assert "the server answered 404" in capsys.readouterr().err
