from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

import pagewire.demo
from pagewire.ipc.errors import ModelNotFoundError
from pagewire.ipc.hub import model_folder, read_json


def repository(tmp_path: Path, *files: str) -> tuple[list[dict[str, Any]], Callable[..., str]]:
    """The calls that are made of a hub with one repository, and its function that takes them."""
    calls: list[dict[str, Any]] = []

    def snapshot_download(name: str, **options: Any) -> str:
        calls.append({"name": name, **options})
        for file in files:
            (tmp_path / file).touch()
        return str(tmp_path)

    return calls, snapshot_download


def refusing(error: Exception) -> Callable[..., str]:
    def snapshot_download(name: str, **options: Any) -> str:
        raise error

    return snapshot_download


def hub_error(kind: type[Exception]) -> Exception:
    """An error of the hub's client, which needs a response that a test has not."""
    error = kind.__new__(kind)
    Exception.__init__(error, "from the hub")
    return error


def test_the_demo_is_a_folder_of_the_package() -> None:
    assert model_folder("demo") == Path(pagewire.demo.__path__[0])


def test_a_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert model_folder(str(tmp_path)) == tmp_path.resolve()
    monkeypatch.chdir(tmp_path.parent)
    assert model_folder(tmp_path.name) == tmp_path.resolve()
    assert model_folder(f"./{tmp_path.name}") == tmp_path.resolve()
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert model_folder(f"~/{tmp_path.name}") == tmp_path.resolve()


def test_a_folder_without_a_config_is_no_model_but_may_be_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"holds no config\.json"):
        model_folder(str(tmp_path))
    assert model_folder(str(tmp_path), tokenizer_only=True) == tmp_path.resolve()


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./none", "../none", "~/none/none", "~nobody-of-that-name/model", "a/b/c"]
)
def test_a_missing_folder(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=f"no model folder {name}"):
        model_folder(name)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelNotFoundError, match="no model folder"):
        model_folder(str(tmp_path / "file"))


@pytest.mark.parametrize("name", ["not a name", "a" * 5000, "nul\0byte"])
def test_a_name_that_can_be_neither_folder_nor_repository(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="neither a local folder nor a repository"):
        model_folder(name)


def test_offline_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError) as caught:
        model_folder("someone/some-model", cache_dir=str(tmp_path))
    assert "someone/some-model is not a local folder, and the hub could not be reached" in str(caught.value)
    assert "give a model folder, or model='demo'" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (hub_error(GatedRepoError), "accept its terms on the hub, then give hf_token or set HF_TOKEN"),
        (hub_error(RepositoryNotFoundError), r"a private one needs hf_token"),
        (ConnectionError("no route\nto host"), r"could not be reached \(no route\)"),
        (TimeoutError(), r"could not be reached \(TimeoutError\)"),
    ],
)
def test_each_refusal_of_the_hub_has_its_remedy(
    monkeypatch: pytest.MonkeyPatch, error: Exception, remedy: str
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refusing(error))
    with pytest.raises(ModelNotFoundError, match=remedy):
        model_folder("someone/some-model")


def test_weights_are_taken_as_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, download = repository(tmp_path, "config.json", "model.safetensors")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert model_folder("a/b", revision="v1", token="secret", cache_dir="/cache") == tmp_path
    (call,) = calls
    assert (call["name"], call["revision"], call["token"], call["cache_dir"]) == (
        "a/b",
        "v1",
        "secret",
        "/cache",
    )
    assert "*.safetensors" in call["allow_patterns"] and "*.bin" not in call["allow_patterns"]


def test_older_weights_only_where_there_are_no_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, download = repository(tmp_path, "config.json")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    model_folder("a/b")
    assert ["*.bin" in call["allow_patterns"] for call in calls] == [False, True]


def test_a_tokenizer_comes_without_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, download = repository(tmp_path, "tokenizer.json")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    model_folder("a/b", tokenizer_only=True)
    (call,) = calls
    assert not {"*.safetensors", "*.bin"} & set(call["allow_patterns"])


@pytest.mark.parametrize("tokenizer_only", [False, True])
def test_a_folder_has_no_revisions(tmp_path: Path, tokenizer_only: bool) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("demo", str(tmp_path)):
        with pytest.raises(ValueError, match=r"'v1': .* is a local folder, which has no revisions"):
            model_folder(name, revision="v1", tokenizer_only=tokenizer_only)


def test_reading_json(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    assert read_json(file) == {}
    file.write_text('{"a": "\u00e4"}', encoding="utf-8")
    assert read_json(file) == {"a": "\u00e4"}
    file.write_text("[1]")
    with pytest.raises(ValueError, match=r"config\.json must hold a JSON object"):
        read_json(file)
    file.write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        read_json(file)
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        read_json(file)
