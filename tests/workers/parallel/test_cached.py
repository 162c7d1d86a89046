"""Ranks that start from packed weights: each keeps its part, and all start so, or none."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from pagewire.ipc.wire.lora import LoadAdapter, LoRAConfig
from pagewire.ipc.wire.pooling import PoolingParams
from pagewire.ipc.wire.worker_messages import Parallel, WorkerConfig
from pagewire.kernels.cpu import library
from pagewire.workers.process.wiring import open_runner
from pagewire.workers.weight_cache import cached_loading, folder
from pagewire.workers.weight_cache.ahead import WeightsAhead
from pagewire.workers.weight_cache.cached_loading import keep_in_background
from pagewire.workers.weight_cache.folder import weight_folder
from tests.workers.architectures import VOCAB_SIZE
from tests.workers.driver import Driver
from tests.workers.parallel.threads import Rank, run_ranks
from tests.workers.parity import NUM_TOKENS, make_prompts
from tests.workers.pooled import pool
from tests.workers.pooled import write as write_pooled
from tests.workers.random_adapters import load, write

PHASE = "packed weights"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, of weights that compiled kernels have packed."""
    if library.choose() is None:
        pytest.skip("there are no compiled kernels here")
    monkeypatch.setattr(folder, "cache_root", lambda: tmp_path / "cache")


def start(model: Path, adapter: Path | None = None) -> list[tuple[list[list[int]], bool]]:
    """What each of two ranks generates, and whether it has started from packed weights.

    adapter: of every second prompt.
    """

    def work(rank: Rank) -> tuple[list[list[int]], bool]:
        awake = threading.Event()
        config = WorkerConfig(
            str(model),
            max_model_len=64,
            max_num_seqs=8,
            num_blocks=64,
            block_size=4,
            num_threads=1,
            weight_cache=True,
            quantization="int8",
            parallel=Parallel(rank.rank, rank.size),
            lora=None if adapter is None else LoRAConfig(),
        )
        ahead = WeightsAhead(config)
        runner, ready = open_runner(config, lambda *_: None, ahead, rank, awake.set)
        if adapter is not None:
            assert load(runner.adapters, LoadAdapter(1, str(adapter)), awake).error is None
        if (thread := keep_in_background(runner.model, ahead, runner.collective)) is not None:
            thread.join()
        assert (ahead.packed is None) == (
            PHASE not in ready.startup_seconds
        )  # what is not used takes no memory
        indices = None if adapter is None else [0, 1, 0, 1]
        tokens = Driver(runner).generate(make_prompts(VOCAB_SIZE), NUM_TOKENS, adapters=indices)
        return tokens, PHASE in ready.startup_seconds

    return list(run_ranks(2, work))


def test_the_second_start_is_from_packed_weights(llama: Path) -> None:
    first = start(llama)
    assert len(list(weight_folder().iterdir())) == 2
    second = start(llama)
    assert [tokens for tokens, _ in second] == [tokens for tokens, _ in first]
    assert [kept for _, kept in first + second] == [False, False, True, True]


def test_what_pools_starts_from_packed_weights_too(tmp_path: Path) -> None:
    folder = write_pooled(tmp_path, "llama")

    def work(rank: Rank) -> tuple[list[list[float]], bool]:
        fields: dict[str, Any] = {"num_blocks": 64, "max_num_seqs": 8, "num_threads": 1, "weight_cache": True}
        parallel = Parallel(rank.rank, rank.size)
        config = WorkerConfig(str(folder), runner="pooling", parallel=parallel, **fields)
        ahead = WeightsAhead(config)
        runner, ready = open_runner(config, lambda *_: None, ahead, rank)
        if (thread := keep_in_background(runner.model, ahead, runner.collective)) is not None:
            thread.join()
        vectors = pool(runner, make_prompts(128), PoolingParams(task="embed"))
        return [vector.tolist() for vector in vectors], PHASE in ready.startup_seconds

    first = list(run_ranks(2, work))
    assert list(run_ranks(2, work)) == [(vectors, True) for vectors, _ in first]
    assert [kept for _, kept in first] == [False, False]


def test_adapters_over_packed_weights(llama: Path, tmp_path: Path) -> None:
    """They are kept without what asks for adapters, and with how they are divided."""
    adapter = write(tmp_path / "adapter")
    first = start(llama, adapter)
    assert start(llama, adapter) == [(tokens, True) for tokens, _ in first]
    (plain, _), _ = start(llama)
    assert [ours == theirs for ours, theirs in zip(first[0][0], plain, strict=True)] == [True, False] * 2


def test_all_ranks_load_anew_if_one_has_no_packed_weights(llama: Path) -> None:
    first = start(llama)
    next(weight_folder().iterdir()).unlink()
    assert start(llama) == first
    assert [kept for _, kept in start(llama)] == [True, True]


def test_what_cannot_be_run_is_written_anew(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = start(llama)
    with monkeypatch.context() as patch:
        patch.setattr(cached_loading, "restored", lambda *_: "no model")
        assert start(llama) == first
    assert [kept for _, kept in start(llama)] == [True, True]
