"""Weights read one by one: what is in memory while the module runs as it is, and what is let go."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.workers.checkpoint.source import Checkpoint
from pagewire.workers.device.cpu import CpuDevice
from pagewire.workers.errors import LoadError
from pagewire.workers.module.configuration import load_config
from pagewire.workers.module.lockstep import Lockstep
from pagewire.workers.module.weights import CheckpointWeights
from pagewire.workers.network.build_module import build_module
from tests.workers.architectures import GROUPED, Architecture

IDS = torch.arange(10)[None]
TIED = GROUPED | {"tie_word_embeddings": True, "num_hidden_layers": 3}


def build(folder: Path, dtype: torch.dtype = torch.float32) -> CheckpointWeights:
    """The weights of a model in a folder."""
    worker_config = WorkerConfig(str(folder))
    weights = build_module(worker_config, load_config(worker_config), dtype, CpuDevice())
    assert isinstance(weights, CheckpointWeights)
    return weights


def is_empty(module: nn.Module) -> bool:
    return all(parameter.device.type == "meta" for parameter in module.parameters())


@torch.inference_mode()
def test_a_module_is_streamed_layer_by_layer(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    weights = build(Architecture("llama", TIED).write(tmp_path))
    causal = weights.causal
    layers = list(causal.model.layers)
    filled = []
    for layer in layers:
        layer.mlp.register_forward_hook(lambda *_: filled.append([not is_empty(one) for one in layers]))
    assert is_empty(causal)
    with weights.streamed():
        logits = [causal(input_ids=IDS).logits for _ in range(2)]
    assert filled == [[True, False, False], [False, True, False], [False, False, True]] * 2
    assert is_empty(causal)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    expected = whole(input_ids=IDS).logits
    assert torch.equal(logits[0], expected) and torch.equal(logits[1], expected)
    assert len(filled) == 6
    assert causal(input_ids=IDS).logits.device.type == "meta", "the weights are read within the context only"


def test_passes_in_lockstep_read_each_layer_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And have the bits of passes one after the other."""
    weights, names = build(Architecture("llama", TIED).write(tmp_path)), list[str]()
    layers, held = list(weights.causal.model.layers), list[list[bool]]()
    read = Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda self, name: (names.append(name), read(self, name))[1])
    for layer in layers:
        layer.mlp.register_forward_hook(lambda *_: held.append([not is_empty(one) for one in layers]))

    @torch.inference_mode()
    def logits(ids: torch.Tensor) -> torch.Tensor:
        return weights.causal(input_ids=ids).logits  # type: ignore[no-any-return]

    inputs = [IDS, IDS[:, :3] + 5, IDS + 1]
    with weights.streamed():
        expected = [logits(ids) for ids in inputs]
    alone = sorted(name for name in names if ".layers." in name)
    names.clear()
    held.clear()
    lockstep = Lockstep()
    with weights.streamed(lockstep):
        together = lockstep.run([partial(logits, ids) for ids in inputs])
    assert all(map(torch.equal, together, expected))
    assert held == [[index == layer for index in range(3)] for layer in range(3) for _ in inputs]
    assert alone == sorted([name for name in names if ".layers." in name] * 3)
    assert is_empty(weights.causal)


def test_calls_in_lockstep_take_turns() -> None:
    """One that ends or fails does not hold up the others; the first error is raised at the end."""
    lockstep, order = Lockstep(), list[str]()

    def call(name: str, meetings: int, fails: bool = False) -> str:
        for meeting in range(meetings):
            order.append(f"{name}{meeting}")
            lockstep.meet()
        if fails:
            raise ValueError(name)
        return name

    assert lockstep.run([partial(call, "a", 3), partial(call, "b", 1), partial(call, "c", 2)]) == [
        "a",
        "b",
        "c",
    ]
    assert order == ["a0", "b0", "c0", "a1", "c1", "a2"]
    order.clear()
    with pytest.raises(ValueError, match="b"):
        lockstep.run([partial(call, "a", 2), partial(call, "b", 1, True), partial(call, "c", 0, True)])
    assert order == ["a0", "b0", "a1"]
    lockstep.meet()  # alone
    assert lockstep.run([partial(call, "a", 2)]) == ["a"]


@torch.inference_mode()
def test_a_filled_module_holds_what_transformers_reads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = Architecture("qwen2_moe", GROUPED | {"num_experts": 4, "num_experts_per_tok": 2}).write(tmp_path)
    weights = build(folder, torch.bfloat16)
    weights.fill(weights.causal)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ours = {**dict(weights.causal.named_parameters()), **dict(weights.causal.named_buffers())}
    theirs = {**dict(expected.named_parameters()), **dict(expected.named_buffers())}
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor) and ours[name].dtype == tensor.dtype, name


def test_a_tied_weight_is_read_once(tmp_path: Path) -> None:
    weights = build(Architecture("llama", TIED).write(tmp_path), torch.bfloat16)
    causal = weights.causal
    weights.fill(causal.model.embed_tokens)
    [part] = weights.matrix(causal.lm_head).parts
    assert part.data_ptr() == causal.model.embed_tokens.weight.data_ptr()


def test_a_matrix_is_a_view_of_the_file_in_its_own_dtype(tmp_path: Path) -> None:
    weights = build(Architecture("llama", GROUPED).write(tmp_path), torch.bfloat16)
    matrix = weights.matrix(weights.causal.model.layers[0].mlp.up_proj)
    assert matrix.dtype == torch.bfloat16 and [part.dtype for part in matrix.parts] == [torch.float32]
    place = Path("/proc/self/maps")
    if place.exists():
        address = matrix.parts[0].data_ptr()
        spans = [line.split(maxsplit=5) for line in place.read_text().splitlines()]
        [file] = [span[5] for span in spans if _contains(span[0], address)]
        assert file == str((tmp_path / "model.safetensors").resolve())


def _contains(span: str, address: int) -> bool:
    start, end = (int(number, 16) for number in span.split("-"))
    return start <= address < end


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc")
def test_what_is_let_go_is_read_again(tmp_path: Path) -> None:
    folder = Architecture("llama", GROUPED | {"vocab_size": 5000}).write(tmp_path)
    checkpoint = Checkpoint(folder)

    def resident() -> int:
        text = Path("/proc/self/smaps").read_text()
        return int(text.split(str((folder / "model.safetensors").resolve()))[1].split("Rss:")[1].split()[0])

    embedding = checkpoint.read("model.embed_tokens.weight")
    total = embedding.sum()
    assert resident() >= embedding.nbytes >> 10 > 1000
    checkpoint.let_go()
    assert resident() < 256, "the system maps some pages around those that are read"
    assert embedding.sum() == total


def test_an_index_that_is_broken_or_names_a_file_that_is_missing(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    for text, words in (
        ("{", "cannot load"),
        ("{}", "weight_map"),
        ('{"weight_map": {"a": "b"}}', "cannot load"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "is not the name of a file in its folder"),
        ('{"weight_map": {"a": "/dev/zero"}}', "is not the name of a file in its folder"),
        ('{"weight_map": {"a": 5}}', "is not the name of a file in its folder"),
        ('{"weight_map": {"a": []}}', "cannot load"),
        ("[" * 200_000, "cannot load"),
    ):
        index.write_text(text)
        with pytest.raises(LoadError, match=words):
            Checkpoint(tmp_path)
