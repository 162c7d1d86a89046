"""Models whose blocks are not kept on disk are refused by name when they are loaded."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pagewire.ipc.wire.tier_messages import TierConfig
from pagewire.ipc.wire.worker_messages import Parallel
from pagewire.workers.errors import LoadError
from pagewire.workers.tiers.disk import reason_against_tier
from tests.workers.architectures import SERVED
from tests.workers.driver import load_runner


def test_stages_of_models_with_states_are_refused(tmp_path: Path) -> None:
    """A stage may have no states, and would keep its parts of prefixes that are not found."""
    runner, _ = load_runner(SERVED["lfm2"].write(tmp_path))
    config, loaded = runner.config, runner.model
    staged = msgspec.structs.replace(config, parallel=Parallel(size=2, stages=2))
    why = reason_against_tier(staged, loaded, runner.device)
    assert why is not None and why.startswith("this model keeps states")
    assert reason_against_tier(config, loaded, runner.device) is None


def test_random_weights_are_refused(tmp_path: Path) -> None:
    folder = SERVED["llama"].write(tmp_path)
    with pytest.raises(LoadError, match="nobody can tell whether another engine has the same model"):
        load_runner(folder, tier=TierConfig(str(tmp_path / "tier"), 1 << 30), load_format="dummy")
