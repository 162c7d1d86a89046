"""The keys of packed weights: what makes another one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pagewire.ipc.models.registrations import Registrations
from pagewire.ipc.speculative import SpeculativeConfig
from pagewire.ipc.wire.lora import LoRAConfig
from pagewire.ipc.wire.pooling import PoolerConfig
from pagewire.ipc.wire.worker_messages import Parallel, WorkerConfig
from pagewire.kernels.cpu import library
from pagewire.kernels.cpu.build import InstructionSet
from pagewire.kernels.cpu.library import Library
from pagewire.workers.weight_cache import key
from pagewire.workers.weight_cache.key import key_of

VALUES: dict[str, Any] = {
    "dtype": "float16",
    "load_format": "safetensors",
    "hf_overrides": {"rope_theta": 1.0},
    "max_model_len": 7,
    "disable_sliding_window": True,
    "kv_cache_dtype": "fp8",
    "kv_scales": [0.5],
    "quantization": "int8",
    "parallel": Parallel(rank=1, size=2),
    "runner": "pooling",
    "convert": "embed",
    "pooler_config": PoolerConfig(normalize=False),
    "speculative": SpeculativeConfig(method="mtp"),
    "merged_adapter": "an/adapter",
    "registrations": Registrations(plugins=("acme",)),
    "media": True,
}
"""For each field of `WorkerConfig` that the packed weights depend on another value."""


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    set_instructions(monkeypatch, "a set")


def set_instructions(monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    functions: Any = None
    opened = None if name is None else Library(InstructionSet(name), functions)
    monkeypatch.setattr(library, "choose", lambda: opened)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    return tmp_path


def config(folder: Path, **fields: Any) -> WorkerConfig:
    return WorkerConfig(str(folder), **({"weight_cache": True} | fields))


def test_a_configuration_that_was_sent_has_the_same_key(folder: Path) -> None:
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(config(folder)), type=WorkerConfig)
    assert key_of(sent) == key_of(config(folder))


def test_the_same_has_the_same_key(folder: Path) -> None:
    first = key_of(config(folder))
    assert first is not None and len(first) == key.KEY_CHARACTERS
    assert key_of(config(folder)) == first


@pytest.mark.parametrize("name", msgspec.structs.fields(WorkerConfig), ids=lambda field: field.encode_name)
def test_a_field_of_the_configuration_makes_another_key_unless_it_is_a_limit(folder: Path, name: Any) -> None:
    field = name.encode_name
    if field in key.LIMITS:
        return
    assert field in VALUES, f"{field}: give it another value here, or let it stand in LIMITS"
    assert key_of(config(folder)) != key_of(config(folder, **{field: VALUES[field]}))


def test_a_limit_makes_no_other_key(folder: Path) -> None:
    assert key_of(config(folder)) == key_of(config(folder, num_threads=3, max_num_seqs=1, num_blocks=9))


def test_another_byte_makes_another_key_even_if_size_and_time_are_the_same(folder: Path) -> None:
    first, path = key_of(config(folder)), folder / "model.safetensors"
    before = path.stat()
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), b"\1", 5000)  # in none of the samples
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert key_of(config(folder)) != first


def test_another_file_makes_another_key(folder: Path) -> None:
    first = key_of(config(folder))
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    second = key_of(config(folder))
    (folder / "extra.json").write_text("")
    assert len({first, second, key_of(config(folder))}) == 3


def test_another_adapter_under_the_same_name_makes_another_key(folder: Path) -> None:
    adapter = folder / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    merged = config(folder, merged_adapter=str(adapter))
    first = key_of(merged)
    (adapter / "adapter_config.json").write_text("[]")
    assert key_of(merged) != first
    assert key_of(config(folder, lora=LoRAConfig())) == key_of(config(folder))


def test_other_instructions_code_or_versions_make_another_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {key_of(config(folder))}
    set_instructions(monkeypatch, "another set")
    keys.add(key_of(config(folder)))
    monkeypatch.setattr(key, "versions", lambda: ["another"])
    keys.add(key_of(config(folder)))
    monkeypatch.setattr(key, "code_digest", lambda: "another")
    keys.add(key_of(config(folder)))
    monkeypatch.setenv("PAGEWIRE_ALLOW_LONG_MAX_MODEL_LEN", "1")
    keys.add(key_of(config(folder)))
    assert len(keys) == 5 and None not in keys


def test_the_parts_of_a_split_file_count_and_its_neighbours_do_not(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    for part in parts:
        part.write_bytes(b"part")
    first = key_of(config(parts[0]))
    (tmp_path / "other.gguf").write_bytes(b"neighbour")
    assert key_of(config(parts[0])) == first
    parts[1].write_bytes(b"changed")
    assert key_of(config(parts[0])) != first


@pytest.mark.parametrize(
    "fields", [{"weight_cache": False}, {"load_format": "dummy"}, {"trust_remote_code": True}]
)
def test_some_weights_have_no_key(folder: Path, fields: dict[str, Any]) -> None:
    assert key_of(config(folder, **fields)) is None


def test_there_is_no_key_without_compiled_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_instructions(monkeypatch, None)
    assert key_of(config(folder)) is None


def test_how_ranks_meet_makes_no_other_key(folder: Path) -> None:
    places = [Parallel(rank=1, size=2, rendezvous=name, local_rank=n, turn=n) for n, name in enumerate("ab")]
    first, second = (key_of(config(folder, parallel=place)) for place in places)
    assert first == second is not None
