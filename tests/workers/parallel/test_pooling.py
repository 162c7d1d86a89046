"""Models that pool over several ranks: what one worker makes of prompts, and each prompt's bits alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewire.ipc.wire.pooling import PoolerConfig, PoolingParams
from pagewire.workers.errors import LoadError
from pagewire.workers.network.build_layer import LayerBuilder
from tests.workers.driver import load_runner
from tests.workers.parallel.threads import Rank, run_ranks
from tests.workers.parity import make_prompts
from tests.workers.pooled import pool, write
from tests.workers.test_pooling import reward_model

PROMPTS = make_prompts(128, (23, 1, 40, 5, 17))
EMBED, MEAN = PoolingParams(task="embed"), PoolingParams(task="embed", all_tokens=True)
CLASSIFY = PoolingParams(task="classify", activation=False)
REWARDS = PoolingParams(task="token_classify", activation=False, all_tokens=True)


def pooled(
    folder: Path, task: PoolingParams, rank: Rank | None = None, **fields: Any
) -> tuple[list[Tensor], bool]:
    """The result of each prompt, and if the layers are a stack. A prompt has the same bits alone, in chunks."""
    runner, _ = load_runner(folder, collective=rank, **fields)
    crowd = pool(runner, PROMPTS, task)
    assert torch.equal(pool(runner, PROMPTS[2:3], task, 16)[0], crowd[2])
    return crowd, runner.model.is_stack


def check(
    folder: Path, task: PoolingParams, size: int = 2, tolerance: float = 2e-5, **fields: Any
) -> Sequence[Tensor]:
    """Compare what ranks make of prompts with what one worker makes; returns the latter."""
    expected, is_stack = pooled(folder, task, **fields)
    (first, *others) = run_ranks(size, lambda rank: pooled(folder, task, rank, **fields))
    assert first[1] == is_stack
    for found, vector in zip(first[0], expected, strict=True):
        torch.testing.assert_close(found, vector, atol=tolerance, rtol=tolerance)
    for other, _ in others:
        assert all(map(torch.equal, other, first[0]))
    return expected


def test_embeddings(tmp_path: Path) -> None:
    """Of a base that transformers has a plan for, and of one with a plan of ours."""
    llama = write(tmp_path / "llama", "llama", "AutoModelForCausalLM")
    check(llama, EMBED, convert="embed")
    check(llama, MEAN, runner="pooling", pooler_config=PoolerConfig(pooling_type="MEAN"))
    check(write(tmp_path / "gpt2", "gpt2"), EMBED, size=4)


def test_classifiers(tmp_path: Path) -> None:
    folder = write(tmp_path, "qwen3", "AutoModelForSequenceClassification", num_labels=3, pad_token_id=0)
    logits = check(folder, CLASSIFY)
    assert logits[0].shape == (3,)
    # Ranks round the inputs of a quantised product in other blocks here.
    check(folder, CLASSIFY, quantization="int8", tolerance=0.1)


def test_rewards_of_tokens(tmp_path: Path) -> None:
    folder, _ = reward_model(tmp_path, "Qwen2ForProcessRewardModel", 2)
    assert check(folder, REWARDS)[0].shape == (23, 2)


def test_what_cannot_be_divided_is_refused_by_name(tmp_path: Path) -> None:
    encoder = write(tmp_path / "bert", "bert")
    with pytest.raises(LoadError, match="an encoder runs in one worker"):
        run_ranks(2, lambda rank: load_runner(encoder, collective=rank))
    llama = write(tmp_path / "llama", "llama")
    with pytest.raises(LoadError, match="it has 4 attention heads"):
        run_ranks(3, lambda rank: load_runner(llama, collective=rank))
    from pagewire.ipc.wire.worker_messages import Parallel

    with pytest.raises(LoadError, match="leave pipeline_parallel_size at 1 and use tensor_parallel_size"):
        load_runner(llama, parallel=Parallel(0, 2, stages=2))


def test_wrong_states_are_noticed_by_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stack that forgets a sum."""
    own = LayerBuilder.of
    monkeypatch.setattr(LayerBuilder, "of", lambda *args: dataclasses.replace(own(*args), ranks=None))
    folder = write(tmp_path, "llama")
    with pytest.raises(LoadError, match="are wrong"):
        run_ranks(2, lambda rank: load_runner(folder, collective=rank))
