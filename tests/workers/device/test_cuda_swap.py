"""Swap space of a GPU: blocks of preempted sequences go to pinned memory and come back, among the steps."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from pagewire.ipc.wire.tier_messages import TierConfig
from pagewire.workers.errors import LoadError
from pagewire.workers.run.runner import Runner
from pagewire.workers.tiers.swap import PinnedSwap
from tests.workers.tiers import swapped_runs


def test_preemption_changes_no_token(load: Callable[..., Runner]) -> None:
    told = threading.Event()
    runner = load(wake=told.set, tier=TierConfig(swap_bytes=1 << 22))
    assert isinstance(runner.tier._swap, PinnedSwap)  # type: ignore[attr-defined]
    size = runner.config.block_size
    needed = 4 * -(-(17 + swapped_runs.NUM_TOKENS) // size)
    expected = swapped_runs.run(runner, told, needed + 2, size)
    assert expected.num_preemptions == 0
    pressed = swapped_runs.run(runner, told, needed // 2, size)
    assert pressed.tokens == expected.tokens
    assert pressed.num_preemptions > 0 and pressed.num_hits > 0
    runner.tier.close()


def test_blocks_of_a_gpu_go_nowhere_else(load: Callable[..., Runner]) -> None:
    with pytest.raises(LoadError, match="kv_peers: blocks of a GPU's memory go to its swap_space alone yet"):
        load(tier=TierConfig(lends=True, swap_bytes=1 << 22))
