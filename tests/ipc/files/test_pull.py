"""Models that are pulled from a hub on loopback: whole, broken off, changed, refused and removed."""

from __future__ import annotations

import json
import threading
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagewire.ipc.errors import ModelNotFoundError
from pagewire.ipc.files import pull as pulling
from pagewire.ipc.files import repository
from pagewire.ipc.files.hub import model_folder
from pagewire.ipc.files.hub_names import HubName, hub_name
from pagewire.ipc.files.pull import PullProgress, PullStoppedError, pull
from pagewire.ipc.files.pulled import (
    PulledModel,
    lock_model,
    pulled_models,
    pulled_root,
    remove,
    weights_path,
)
from pagewire.ipc.files.repository import RepositoryFile
from tests.ipc.files.hub_server import use_hub
from tests.ipc.files.stores import HubHandler, Store

WEIGHTS = bytes(range(256)) * 12_000  # 3 MB: several chunks
FILES = {
    "a/gguf/README.md": b"text",
    "a/gguf/config.json": b"{}",
    "a/gguf/M-Q4_K_M.gguf": WEIGHTS,
    "a/gguf/M-Q8_0.gguf": WEIGHTS[::-1],
    "a/gguf/mmproj-M-f16.gguf": b"GGUF projector",
    "a/split/Q2_K/M-Q2_K-00001-of-00002.gguf": WEIGHTS,
    "a/split/Q2_K/M-Q2_K-00002-of-00002.gguf": b"GGUF small",
    "a/plain/config.json": b'{"a": 1}',
    "a/plain/model.safetensors": WEIGHTS,
    "a/plain/1_Pooling/config.json": b"{}",
    "a/plain/original/model.safetensors": WEIGHTS,
    "a/plain/model.py": b"print()",
    "a/plain/pytorch_model.bin": b"pickle",
    "a/nothing/README.md": b"text",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A hub, and folders of their own for what is pulled, and for the hub's cache."""
    monkeypatch.setenv("PAGEWIRE_PULLED_DIR", str(tmp_path / "pulled"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(pulling, "RETRY_SECONDS", 0.0)
    with Store(FILES).serving(HubHandler) as store:
        use_hub(store, monkeypatch)
        yield store


def pulled(
    name: str, token: str | None = None, stop: threading.Event | None = None
) -> tuple[PulledModel, list[Any]]:
    """Pull a model, and return what was said meanwhile."""
    steps: list[PullProgress] = []
    given = hub_name(name)
    assert given is not None
    return pull(given, token, steps.append, stop or threading.Event()), steps


def names() -> list[str]:
    return [model.name for model in pulled_models()]


def test_a_quantisation_of_a_repository(hub: Store, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "pagewire"):
        model, steps = pulled("hf.co/a/gguf")
    assert (
        "hf:a/gguf is M-Q4_K_M.gguf of a/gguf; its projector of pictures (mmproj) is left out" in caplog.text
    )
    assert model.name == "hf:a/gguf:Q4_K_M" and names() == [model.name]
    path = weights_path(model)
    assert path.read_bytes() == WEIGHTS and pulled_root() in path.parents
    assert model_folder("hf:a/gguf:q4_k_m") == model_folder("hf:a/gguf") == path
    assert [read for read, _ in hub.reads] == ["a/gguf/M-Q4_K_M.gguf"]
    assert [step.status for step in steps if not step.digest] == [
        "pulling manifest",
        "verifying sha256 digest",
        "writing manifest",
        "success",
    ]
    sizes = [step.completed for step in steps if step.digest]
    assert sizes == sorted(sizes) and sizes[-1] == len(WEIGHTS)
    again, steps = pulled("hf:a/gguf:Q4_K_M")
    assert again.content == model.content and len(hub.reads) == 1
    assert [step.status for step in steps] == ["pulling manifest", "success"]


def test_all_parts_of_a_split_file(hub: Store) -> None:
    model, _ = pulled("hf:a/split:Q2_K")
    path = weights_path(model)
    assert path.name == "M-Q2_K-00001-of-00002.gguf" and len(model.files) == 2
    assert path.with_name("M-Q2_K-00002-of-00002.gguf").read_bytes() == b"GGUF small"
    assert model.num_bytes == len(WEIGHTS) + 10


def test_a_repository_without_gguf_files(hub: Store) -> None:
    """No pickles, no code, nothing twice; each file is checked, small ones by the digest that Git gives them."""
    model, _ = pulled("hf:a/plain")
    folder = weights_path(model)
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert model.name == "hf:a/plain"
    assert found == {"config.json", "model.safetensors", "1_Pooling/config.json"}
    assert model_folder("hf:a/plain") == folder


def test_a_pull_goes_on_where_it_broke_off(hub: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.breaks = [2_000_000]
    _, steps = pulled("hf:a/gguf")
    assert [first for _, first in hub.reads] == [0, 2_000_000]
    assert "success" in [step.status for step in steps]
    monkeypatch.setattr(pulling, "MAX_FAILURES", 2)
    hub.reads, hub.breaks = [], [1_500_000, 0, 0]
    with pytest.raises(ModelNotFoundError, match=r"the hub does not give M-Q8_0\.gguf of a/gguf: "):
        pulled("hf:a/gguf:Q8_0")
    assert names() == ["hf:a/gguf:Q4_K_M"]
    _, steps = pulled("hf:a/gguf:Q8_0")
    assert [first for _, first in hub.reads] == [0, 1_500_000, 1_500_000, 1_500_000]
    assert next(step for step in steps if step.digest).completed == 1_500_000
    assert names() == ["hf:a/gguf:Q4_K_M", "hf:a/gguf:Q8_0"]


def test_a_pull_that_nobody_wants_stops_and_keeps_what_it_has(
    hub: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulling, "REPORT_SECONDS", -1.0)
    stop, gate = threading.Event(), threading.Event()
    hub.gates = [(2_000_000, gate)]

    def report(step: PullProgress) -> None:
        if step.completed:
            stop.set()
            gate.set()

    with pytest.raises(PullStoppedError):
        pull(HubName("a/gguf"), None, report, stop)
    assert names() == []
    pulled("hf:a/gguf")
    assert weights_path(pulled_models()[0]).read_bytes() == WEIGHTS and 0 < hub.reads[1][1] < len(WEIGHTS)


@pytest.mark.parametrize("short", [False, True])
def test_what_is_not_what_the_hub_says_is_removed(
    hub: Store, monkeypatch: pytest.MonkeyPatch, short: bool
) -> None:
    real = repository.file_of

    def file_of(sibling: Any) -> RepositoryFile:
        file = real(sibling)
        return (
            file._replace(num_bytes=file.num_bytes - 1)
            if short
            else file._replace(digest="sha256:" + 64 * "0")
        )

    with monkeypatch.context() as patch:
        patch.setattr(repository, "file_of", file_of)
        with pytest.raises(ValueError, match="is longer than" if short else "is not what the hub says of it"):
            pulled("hf:a/gguf")
    assert names() == [] and not [
        path for path in pulled_root().rglob("*") if path.is_file() and path.stat().st_size
    ]
    pulled("hf:a/gguf")
    assert weights_path(pulled_models()[0]).read_bytes() == WEIGHTS


def test_a_newer_commit_replaces_only_what_has_changed(hub: Store) -> None:
    first, _ = pulled("hf:a/gguf")
    hub.files["a/gguf/README.md"] = b"another text"
    again, _ = pulled("hf:a/gguf")
    assert again.commit != first.commit and len(hub.reads) == 1
    hub.files["a/gguf/M-Q4_K_M.gguf"] = WEIGHTS[::-1]
    newer, _ = pulled("hf:a/gguf")
    assert weights_path(newer).read_bytes() == WEIGHTS[::-1] and not weights_path(first).exists()
    assert [model.commit for model in pulled_models()] == [newer.commit]


def test_a_disk_without_room(hub: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    free = len(WEIGHTS) + pulling.SPARE_BYTES
    monkeypatch.setattr(pulling.shutil, "disk_usage", lambda path: usage(free - 1))
    with pytest.raises(OSError, match=r"hf:a/gguf:Q4_K_M needs 0\.00 GB more in .*pagewire rm"):
        pulled("hf:a/gguf")
    assert hub.reads == []
    monkeypatch.setattr(pulling.shutil, "disk_usage", lambda path: usage(free))
    pulled("hf:a/gguf")


def test_one_pull_of_a_name_at_a_time(hub: Store) -> None:
    with lock_model(HubName("a/gguf", "Q4_K_M")):
        with pytest.raises(BlockingIOError, match="hf:a/gguf:Q4_K_M is being pulled or removed"):
            pulled("hf:a/gguf")
        with pytest.raises(BlockingIOError):
            remove(HubName("a/gguf", "Q4_K_M"))
        pulled("hf:a/gguf:Q8_0")
    pulled("hf:a/gguf")


def test_only_what_was_pulled_is_removed(hub: Store) -> None:
    pulled("hf:a/gguf:Q8_0")
    pulled("hf:a/gguf")
    other = pulled_root() / "mine.txt"
    other.write_text("kept")
    with pytest.raises(ModelNotFoundError, match="hf:a/plain was not pulled"):
        remove(HubName("a/plain"))
    assert remove(HubName("a/gguf")) == "hf:a/gguf:Q4_K_M" and names() == ["hf:a/gguf:Q8_0"]
    assert remove(HubName("a/gguf")) == "hf:a/gguf:Q8_0" and names() == []
    assert [path for path in pulled_root().iterdir() if path.suffix != ".lock"] == [other]


def test_the_beginning_of_a_pull_can_be_removed(hub: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "MAX_FAILURES", 1)
    hub.breaks = [1000, 0]
    with pytest.raises(ModelNotFoundError):
        pulled("hf:a/gguf:Q8_0")
    assert remove(HubName("a/gguf", "Q8_0")) == "hf:a/gguf:Q8_0"
    assert not list(pulled_root().rglob("*.gguf*"))


def test_a_record_that_leads_elsewhere_is_no_model(hub: Store, tmp_path: Path) -> None:
    model, _ = pulled("hf:a/gguf")
    (record,) = pulled_root().glob("*.json")
    good = json.loads(record.read_text())
    for bad in (
        good | {"content": ".."},
        good | {"repository": "a/other"},
        good | {"files": [good["files"][0] | {"name": "../../x.gguf"}]},
        {"repository": 1},
    ):
        record.write_text(json.dumps(bad))
        assert names() == []
    record.write_text(json.dumps(good))
    assert names() == [model.name]


def test_a_hub_that_names_files_elsewhere(hub: Store) -> None:
    hub.files = {"a/bad/../../x-Q4_0.gguf": WEIGHTS, "a/bad/.hidden/y-Q8_0.gguf": WEIGHTS}
    with pytest.raises(ModelNotFoundError, match="a/bad has neither GGUF files nor safetensors"):
        pulled("hf:a/bad")
    hub.files = {"a/bad/model.safetensors": WEIGHTS, "a/bad/../tokenizer.json": b"{}"}
    model, _ = pulled("hf:a/bad")
    assert [file.name for file in model.files] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf:a/none", "no model 'a/none': neither a local folder nor a repository on the hub"),
        ("hf:a/nothing", "a/nothing has neither GGUF files nor safetensors"),
        ("hf:a/gguf:Q3_K_S", r"a/gguf has no 'Q3_K_S'; it has: Q8_0, Q4_K_M"),
        ("hf:a/plain:Q4_K_M", "a/plain has no 'Q4_K_M'; it has: no GGUF file"),
    ],
)
def test_what_the_hub_lacks(hub: Store, name: str, message: str) -> None:
    for refused in (pulled, model_folder):
        if name != "hf:a/nothing" or refused is pulled:
            with pytest.raises(ModelNotFoundError, match=message):
                refused(name)
    assert names() == []


def test_a_private_repository_needs_its_token(hub: Store) -> None:
    hub.key = "Bearer secret"
    with pytest.raises(ModelNotFoundError, match="a private one needs hf_token"):
        pulled("hf:a/gguf")
    pulled("hf:a/gguf", token="secret")
    assert names() == ["hf:a/gguf:Q4_K_M"]


def test_names_of_models_that_were_not_pulled(
    hub: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into the hub's cache, as other models of the hub; offline they are taken from there."""
    file = model_folder("hf:a/gguf:Q8_0")
    assert file.read_bytes() == WEIGHTS[::-1] and tmp_path / "hub" in file.parents
    assert model_folder("hf:a/plain", load_format="safetensors").is_dir()
    split = model_folder("hf:a/split")
    assert split.name == "M-Q2_K-00001-of-00002.gguf" and len(list(split.parent.iterdir())) == 2
    assert names() == []
    with pytest.raises(ValueError, match="reads no GGUF files"):
        model_folder("hf:a/gguf:Q8_0", load_format="safetensors")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    reads = len(hub.reads)
    assert model_folder("hf:a/gguf:Q8_0") == file == model_folder("hf:a/gguf")
    assert model_folder("hf:a/split") == split and len(hub.reads) == reads
    with pytest.raises(ModelNotFoundError, match="a/gguf has no 'Q4_K_M'; it has: Q8_0"):
        model_folder("hf:a/gguf:Q4_K_M")
    with pytest.raises(
        ModelNotFoundError, match="a/other is not a local folder, and the hub could not be reached"
    ):
        model_folder("hf:a/other")


def test_model_scope_has_no_such_names(hub: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_USE_MODELSCOPE", "1")
    with pytest.raises(
        ModelNotFoundError, match=r"such names are of the Hugging Face hub.*owner/repository/file\.gguf"
    ):
        model_folder("hf:a/gguf:Q8_0")
