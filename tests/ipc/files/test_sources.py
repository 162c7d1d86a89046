"""S3 and ModelScope as sources of models: their own clients, against servers on loopback."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagewire.ipc.errors import ModelNotFoundError
from pagewire.ipc.files import s3
from pagewire.ipc.files.adapter_files import adapter_folder
from pagewire.ipc.files.hub import model_folder
from tests.ipc.files.stores import ModelScopeHandler, S3Handler, Store

WEIGHTS = bytes(range(256)) * 40_000  # 10 MB, more than one chunk
FILES = {
    "config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "1_Pooling/config.json": b'{"a": 1}',
    "model.py": b"print()",
    "pytorch_model.bin": b"pickle",
    "original/consolidated.safetensors": b"twice",
}
TAKEN = {"config.json", "model.safetensors", "1_Pooling/config.json"}


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A bucket with a model in a folder, and an adapter and a GGUF file beside it."""
    files = {f"models/tiny/{name}": content for name, content in FILES.items()}
    files |= {"models/tiny/": b"", "adapter/adapter_config.json": b"{}", "gguf/m.gguf": b"GGUF"}
    with Store(files, key="Credential=key-id/").serving(S3Handler) as store:
        monkeypatch.setenv("S3_ENDPOINT_URL", store.address)
        monkeypatch.setenv("S3_ACCESS_KEY_ID", "key-id")
        monkeypatch.setenv("S3_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setitem(s3.RETRIES, "max_retries", 0)
        yield store


@pytest.fixture(scope="module")
def scope(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A repository of ModelScope, whose client reads the address once in a process."""
    store = Store(FILES, key="Bearer token")
    with store.serving(ModelScopeHandler), pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODELSCOPE_ENDPOINT", store.address)
        patch.setenv("MODELSCOPE_CACHE", str(tmp_path_factory.mktemp("modelscope")))
        patch.setenv("PAGEWIRE_USE_MODELSCOPE", "True")
        yield store


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_folder_in_s3(bucket: Store, tmp_path: Path) -> None:
    """What the hub's patterns take, once; each content is kept once, whatever else changes."""
    folder = model_folder("s3://bucket/models/tiny", cache_dir=str(tmp_path))
    assert names(folder) == TAKEN
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert (folder / "1_Pooling/config.json").read_bytes() == FILES["1_Pooling/config.json"]
    assert len(bucket.reads) == 3
    assert model_folder("s3://bucket/models/tiny/", cache_dir=str(tmp_path)) == folder
    assert len(bucket.reads) == 3
    bucket.files["models/tiny/config.json"] = b'{"new": 1}'
    changed = model_folder("s3://bucket/models/tiny", cache_dir=str(tmp_path))
    assert bucket.reads[3:] == [("models/tiny/config.json", 0)]
    assert (changed / "config.json").read_bytes() == b'{"new": 1}'
    assert (folder / "config.json").read_bytes() == b"{}"  # an engine may be reading it


def test_adapters_and_gguf_files_in_s3(bucket: Store, tmp_path: Path) -> None:
    adapter = adapter_folder("s3://bucket/adapter", cache_dir=str(tmp_path))
    assert (adapter / "adapter_config.json").read_bytes() == b"{}"
    file = model_folder("s3://bucket/gguf/m.gguf", cache_dir=str(tmp_path))
    assert (file.name, file.read_bytes()) == ("m.gguf", b"GGUF")


def test_a_download_goes_on_where_it_ended(bucket: Store, tmp_path: Path) -> None:
    """After the connection has broken off twice, and in another process after a failure."""
    bucket.files = {name: content for name, content in bucket.files.items() if "model.safe" in name}
    bucket.breaks = [3_000_000, 0, 4_000_000]
    folder = model_folder("s3://bucket/models/tiny", cache_dir=str(tmp_path / "1"), tokenizer_only=False)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    firsts = [first for _, first in bucket.reads]
    assert len(firsts) == 4 and firsts == sorted(firsts) and 0 < firsts[1] == firsts[2] <= 3_000_000

    bucket.reads, bucket.breaks = [], [5_000_000, *[0] * s3.MAX_FAILURES]
    with pytest.raises(ModelNotFoundError, match="s3://bucket/models/tiny cannot be read"):
        model_folder("s3://bucket/models/tiny", cache_dir=str(tmp_path / "2"))
    folder = model_folder("s3://bucket/models/tiny", cache_dir=str(tmp_path / "2"))
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert 0 < bucket.reads[-1][1] <= 5_000_000
    assert not list(tmp_path.rglob("*.part"))


def test_several_processes_download_a_file_once(bucket: Store, tmp_path: Path) -> None:
    """Threads stand for them: each opens the file anew, and the locks are those of the open files."""
    folders: list[Path] = []
    threads = [
        threading.Thread(
            target=lambda: folders.append(model_folder("s3://bucket/models/tiny", cache_dir=str(tmp_path)))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(folders)) == 1 and len(folders) == 4 and names(folders[0]) == TAKEN
    assert len(bucket.reads) == 3
    assert not list(tmp_path.rglob("*.part"))


def test_what_s3_refuses(bucket: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(address: str, reason: str) -> None:
        with pytest.raises(ModelNotFoundError, match=reason):
            model_folder(address, cache_dir=str(tmp_path))

    refused("s3://bucket/other", "s3://bucket/other cannot be read: there are no files of this name")
    refused("s3://buckets/tiny", r"cannot be read: .*NoSuchBucket.*; check the bucket's name, AWS_ACCESS")
    refused("s3://m.gguf", r"no GGUF file s3://m\.gguf")
    refused("s3://bucket/gguf", r"s3://bucket/gguf has no \*.safetensors files")
    with pytest.raises(ValueError, match="revision 'v1': s3://bucket/models/tiny has none; leave"):
        model_folder("s3://bucket/models/tiny", revision="v1")
    bucket.files["models/tiny/../../evil.json"] = b"{}"
    refused("s3://bucket/models/tiny", r"cannot be read: .*evil\.json")
    assert not list(tmp_path.parent.glob("**/evil.json"))
    del bucket.files["models/tiny/../../evil.json"]
    with monkeypatch.context() as patch:
        patch.setattr(s3, "MAX_FILES", 3)
        refused(
            "s3://bucket/models/tiny", "cannot be read: it holds over 3 files; name the folder of one model"
        )
    bucket.key = "other"
    refused("s3://bucket/models/tiny", "cannot be read: .*403 Forbidden.*AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:9")
    refused("s3://bucket/models/tiny", "cannot be read: .*AWS_ENDPOINT_URL for another store")


def test_a_file_that_changes_meanwhile(
    bucket: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = s3.fetch_object

    def changing(store: Any, blobs: Path, file: s3.StoredFile) -> None:
        bucket.files[file.path] = b"[]"
        fetch(store, blobs, file)

    monkeypatch.setattr(s3, "fetch_object", changing)
    with pytest.raises(ModelNotFoundError, match="a file has changed meanwhile: start again"):
        model_folder("s3://bucket/models/tiny", cache_dir=str(tmp_path))


def test_a_repository_of_modelscope(scope: Store, tmp_path: Path) -> None:
    """Its client gets the patterns of the hub, the revision and the token."""
    folder = model_folder("owner/model", token="token", revision="v1", cache_dir=str(tmp_path))
    assert names(folder) == TAKEN and (folder / "model.safetensors").read_bytes() == WEIGHTS
    reads = len(scope.reads)
    assert model_folder("owner/model", token="token", revision="v1", cache_dir=str(tmp_path)) == folder
    assert len(scope.reads) == reads


def test_what_modelscope_refuses(scope: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ModelNotFoundError, match=r"no model 'owner/other': neither .* a repository of ModelScope"
    ):
        model_folder("owner/other", token="token", cache_dir=str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="owner/model of ModelScope may not be read: give its token"):
        model_folder("owner/model", token="wrong", cache_dir=str(tmp_path))
    monkeypatch.setenv("PAGEWIRE_USE_MODELSCOPE", "maybe")
    with pytest.raises(ValueError, match="PAGEWIRE_USE_MODELSCOPE must be 0 or 1, got 'maybe'"):
        model_folder("owner/model", cache_dir=str(tmp_path))


def test_without_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install."""
    for name in ("obstore", "obstore.store", "obstore.exceptions", "modelscope_hub"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ModelNotFoundError, match=r"s3://bucket/tiny: S3 needs .* pip install 'pagewire\[s3\]'"
    ):
        model_folder("s3://bucket/tiny")
    monkeypatch.setenv("PAGEWIRE_USE_MODELSCOPE", "1")
    with pytest.raises(ModelNotFoundError, match=r"pip install 'pagewire\[modelscope\]'"):
        model_folder("owner/model")
