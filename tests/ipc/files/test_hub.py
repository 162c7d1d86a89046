from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from huggingface_hub.utils import filter_repo_objects

import pagewire.demo
from pagewire.ipc.errors import ModelNotFoundError
from pagewire.ipc.files.hub import (
    MAX_FILE_BYTES,
    POOLING_FILES,
    check_files,
    model_folder,
    read_file,
    read_json,
)


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


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"hello", "a model is a folder with config.json"),
        (b"GGUF\3\0", "a GGUF file has a name that ends with"),
    ],
)
def test_a_file_is_no_model(
    content: bytes, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.txt").write_bytes(content)
    monkeypatch.chdir(tmp_path)
    for name in ("notes.txt", "./notes.txt", str(tmp_path / "notes.txt")):
        with pytest.raises(ModelNotFoundError, match=f"is a file, and no model: {why}"):
            model_folder(name)


@pytest.mark.parametrize("name", ["not a name", "a" * 5000, "nul\0byte"])
def test_a_name_that_can_be_neither_folder_nor_repository(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="neither a local folder nor a repository"):
        model_folder(name)


def test_a_gguf_file_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "m.gguf"
    file.touch()
    for tokenizer_only in (False, True):
        for name in (str(file), str(tmp_path)):
            assert model_folder(name, tokenizer_only=tokenizer_only) == file
    monkeypatch.chdir(tmp_path)
    assert model_folder("m.gguf") == model_folder("./m.gguf", load_format="gguf") == file
    with pytest.raises(ValueError, match=r"'v1': .* is a local GGUF file, which has no revisions"):
        model_folder(str(file), revision="v1")
    for load_format in ("safetensors", "pt"):
        with pytest.raises(ValueError, match=f"load_format='{load_format}' reads no GGUF files"):
            model_folder(str(file), load_format=load_format)
    with pytest.raises(ModelNotFoundError, match=r"of the hub, it would be owner/repository/file\.gguf"):
        model_folder(str(tmp_path / "other.gguf"))


def test_a_split_gguf_file_is_named_by_any_part(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    for part in parts:
        part.touch()
    assert {model_folder(str(name)) for name in (*parts, tmp_path)} == {parts[0]}


def test_which_model_of_a_folder(tmp_path: Path) -> None:
    """A Hugging Face model is taken before a GGUF file beside it, but not a configuration alone."""
    file = tmp_path / "m.gguf"
    for name in (file.name, "mmproj-f16.gguf", "config.json"):
        (tmp_path / name).write_text("{}")
    assert model_folder(str(tmp_path)) == file
    assert model_folder(str(tmp_path), load_format="dummy") == tmp_path
    (tmp_path / "model.safetensors").touch()
    assert model_folder(str(tmp_path)) == tmp_path
    assert model_folder(str(tmp_path), load_format="gguf") == file
    (tmp_path / "n.gguf").touch()
    with pytest.raises(
        ModelNotFoundError, match=r"not hold one GGUF model, but m\.gguf, n\.gguf; name the file itself"
    ):
        model_folder(str(tmp_path), load_format="gguf")
    file.unlink()
    (tmp_path / "n.gguf").unlink()
    with pytest.raises(ModelNotFoundError, match="not hold one GGUF model, but none"):
        model_folder(str(tmp_path), load_format="gguf")


def test_a_gguf_file_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, download = repository(tmp_path, "m-Q4.gguf", "n-00001-of-00002.gguf")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert model_folder("a/b/m-Q4.gguf", revision="v1") == tmp_path / "m-Q4.gguf"
    assert model_folder("a/b/n-00002-of-00002.gguf") == tmp_path / "n-00001-of-00002.gguf"
    assert [(call["name"], call["allow_patterns"]) for call in calls] == [
        ("a/b", ["m-Q4.gguf"]),
        ("a/b", ["n-00001-of-00002.gguf", "n-00002-of-00002.gguf"]),
    ]
    with pytest.raises(ModelNotFoundError, match=r"a/b has no file x/y\.gguf"):
        model_folder("a/b/x/y.gguf")
    for name in ("../b/m.gguf", "a/b/../../m.gguf", "m.gguf"):
        with pytest.raises(ModelNotFoundError, match=r"no GGUF file .*m\.gguf"):
            model_folder(name)
    with pytest.raises(ModelNotFoundError, match=r"name the GGUF file, too: a/b/file\.gguf"):
        model_folder("a/b", load_format="gguf")
    assert len(calls) == 3


def test_offline_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError) as caught:
        model_folder("someone/some-model", cache_dir=str(tmp_path))
    assert "someone/some-model is not a local folder, and the hub could not be reached" in str(caught.value)
    assert "give a model folder, or demo" in str(caught.value)
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


LLAMA = [
    "config.json",
    "model-00001-of-00001.safetensors",
    "model.safetensors.index.json",
    "original/params.json",
]
LLAMA += ["original/consolidated.safetensors", "original/a/b.safetensors", "2_Dense/model.safetensors"]
MISTRAL = [
    "config.json",
    "model.safetensors",
    "consolidated.safetensors",
    "consolidated.safetensors.index.json",
]


@pytest.mark.parametrize(
    ("files", "options", "left_out"),
    [
        (LLAMA, {}, {file for file in LLAMA if file.startswith("original/")}),
        (LLAMA, {"ignore_patterns": ["2_*"]}, {"2_Dense/model.safetensors", "original/params.json"}),
        (
            LLAMA,
            {"ignore_patterns": "**/*.safetensors"},
            {f for f in LLAMA if not f.startswith(("config", "model.s"))},
        ),
        (MISTRAL, {}, {"consolidated.safetensors", "consolidated.safetensors.index.json"}),
    ],
)
def test_weights_that_are_there_twice_are_downloaded_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: list[str],
    options: dict[str, Any],
    left_out: set[str],
) -> None:
    """By the patterns as the hub's client reads them."""
    fetched: list[str] = []

    def snapshot_download(name: str, *, allow_patterns: Any, ignore_patterns: Any, **others: Any) -> str:
        fetched.extend(
            filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        )
        (tmp_path / "model.safetensors").touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    model_folder("a/b", **options)
    assert set(files) - set(fetched) == left_out


CODE = {"*.bin", "*.bin.index.json", "*.py"}  # what can run code of its author


@pytest.mark.parametrize(
    ("options", "fetched"),
    [
        ({}, set()),
        ({"load_format": "safetensors"}, set()),
        ({"load_format": "dummy"}, set()),
        ({"load_format": "pt"}, {"*.bin", "*.bin.index.json"}),
        ({"trust_remote_code": True}, {"*.py"}),
        ({"tokenizer_only": True}, set()),
        ({"tokenizer_only": True, "trust_remote_code": True}, {"*.py"}),
    ],
)
def test_what_can_run_code_is_fetched_on_request_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], fetched: set[str]
) -> None:
    calls, download = repository(tmp_path, "config.json", "model.safetensors", "pytorch_model.bin")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    model_folder("a/b", **options)
    (call,) = calls
    assert CODE & set(call["allow_patterns"]) == fetched
    tokenizer_only = bool(options.get("tokenizer_only"))
    assert set(POOLING_FILES).isdisjoint(call["allow_patterns"]) == tokenizer_only
    assert not any(
        Path(name).match(pattern)
        for name in ("x.py", "x.bin")
        for pattern in call["allow_patterns"]
        if pattern not in CODE
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, r"has no \*\.safetensors files, which load_format='auto' takes"),
        ({"load_format": "pt"}, r"has no \*\.bin files, which load_format='pt' takes"),
    ],
)
def test_a_repository_without_the_weights_asked_for_is_refused_with_the_alternative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], text: str
) -> None:
    calls, download = repository(tmp_path, "config.json")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(
        ModelNotFoundError, match=text + ".*; 'auto' takes .safetensors files, 'pt' takes .bin files"
    ):
        model_folder("a/b", **options)
    assert len(calls) == 1


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
    file.write_text("[" * 200_000)
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        read_json(file)
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        read_json(file)


def test_files_of_a_model_folder_are_bounded_and_never_waited_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345678")
    assert read_file(tmp_path / "file", 8) == b"12345678"
    with pytest.raises(ValueError, match="has over 7 bytes, the most that is read"):
        read_file(tmp_path / "file", 7)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ValueError, match="is not a regular file"):
            read_file(path)


def test_a_library_reads_only_tokenizers_that_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    (tmp_path / "additional_chat_templates").mkdir()
    check_files(tmp_path)
    os.truncate(tmp_path / "tokenizer.json", MAX_FILE_BYTES + 1)  # takes no space
    with pytest.raises(ValueError, match=r"tokenizer\.json has over 268435456 bytes"):
        check_files(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match="is not a regular file"):
        check_files(tmp_path)
