"""What metrics and the log say of drafts."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from pagewire.engine_core.metrics.metrics import Metrics, Rates, counts, states, summary
from pagewire.engine_core.schedule.speculation import SpeculationStats
from pagewire.engine_core.schedule.step import SchedulerStats
from pagewire.ipc.speculative import SpeculativeConfig


@pytest.fixture
def core() -> Any:
    """As much of a core as these metrics are read from; 3 rows had drafts: 4 of 4, 1 of 3 and 0 of 2 were right."""
    stats, drafts = SchedulerStats(), SpeculationStats()
    for verified in ((4, 4, 5), (3, 1, 2), (2, 0, 1)):
        drafts.verified(*verified)
    drafts.ran(4, 9, 0.020, 0.034)
    scheduler = SimpleNamespace(
        stats=stats,
        speculation=SimpleNamespace(stats=drafts),
        kv=SimpleNamespace(usage=0.0, group=lambda kind: None),
        running=[],
    )
    config = SimpleNamespace(
        speculation=SpeculativeConfig("ngram"),
        args=SimpleNamespace(
            gpu_memory_utilization=0.9, enable_prefix_caching=True, resolved_kv_dtype=lambda dtype: dtype
        ),
    )
    info = SimpleNamespace(block_size=16, num_blocks=9, dtype="float32", device="cpu")
    return SimpleNamespace(scheduler=scheduler, metrics=Metrics(64), config=config, info=info, tier=None)


def test_counters_and_shares(core: Any) -> None:
    values: dict[str, Any] = {}
    by_place: Counter[str] = Counter()
    for row in [*states(core), *counts(core)]:
        if row["name"].startswith("vllm:spec_decode"):
            values[row["name"].removeprefix("vllm:spec_decode_")] = row["value"]
            by_place.update({row["labels"]["position"]: row["value"]} if "position" in row["labels"] else {})
    assert values["num_drafts_total"] == 3
    assert values["num_draft_tokens_total"] == 9
    assert values["num_accepted_tokens_total"] == 5
    assert values["num_emitted_tokens_total"] == 8
    assert values["draft_acceptance_rate"] == pytest.approx(5 / 9)
    assert values["efficiency"] == pytest.approx(8 / 12)
    assert by_place == {"0": 2, "1": 1, "2": 1, "3": 1}


def update(core: Any, now: float) -> None:
    core.metrics.rates.update(core.scheduler.stats, core.scheduler.speculation.stats, now)


def test_the_log_says_whether_drafts_paid(core: Any) -> None:
    update(core, 10.0)
    line, facts = summary(core)
    assert line.endswith(", speculation: 2.2 tokens a step, 1.7 x")
    assert facts["speculation_gain"] == pytest.approx(1.7)
    update(core, 20.0)  # nothing since
    assert "speculation" not in summary(core)[0]
    core.config.speculation = None
    core.scheduler.speculation.stats.ran(1, 1, 0.1, 0.1)
    update(core, 30.0)
    assert "speculation" not in summary(core)[0]


def test_rates_are_those_of_an_interval() -> None:
    stats, drafts, rates = SchedulerStats(), SpeculationStats(), Rates()
    drafts.ran(10, 10, 1.0, 1.0)
    rates.update(stats, drafts, 1.0)
    assert (rates.tokens_per_step, rates.gain) == (1.0, 1.0)
    drafts.ran(10, 30, 1.0, 2.5)
    rates.update(stats, drafts, 2.0)
    assert (rates.tokens_per_step, rates.gain) == (3.0, 2.5)
