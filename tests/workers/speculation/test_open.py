"""What is refused before a drafter runs, and what memory it is expected to take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagewire.ipc.speculative import Method, SpeculativeConfig
from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.workers.checkpoint.headers import read_headers
from pagewire.workers.errors import LoadError
from pagewire.workers.estimate.fit import fit, model_figures, sizes_of
from pagewire.workers.speculation.interface import NoDrafter
from pagewire.workers.speculation.open import check_target
from pagewire.workers.speculation.vocabulary import share_of_others
from tests.workers.architectures import GROUPED, Architecture
from tests.workers.speculation.speculating import runner_with

GIB = 1 << 30


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_the_worker_has_no_drafter_for_methods_of_the_core(llama: Path, method: Method) -> None:
    runner = runner_with(llama, llama, method)
    assert isinstance(runner.drafter, NoDrafter)
    assert runner.block_bytes == runner_with(llama, None).block_bytes


def test_pipelines_and_models_that_pool_are_refused(llama: Path, tmp_path: Path) -> None:
    speculative = SpeculativeConfig("draft_model", str(llama), 5)
    with pytest.raises(LoadError, match=r"needs pipeline_parallel_size 1, not 2; the methods 'ngram'"):
        check_target(speculative, runner_with(llama, None).model, 2)
    with pytest.raises(LoadError, match="for models that generate, and LlamaModel pools"):
        runner_with(llama, llama, runner="pooling", convert="embed")


def test_another_vocabulary_is_refused(llama: Path, tmp_path: Path) -> None:
    folder = Architecture("llama", GROUPED | {"vocab_size": 100}).write(tmp_path)
    with pytest.raises(LoadError, match=r"a vocabulary of 100 tokens, and the model one of 128.*'ngram'"):
        runner_with(llama, folder)
    with pytest.raises(LoadError, match=r"holds no config\.json"):
        runner_with(llama, tmp_path / "missing")


def write_tokenizer(folder: Path, tokens: list[str], kind: str = "BPE") -> Path:
    """A tokenizer.json with this vocabulary."""
    folder.mkdir()
    vocab: Any = {token: i for i, token in enumerate(tokens)}
    if kind == "Unigram":
        vocab = [[token, -1.0] for token in tokens]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": kind, "vocab": vocab}}))
    return folder


def test_tokens_of_the_same_number_are_compared(tmp_path: Path) -> None:
    tokens = [f"token {i}" for i in range(200)]
    ours = str(write_tokenizer(tmp_path / "ours", tokens))
    same = str(write_tokenizer(tmp_path / "same", tokens, "Unigram"))
    near = str(write_tokenizer(tmp_path / "near", [*tokens[:-1], "other"]))
    other = str(write_tokenizer(tmp_path / "other", tokens[::-1]))
    assert share_of_others(ours, ours) == share_of_others(ours, same) == 0
    assert share_of_others(ours, near) == 1 / 200
    assert share_of_others(ours, other) == 1
    assert share_of_others(ours, str(tmp_path)) == 0, "a model without a tokenizer"
    (tmp_path / "tokenizer.json").write_text("[]")
    assert share_of_others(ours, str(tmp_path)) == 0, "a tokenizer of another form"


def test_a_draft_model_with_other_tokens_is_refused(llama: Path, tmp_path: Path) -> None:
    folders = []
    for name, step in (("target", 1), ("draft", -1)):
        folder = write_tokenizer(tmp_path / name, [f"token {i}" for i in range(128)][::step])
        for file in ("config.json", "model.safetensors"):
            (folder / file).write_bytes((llama / file).read_bytes())
        folders.append(folder)
    with pytest.raises(LoadError, match="100% of the token ids stand for other tokens"):
        runner_with(folders[0], folders[1])
    assert runner_with(folders[0], folders[0]).drafter.name == "LlamaForCausalLM"


def test_memory_is_expected_for_both_models(llama: Path, tmp_path: Path) -> None:
    small = Architecture("llama", GROUPED | {"num_hidden_layers": 1}).write(tmp_path)
    speculative = SpeculativeConfig("draft_model", str(small), 5)
    sizes: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 8, "block_size": 4}
    configs = [
        WorkerConfig(str(llama), num_blocks=64, **sizes),
        WorkerConfig(str(llama), num_blocks=64, speculative=speculative, **sizes),
    ]
    headers = read_headers(llama)
    plain, both = (sizes_of(headers, config, "avx2") for config in configs)
    drafter = both.drafter
    assert plain.drafter is None and drafter is not None
    assert drafter.weight_bytes == sizes_of(read_headers(small), configs[0], "avx2").weight_bytes
    alone, together = (fit(s, c, GIB, GIB) for s, c in zip((plain, both), configs, strict=True))
    assert together.weight_bytes == alone.weight_bytes + drafter.weight_bytes
    assert together.kv_bytes == alone.kv_bytes * 3 // 2, "three layers rather than two"
    runner = runner_with(llama, small, max_num_seqs=8)
    assert together.kv_bytes == runner.block_bytes * runner.num_blocks
    assert model_figures(both).memory_bytes - model_figures(plain).memory_bytes == drafter.weight_bytes
    few = alone.base_bytes + alone.weight_bytes + alone.kv_request_bytes + alone.table_bytes + 1000
    assert fit(plain, configs[0], GIB, few).problem is None
    problem = fit(both, configs[1], GIB, few).problem
    assert problem is not None
