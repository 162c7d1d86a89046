"""Plans of an encoder's prompts: compiled results are those of `RunningStep`, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.ipc.wire.pooling import PoolingParams
from pagewire.ipc.wire.worker_messages import Row, SlotInit, StepPlan
from pagewire.kernels.cpu import kernels as cpu_kernels
from pagewire.workers.module.transforms import QuantisedEmbedding
from pagewire.workers.network.network import Network
from pagewire.workers.run.encoding import Encoding
from tests.workers.parity import make_prompts
from tests.workers.pooled import PACKED, pool, sentence_transformer, write
from tests.workers.run.counted import Count

EMBED = PoolingParams(task="embed")
TOKENS = PoolingParams(task="token_embed", all_tokens=True)
LENGTHS = (23, 1, 64, 5, 17, 40, 33, 16)

pytestmark = pytest.mark.skipif(cpu_kernels.load() is None, reason="no compiled kernels here")


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    return Count(monkeypatch, Encoding)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", [*PACKED, "mpnet"])
def test_both_ways_give_the_same_bits(model_type: str, dtype: str, count: Count, tmp_path: Path) -> None:
    """One prompt after many and many after one: memory grows and shrinks. Of states, means and first tokens."""
    folder = write(tmp_path, model_type)
    sentence_transformer(folder, "mean_tokens" if dtype == "float32" else "cls_token")
    runner = count.load(folder, dtype=dtype)
    assert isinstance(runner.model.model.base, Network)
    prompts = make_prompts(100, LENGTHS)
    for chosen in (prompts[3:4], prompts, prompts[1:2]):
        for task in (EMBED, TOKENS):
            count.is_on = True
            found = pool(runner, chosen, task)
            count.is_on = False
            assert all(map(torch.equal, found, pool(runner, chosen, task)))
    assert (count.taken, count.left) == (6, 6)


def test_quantised_words_and_second_texts(count: Count, tmp_path: Path) -> None:
    folder = write(tmp_path, "bert", "AutoModelForSequenceClassification", num_labels=2)
    runner = count.load(folder, quantization="int8")
    assert isinstance(runner.model.model.base.words, QuantisedEmbedding)
    prompts = make_prompts(100, LENGTHS)
    tasks = [
        PoolingParams(task="classify", all_tokens=True, second_segment=length // 2 if i % 2 else 0)
        for i, length in enumerate(LENGTHS)
    ]
    found = pool(runner, prompts, tasks)
    assert count.taken == 1
    count.is_on = False
    assert all(map(torch.equal, found, pool(runner, prompts, tasks)))
    plain = [PoolingParams(task="classify", all_tokens=True)] * len(prompts)
    changed = [not torch.equal(a, b) for a, b in zip(found, pool(runner, prompts, plain), strict=True)]
    assert changed == [bool(task.second_segment) for task in tasks]


def test_groups_of_prompts(count: Count, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """More prompts than pass through the layers together; among them one that is longer than a group."""
    monkeypatch.setattr("pagewire.kernels.cpu.stack.GROUP_TOKENS", 8)
    runner = count.load(write(tmp_path, "nomic_bert"))
    prompts = make_prompts(100, LENGTHS)
    found = pool(runner, prompts, TOKENS)
    assert count.taken == 1
    count.is_on = False
    assert all(map(torch.equal, found, pool(runner, prompts, TOKENS)))


def test_other_models_go_the_other_way(count: Count, tmp_path: Path) -> None:
    for model_type, options in {"deberta-v2": {}, "qwen3": {"convert": "embed"}}.items():
        runner = count.load(write(tmp_path / model_type, model_type), **options)
        assert len(pool(runner, make_prompts(100, LENGTHS), EMBED)) == len(LENGTHS)
        assert (count.taken, count.left) == (0, 1)


@pytest.mark.parametrize("tokens", [[5, 128, 7], [5, -1, 7]])
def test_tokens_without_a_row_are_refused(tokens: list[int], count: Count, tmp_path: Path) -> None:
    runner = count.load(write(tmp_path, "bert"))
    init: dict[str, Any] = {"slot": 0, "token_ids": tokens, "num_prompt_tokens": 3, "block_ids": [0]}
    with pytest.raises(ValueError, match="do not fit the model"):
        runner.step(StepPlan(0, [Row(0, 0, 3, pool=True)], [SlotInit(**init, task=EMBED, seed=0)]))


def test_the_model_is_let_go(count: Count, tmp_path: Path) -> None:
    runner = count.load(write(tmp_path, "bert"))
    prompts = make_prompts(100, LENGTHS)
    found = pool(runner, prompts, EMBED)
    runner.free()
    runner.drop_weights()
    runner.load_weights()
    runner.allocate_kv()
    assert all(map(torch.equal, found, pool(runner, prompts, EMBED)))
    assert (count.taken, count.left) == (2, 0)
