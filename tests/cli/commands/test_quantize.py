"""`pagewire quantize`: what it writes, read here by the definition of compressed-tensors' formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from pagewire.cli.commands import quantize
from pagewire.cli.main import main
from pagewire.cli.quantise import checkpoint, integers, shards
from pagewire.cli.quantise.shards import PlannedTensor, Shard
from tests.workers.architectures import EXPERTS, GROUPED, Architecture
from tests.workers.driver import Driver, load_runner
from tests.workers.families.originals import ORIGINALS

SIZES = {"intermediate_size": 96, "hidden_size": 64}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama with an output layer of its own, a tokenizer's file and a license."""
    folder = tmp_path_factory.mktemp("dense")
    Architecture("llama", GROUPED | SIZES | {"tie_word_embeddings": False}).write(folder, dtype="bfloat16")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "LICENSE").write_text("free")
    return folder


def quantised(folder: Path, out: Path, *arguments: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the tensors of what the command writes."""
    assert main(["quantize", str(folder), str(out), *arguments]) == 0
    tensors: dict[str, Tensor] = {}
    for path in sorted(out.glob("*.safetensors")):
        tensors |= load_file(path)
    return json.loads((out / "config.json").read_text())["quantization_config"], tensors


def unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes of each row of int32 words, lowest bits first."""
    codes = [word >> shift & 2**bits - 1 for word in words.T.long() for shift in range(0, 32, bits)]
    return torch.stack(codes[:count], dim=1)


def decoded(config: dict[str, Any], tensors: dict[str, Tensor], module: str) -> Tensor:
    """The matrix of a module, by its config: (code - zero) * scale."""
    weights = config["config_groups"]["group_0"]["weights"]
    scales = tensors[f"{module}.weight_scale"].float()
    if config["format"] == "int-quantized":
        return tensors[f"{module}.weight"].float() * scales
    rows, columns = tensors[f"{module}.weight_shape"].tolist()
    bits, half = weights["num_bits"], 2 ** (weights["num_bits"] - 1)
    codes = unpacked(tensors[f"{module}.weight_packed"], bits, columns) - half
    zeros = torch.zeros(scales.shape)
    if not weights["symmetric"]:
        zeros = unpacked(tensors[f"{module}.weight_zero_point"].T, bits, rows).T - half
    assert codes.shape == (rows, columns) and scales.shape[1] * weights["group_size"] == columns
    return ((codes.view(rows, scales.shape[1], -1) - zeros[..., None]) * scales[..., None]).flatten(1)


@pytest.mark.parametrize(
    ("arguments", "form", "most"),
    [
        (("--scheme", "int8"), "int-quantized", 0.008),
        (("--scheme", "int8", "--group", "32"), "pack-quantized", 0.006),
        (("--scheme", "int4"), "pack-quantized", 0.08),
    ],
)
def test_every_linear_layer_is_written(
    dense: Path, tmp_path: Path, arguments: tuple[str, ...], form: str, most: float
) -> None:
    config, tensors = quantised(dense, tmp_path / "out", *arguments)
    assert config["quant_method"] == "compressed-tensors" and config["format"] == form
    assert config["config_groups"]["group_0"]["targets"] == ["Linear"]
    activations = config["config_groups"]["group_0"]["input_activations"]
    assert (activations is None) == (form == "pack-quantized")
    assert config["ignore"] == ["lm_head", "model.embed_tokens"]
    matrices = 0
    for name, tensor in load_file(dense / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if tensor.dim() == 1 or module in config["ignore"]:
            assert torch.equal(tensors[name], tensor)
            continue
        matrices += 1
        error = decoded(config, tensors, module) - tensor.float()
        assert 0 < float(error.norm() / tensor.float().norm()) < most
        assert tensors[f"{module}.weight_scale"].dtype == torch.bfloat16
    assert matrices == 14
    assert (tmp_path / "out" / "LICENSE").read_text() == "free"
    assert (tmp_path / "out" / "tokenizer_config.json").is_file()


def test_rows_and_files_may_be_cut_anywhere(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, whole = quantised(dense, tmp_path / "whole", "--scheme", "int4")
    monkeypatch.setattr(checkpoint, "ROWS", 32)
    cut = shards.shards
    monkeypatch.setattr(checkpoint, "shards", lambda pieces: cut(pieces, 20_000))
    _, parts = quantised(dense, tmp_path / "parts", "--scheme", "int4")
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)
    places = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())["weight_map"]
    assert places.keys() == whole.keys() and len(set(places.values())) > 2
    for name, file in places.items():
        with safe_open(tmp_path / "parts" / file, "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118 - it is no dict


def test_experts_that_lie_apart_are_written(tmp_path: Path) -> None:
    sizes = SIZES | EXPERTS | {"moe_intermediate_size": 32}
    folder = Architecture("qwen3_moe", GROUPED | sizes).write(tmp_path / "dense", dtype="bfloat16")
    config, tensors = quantised(folder, tmp_path / "out", "--scheme", "int4")
    expert = "model.layers.1.mlp.experts.3.down_proj"
    original = load_file(folder / "model.safetensors")[f"{expert}.weight"].float()
    assert float((decoded(config, tensors, expert) - original).norm() / original.norm()) < 0.08
    assert "model.layers.0.mlp.gate" in config["ignore"]
    assert "model.layers.0.mlp.gate.weight" in tensors


@pytest.mark.parametrize("name", ["qwen", "internlm2", "baichuan 13B"])
def test_a_family_with_names_of_its_own_is_written(name: str, tmp_path: Path) -> None:
    """Tensors that hold several weights are quantised whole, and served as any: see `workers/families`."""
    original = next(original for original in ORIGINALS if original.name == name)
    (tmp_path / "dense").mkdir()
    config, tensors = quantised(original.write(tmp_path / "dense"), tmp_path / "out", "--scheme", "int4")
    matrices = {
        module.removesuffix(".weight"): tensor
        for module, tensor in original.tensors().items()
        if ".0." in module and tensor.dim() == 2
    }
    assert len(matrices) >= 5 and len(config["ignore"]) >= 2
    for module, matrix in matrices.items():
        assert float((decoded(config, tensors, module) - matrix).norm() / matrix.norm()) < 0.08
    runner, _ = load_runner(tmp_path / "out")
    assert [len(tokens) for tokens in Driver(runner).generate([[5, 6, 7]], 2)] == [2]


def test_what_cannot_be_done_is_refused(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["quantize", str(dense), str(out), "--scheme", "int4", "--group", "128"]) == 1
    assert "no multiple of --group 128; --group 32 fits the model" in capsys.readouterr().err
    assert main(["quantize", str(dense), str(tmp_path), "--scheme", "int8"]) == 2
    assert f"{tmp_path} exists: it is not overwritten" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    quantised(dense, out, "--scheme", "int8")
    assert main(["quantize", str(out), str(tmp_path / "again"), "--scheme", "int8"]) == 1
    assert "is quantised already" in capsys.readouterr().err
    fused = Architecture("gpt_oss", GROUPED | SIZES | {"num_local_experts": 4}).write(tmp_path / "fused")
    assert main(["quantize", str(fused), str(tmp_path / "again"), "--scheme", "int8"]) == 1
    assert "holds its experts in one tensor" in capsys.readouterr().err


def test_a_failure_leaves_nothing_behind(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Shard, "write", fail)
    assert main(["quantize", str(dense), str(tmp_path / "out"), "--scheme", "int8"]) == 1
    assert "no space left on device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    assert main(["quantize", str(dense), str(tmp_path / "out"), "--scheme", "int8"]) == 1
    assert "GB free" in capsys.readouterr().err


def test_a_shard_holds_what_was_planned(tmp_path: Path) -> None:
    planned = [
        PlannedTensor("bytes", torch.uint8, (3,)),
        PlannedTensor("empty", torch.float32, (0, 2)),
        PlannedTensor("one", torch.int64, ()),
    ]
    shard = Shard(tmp_path / "a.safetensors", planned)
    with pytest.raises(ValueError, match="planned was"):
        shard.write("bytes", torch.zeros(4, dtype=torch.uint8))
    shard.write("one", torch.tensor(7))
    shard.write("empty", torch.zeros(0, 2))
    with pytest.raises(ValueError, match=r"\['bytes'\] were planned"):
        shard.close()
    shard = Shard(tmp_path / "b.safetensors", planned)
    for name, tensor in (
        ("bytes", torch.tensor([1, 2, 3]).byte()),
        ("one", torch.tensor(7)),
        ("empty", torch.zeros(0, 2)),
    ):
        shard.write(name, tensor)
    shard.close()
    read = load_file(tmp_path / "b.safetensors")
    assert read["bytes"].tolist() == [1, 2, 3] and int(read["one"]) == 7 and read["empty"].shape == (0, 2)


def test_groups_on_the_command_line_are_those_that_are_written() -> None:
    assert quantize.GROUPS == integers.GROUPS
